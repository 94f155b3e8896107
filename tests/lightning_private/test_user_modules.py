"""Behavior of Lightning that :mod:`lightning_strategies_ext._lightning.user_modules` requires."""

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.core.optimizer import LightningOptimizer
from torchmetrics import MaxMetric, SumMetric
from torchmetrics.utilities.data import dim_zero_max, dim_zero_sum

from lightning_strategies_ext._lightning import user_modules
from tests.lightning_private.trainers import single_process_trainer
from tests.support.models import MLP, loader


def test_move_optimizers_moves_their_state_but_not_the_step_count() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.Adam([parameter])
    optimizer.step()
    user_modules.move_optimizers(iter([optimizer]), torch.device("meta"))
    devices = {name: tensor.device.type for name, tensor in optimizer.state[parameter].items()}
    assert devices == {"exp_avg": "meta", "exp_avg_sq": "meta", "step": "cpu"}


def test_trainer_of_answers_where_the_public_property_raises() -> None:
    module, trainer = MLP(), single_process_trainer()
    assert user_modules.trainer_of(module) is None
    with pytest.raises(RuntimeError, match="not attached"):
        _ = module.trainer
    module.trainer = trainer
    assert user_modules.trainer_of(module) is trainer


def test_averages_of_a_module_are_found_in_callbacks() -> None:
    module = MLP()
    averaged, copied = torch.optim.swa_utils.AveragedModel(module), MLP()

    class Averages(pl.Callback):
        def __init__(self) -> None:
            self.average, self.copy, self.module, self.layer = averaged, copied, module, torch.nn.Linear(1, 1)

    assert user_modules.averages_of_model(module) == []  # without a Trainer
    module.trainer = single_process_trainer(callbacks=[Averages()])
    assert user_modules.averages_of_model(module) == [averaged, copied]


def test_optimizers_are_found_in_the_wrappers_that_the_user_gets() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    assert user_modules.unwrapped_optimizers([LightningOptimizer(optimizer), optimizer]) == [optimizer, optimizer]


def test_how_processes_merge_the_states_of_a_metric_is_known() -> None:
    assert user_modules.metric_reductions(SumMetric()) == {"sum_value": dim_zero_sum}
    assert user_modules.metric_reductions(MaxMetric()) == {"max_value": dim_zero_max}


def test_random_states_of_all_kinds_are_restored():
    states = user_modules.random_states()
    drawn = torch.rand(()).item(), np.random.rand(), random.random()
    user_modules.set_random_states(states)
    assert (torch.rand(()).item(), np.random.rand(), random.random()) == drawn


def test_a_modules_device_attribute_can_be_set_alone() -> None:
    module = MLP()
    user_modules.set_device(module, torch.device("meta"))
    assert module.device == torch.device("meta")
    assert module.net[0].weight.device == torch.device("cpu")
    user_modules.set_device(module.net, torch.device("meta"))  # no attribute, no effect
    assert "_device" not in vars(module.net)


class Recorder(torch.nn.Module):
    """A strategy's wrapper of a module: it looks up the called method, and calls this method."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.called: list[str | None] = []

    def forward(self, *args: Any) -> Any:
        self.called.append(user_modules.pop_forward_redirection(self.module))
        return getattr(self.module, self.called[-1] or "forward")(*args)


def test_the_method_redirected_by_fabric_is_found_and_forward_is_restored(monkeypatch) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    monkeypatch.setattr(fabric.strategy, "setup_module", Recorder)
    module = MLP()
    module.forward = lambda features: module.net(features)  # a user's attribute, not Fabric's
    model = fabric.setup(module)
    recorder = model._forward_module
    model.mark_forward_method("loss")
    batch = next(iter(loader()))
    assert torch.equal(model.loss(batch), module.loss(batch))
    assert torch.equal(model.predict_step(batch, 0), module.net(batch[0]))
    assert torch.equal(model(batch[0]), module.net(batch[0]))
    assert recorder.called == ["loss", "predict_step", None]


def test_a_metric_that_overrides_its_synchronization_is_recognized() -> None:
    class Own(SumMetric):
        def _sync_dist(self, *args: Any, **kwargs: Any) -> None: ...

    assert user_modules.synchronizes_itself(Own())
    assert not user_modules.synchronizes_itself(SumMetric())


def test_torchmetrics_calls_the_method_that_is_checked_for_overrides() -> None:
    class Own(SumMetric):
        calls = 0

        def _sync_dist(self, *args: Any, **kwargs: Any) -> None:
            self.calls += 1

    metric = Own()
    metric.sync(distributed_available=lambda: True)
    assert metric.calls == 1
