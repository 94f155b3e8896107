"""A module without trainable parameters raises an error as soon as this is certain, and not earlier."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import Callback

from tests.support.models import MLP, loader, make_trainer
from tests.support.ranks import run_ranks, run_script

CPU, NO_GPU = torch.device("cpu"), torch.device("cuda", torch.cuda.device_count())


class Frozen(MLP):
    """A module whose parameters require no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        return self.loss(batch).requires_grad_()

    def configure_optimizers(self):
        return None


class UnfreezesInConfigureModel(Frozen):
    def configure_model(self) -> None:
        self.requires_grad_()


class UnfreezesInSetup(Frozen):
    def setup(self, stage: str) -> None:
        self.requires_grad_()


class StaysFrozenInSetup(Frozen):
    def setup(self, stage: str) -> None:
        """Does not unfreeze anything."""


class Unfreeze(Callback):
    def setup(self, trainer, pl_module, stage: str) -> None:
        pl_module.requires_grad_()


class IsUnfrozenByItsCallback(Frozen):
    def configure_callbacks(self):
        return Unfreeze()


SCRIPT = """
print("a process starts", flush=True)
from tests.support.models import loader, make_trainer
from tests.pytorch.test_nothing_to_train import Frozen
make_trainer("ddp_ext").fit(Frozen(), loader())
"""


@pytest.mark.processes
def test_a_model_with_nothing_to_train_is_refused_before_a_second_process_starts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = run_script(script)
    assert result.returncode != 0
    assert result.stdout.count("a process starts") == 1, result.stdout
    assert result.stdout.count("No parameter of Frozen requires a gradient") == 1, result.stdout
    assert "Unfreeze some (`parameter.requires_grad_()`)" in result.stdout


@pytest.mark.parametrize("strategy", ["ddp_fork_ext", "ddp_notebook_ext"])
def test_a_model_with_nothing_to_train_is_refused_before_a_worker_starts(strategy: str) -> None:
    with pytest.raises(ValueError, match="No parameter of Frozen requires a gradient"):
        make_trainer(strategy).fit(Frozen(), loader())


def fit_alone(make_model: Callable[[], Frozen], callbacks: list[Callback]) -> int | str:
    """Trains for one step in one process; returns the number of steps, or the error."""
    trainer = make_trainer("ddp_ext", devices=1, max_steps=1, callbacks=callbacks)
    model = make_model()
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        trainer.fit(model, loader())
    except ValueError as error:
        return str(error)
    return trainer.global_step


@pytest.mark.processes
@pytest.mark.parametrize(
    ("make_model", "callbacks"),
    [
        (UnfreezesInConfigureModel, []),
        (UnfreezesInSetup, []),
        (Frozen, [Unfreeze()]),
        (IsUnfrozenByItsCallback, []),
    ],
    ids=["configure_model", "setup", "a callback's setup", "setup of the model's callback"],
)
def test_a_model_that_is_unfrozen_before_training_is_accepted(make_model: type, callbacks: list[Callback]) -> None:
    assert run_ranks(fit_alone, make_model, callbacks, world_size=1) == [1]


@pytest.mark.processes
def test_a_model_that_setup_left_frozen_is_refused_then() -> None:
    (message,) = run_ranks(fit_alone, StaysFrozenInSetup, [], world_size=1)
    assert "No parameter of StaysFrozenInSetup requires a gradient" in message


def validate_frozen() -> list[str]:
    trainer = make_trainer("ddp_ext", devices=1)
    return list(trainer.validate(Frozen(), loader(), verbose=False)[0])


@pytest.mark.processes
def test_a_frozen_model_can_be_validated() -> None:
    assert run_ranks(validate_frozen, world_size=1) == [["val_loss"]]


def set_up_frozen_under_fabric() -> str:
    fabric = Fabric(strategy="ddp_ext", accelerator="cpu", devices=1)
    fabric.launch()
    with pytest.raises(ValueError, match="No parameter of Sequential requires a gradient") as caught:
        fabric.setup_module(Frozen().net)
    return str(caught.value)


@pytest.mark.processes
def test_fabric_refuses_to_set_up_a_module_with_nothing_to_train() -> None:
    run_ranks(set_up_frozen_under_fabric, world_size=1)
