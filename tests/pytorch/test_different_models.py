"""Ranks with different models raise an error in `setup`, with the first difference."""

import inspect
import signal
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_strategies_ext import DDPStrategy, HorovodStrategy, ModelMismatchError
from lightning_strategies_ext.fabric import DDPStrategy as FabricDDPStrategy
from tests.support.horovod_ranks import try_horovod
from tests.support.models import MLP, loader, make_trainer
from tests.support.ranks import outcomes_of_ranks, run_ranks

pytestmark = pytest.mark.processes


class Different(MLP):
    """A model with one difference on the last rank."""

    def __init__(self, difference: str) -> None:
        super().__init__()
        self.difference = difference

    def configure_model(self) -> None:
        is_last = self.trainer.global_rank == self.trainer.world_size - 1
        if not is_last:
            return
        if self.difference == "shape":
            self.net[0] = nn.Linear(8, 17)
        elif self.difference == "one more":
            self.more = nn.Linear(2, 2)
        elif self.difference == "dtype":
            self.net[2].double()
        elif self.difference == "frozen":
            self.net[2].bias.requires_grad_(False)
        elif self.difference == "buffer":
            self.register_buffer("seen", torch.zeros(3))
        elif self.difference == "name":
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Identity(), nn.ReLU(), nn.Linear(16, 3))


EXPECTED_TEXTS = {
    "shape": ("parameter `net.0.weight` (float32, shape (16, 8))", "`net.0.weight` (float32, shape (17, 8))"),
    "one more": ("nothing more", "parameter `more.weight` (float32, shape (2, 2))"),
    "dtype": ("`net.2.weight` (float32, shape (3, 16))", "`net.2.weight` (float64, shape (3, 16))"),
    "frozen": ("`net.2.bias` (float32, shape (3,))", "`net.2.bias` (float32, shape (3,), without gradient)"),
    "buffer": ("nothing more", "buffer `seen` (float32, shape (3,))"),
    "name": ("`net.2.weight` (float32", "`net.3.weight` (float32"),
}


def stage(name: str, difference: str, backend: str | None = None, devices: int = 2) -> None:
    trainer = make_trainer(DDPStrategy(process_group_backend=backend), devices, max_epochs=1)
    getattr(trainer, name)(Different(difference), loader())


def errors(*args: Any, world_size: int = 2) -> list[str]:
    """Returns the errors of the ranks; on a busy machine, other ranks may terminate a rank that raises late."""
    outcomes = outcomes_of_ranks(stage, *args, world_size=world_size)
    assert all(outcome.error is not None and (outcome.exit_code != 0) for outcome in outcomes), outcomes
    errors = [outcome.error for outcome in outcomes if outcome.exit_code != -signal.SIGKILL]
    assert errors, outcomes
    return errors


@pytest.mark.parametrize("difference", EXPECTED_TEXTS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_error_of_each_rank_names_the_first_difference(difference: str, world_size: int):
    first, last = EXPECTED_TEXTS[difference]
    for error in errors("fit", difference, None, world_size, world_size=world_size):
        assert "ModelMismatchError: The ranks have different `Different` models: rank 0 has" in error
        assert first in error
        assert f"rank {world_size - 1} has" in error
        assert last in error


@pytest.mark.parametrize("name", ["validate", "predict"])
def test_different_models_are_an_error_without_training(name: str):
    assert all("ModelMismatchError" in error for error in errors(name, "shape"))


def test_different_models_are_an_error_over_gloo():
    assert all("ModelMismatchError" in error for error in errors("fit", "shape", "gloo"))


def evaluate_frozen() -> bool:
    stage("validate", "frozen")
    return True


def test_requires_grad_may_differ_without_training():
    assert run_ranks(evaluate_frozen) == [True, True]


def own_start_of_weights() -> bool:
    trainer = make_trainer(DDPStrategy(init_sync=False, broadcast_buffers=False), max_epochs=1)
    trainer.fit(Different("buffer"), loader())
    return True


@pytest.mark.skipif(
    "init_sync" not in inspect.signature(DistributedDataParallel).parameters,
    reason="this torch's DDP has no `init_sync`",
)
def test_without_init_sync_models_are_not_compared_at_the_start():
    assert run_ranks(own_start_of_weights) == [True, True]


def with_fabric() -> str:
    import os

    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricDDPStrategy())
    fabric.launch()
    module = nn.Linear(4, 2 + int(os.environ["LOCAL_RANK"]))
    with pytest.raises(ModelMismatchError) as raised:
        fabric.setup(module)
    return str(raised.value)


def test_different_models_are_an_error_under_fabric():
    assert all("rank 0 has the parameter `weight`" in text for text in run_ranks(with_fabric))


def over_horovod() -> str:
    trainer = make_trainer(HorovodStrategy(), max_epochs=1)
    with pytest.raises(ModelMismatchError) as raised:
        trainer.fit(Different("shape"), loader())
    return str(raised.value)


def test_different_models_are_an_error_over_horovod():
    # The rank that is notified first exits, and Horovod's thread may terminate the other rank.
    output, outcomes = try_horovod("python", over_horovod)
    assert outcomes, output
    assert all(EXPECTED_TEXTS["shape"][1] in text for text in outcomes.values())
