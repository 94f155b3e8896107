"""Behavior of Lightning that :mod:`lightning_strategies_ext._lightning.strategy_parts` requires."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.strategies import DataParallelStrategy as FabricDataParallelStrategy
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from lightning_strategies_ext._lightning import strategy_parts
from tests.lightning_private.trainers import in_own_process, single_process_trainer
from tests.support.models import MLP, loader, make_trainer


def test_layer_sync_is_the_trainers_argument() -> None:
    assert isinstance(strategy_parts.layer_sync(make_trainer("ddp_ext", sync_batchnorm=True).strategy), LayerSync)
    assert strategy_parts.layer_sync(make_trainer("ddp_ext").strategy) is None


def test_a_strategy_creates_its_checkpoint_io_on_first_access() -> None:
    strategy = LightningDDPStrategy()
    given = strategy_parts.checkpoint_io_of(strategy, TorchCheckpointIO)
    assert strategy.checkpoint_io is given
    assert strategy_parts.checkpoint_io_of(strategy, AsyncCheckpointIO) is given


def test_a_wrapping_checkpoint_io_gets_an_inner_one_unless_the_user_set_one() -> None:
    strategy, around = LightningDDPStrategy(), AsyncCheckpointIO()
    strategy_parts.set_checkpoint_io(strategy, around)
    assert strategy_parts.checkpoint_io_of(strategy, TorchCheckpointIO) is strategy.checkpoint_io is around
    given = around.checkpoint_io
    assert isinstance(given, TorchCheckpointIO)
    strategy_parts.checkpoint_io_of(strategy, TorchCheckpointIO)
    assert around.checkpoint_io is given


def test_fabric_skips_the_gradient_exchange_through_a_control_of_this_class() -> None:
    fabric = Fabric(strategy=FabricDataParallelStrategy(), accelerator="cpu", devices=1)
    calls = []

    class Control(strategy_parts.BackwardSyncControl):
        def no_backward_sync(self, module: torch.nn.Module, enabled: bool = True) -> Any:
            calls.append(enabled)
            return nullcontext()

    fabric.strategy._backward_sync_control = Control()
    model = fabric.setup(MLP())
    with fabric.no_backward_sync(model), fabric.no_backward_sync(model, enabled=False):
        assert calls == [True, False]


def test_the_ddp_of_fabric_skips_the_exchange_through_a_control_of_this_class() -> None:
    control = FabricDDPStrategy()._backward_sync_control
    assert type(control) is strategy_parts.DDPBackwardSyncControl
    with pytest.raises(TypeError, match="wrapped in `DistributedDataParallel`"):
        control.no_backward_sync(MLP(), enabled=True)


def test_a_layer_sync_that_is_set_is_the_one_that_the_strategy_has() -> None:
    strategy = make_trainer("ddp_ext").strategy
    plugin = TorchSyncBatchNorm()
    strategy_parts.set_layer_sync(strategy, plugin)
    assert strategy_parts.layer_sync(strategy) is plugin


def stages_on_one_device() -> list[str]:
    called: list[str] = []

    def begin() -> bool:
        called.append("begin")
        return len(called) == 1

    for _ in range(2):
        strategy_parts.wrap_stages_on_one_device(begin, lambda: called.append("end"))
    model, trainer = MLP(), single_process_trainer()
    model.setup = lambda stage: called.append("setup")
    model.teardown = lambda stage: called.append("teardown")
    trainer.fit(model, loader())
    trainer.test(model, loader(), verbose=False)
    return called


@pytest.mark.processes
def test_functions_wrap_stages_on_one_device_and_the_first_can_omit_the_second() -> None:
    assert in_own_process(stages_on_one_device) == [
        "begin",
        "setup",
        "end",
        "teardown",
        "begin",
        "setup",
        "teardown",
    ]


def test_the_trainer_sets_the_module_before_it_refuses_a_compiled_one() -> None:
    """Verifies the assumptions of ``strategy_parts.refuse_compiled_module``."""
    trainer = make_trainer("dp_ext", devices=2, limit_train_batches=1, max_epochs=1)
    with pytest.raises(RuntimeError, match=r"has compiled.*Pass the module without"):
        trainer.fit(torch.compile(MLP(), backend="eager"), loader())
    model = MLP()
    trainer.fit(model, loader())
    assert trainer.lightning_module is model
    assert vars(trainer.strategy)["_lightning_module"] is model


def test_the_change_of_a_layer_sync_plugin_is_reverted_at_the_end_of_fit_only() -> None:
    class Plugin(LayerSync):
        def apply(self, model: torch.nn.Module) -> torch.nn.Module:
            return model

        def revert(self, model: torch.nn.Module) -> torch.nn.Module:
            return torch.nn.Sequential(model)

    trainer = make_trainer("ddp_ext")
    strategy, module = trainer.strategy, MLP()
    module.trainer = trainer
    strategy._lightning_module = strategy.model = module
    for function, is_reverted in ((TrainerFn.FITTING, False), (TrainerFn.TESTING, False), (TrainerFn.FITTING, True)):
        trainer.state.fn = function
        strategy_parts.revert_layer_sync(strategy)
        assert (strategy.model is not module) == is_reverted
        strategy_parts.set_layer_sync(strategy, Plugin())


def test_tear_down_moves_to_the_cpu_and_tears_down_the_plugins_that_exist() -> None:
    torn_down: list[str] = []
    module = MLP()
    optimizer = torch.optim.Adam(module.parameters())
    parts = {
        name: SimpleNamespace(teardown=partial(torn_down.append, name))
        for name in ("precision_plugin", "accelerator", "checkpoint_io")
    }
    strategy_parts.tear_down(SimpleNamespace(optimizers=[optimizer], lightning_module=module, **parts))
    assert torn_down == [*parts]
    early = {**parts, "accelerator": None}
    strategy_parts.tear_down(SimpleNamespace(optimizers=[], lightning_module=None, **early))
    assert torn_down == [*parts, "precision_plugin", "checkpoint_io"]
