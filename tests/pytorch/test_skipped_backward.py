"""A rank that skips a backward pass: over ``shm``, all ranks raise before gradients of different batches are averaged.

Permitted differences between the passes of a step, or between ranks, raise no error.
"""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_strategies_ext import DDPStrategy
from lightning_strategies_ext.shm.native_build import NATIVE_VARIABLE
from tests.support import ranks
from tests.support.models import MLP, TwoOptimizers, loader, make_trainer
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes


class Skips(LightningModule):
    """A model in which rank 0 skips the gradients of batch 4, and rank 1 the gradients of batch 2."""

    def __init__(self, is_manual: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.automatic_optimization = not is_manual
        self.last_batch = -1

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = (self.weight * 2.0).sum()
        is_skipped = batch_idx == (4, 2)[self.global_rank]
        self.last_batch = batch_idx
        if self.automatic_optimization:
            return torch.zeros((), requires_grad=True) if is_skipped else loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if not is_skipped:
            self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1.0)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.arange(12), batch_size=1)


def skip(is_manual: bool, arguments: dict[str, Any]) -> tuple[str, float]:
    """Returns the error of this rank, and the weight, from which each exchanged gradient has taken 2."""
    model = Skips(is_manual)
    with pytest.raises(RuntimeError) as caught:  # DDP's C++ code changes the class
        make_trainer(DDPStrategy(**arguments), max_epochs=1).fit(model)
    return str(caught.value), model.weight.item()


@pytest.mark.parametrize("implementation", ["compiled", "in rounds"])
@pytest.mark.parametrize("arguments", [{}, {"bucket_cap_mb": 25}, {"ddp_comm_hook": "bf16"}], ids=str)
@pytest.mark.parametrize("is_manual", [False, True], ids=["zero", "manual"])
def test_all_ranks_get_an_error_that_names_the_batches(
    is_manual: bool, arguments: dict[str, Any], implementation: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(ranks.rank_environment, NATIVE_VARIABLE, "1" if implementation == "compiled" else "0")
    compresses = "ddp_comm_hook" in arguments
    for text, weight in run_ranks(skip, is_manual, {"compression": "bf16"} if compresses else arguments):
        assert "rank 0 exchanges gradients of batch 2" in text
        assert "rank 1 exchanges gradients of batch 3" in text
        assert weight == -4.0  # batches 0 and 1


class Accumulates(MLP):
    """Manual optimization with an additional pass without an exchange on one rank, and with passes that raise."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if batch_idx % 3 == self.global_rank:
            with self.trainer.strategy.block_backward_sync():
                self.manual_backward(self.loss(batch))
        self.manual_backward(self.loss(batch))
        self.manual_backward(2 * self.loss(batch))
        optimizer.step()
        self.log("loss", self.loss(batch).detach(), sync_dist=True)

    def on_train_epoch_end(self):
        torch.distributed.all_reduce(torch.ones(3))


class Evaluates(MLP):
    """A model that computes gradients in validation, and calls torch.distributed in a step."""

    def training_step(self, batch, batch_idx):
        torch.distributed.all_reduce(torch.ones(2))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        with torch.inference_mode(False), torch.enable_grad():
            torch.autograd.grad(self.net(batch[0].clone()).sum(), list(self.net.parameters()))
        super().validation_step(batch, batch_idx)


def train(model_class: type[MLP], arguments: dict[str, Any], options: dict[str, Any]) -> int:
    model = model_class()
    trainer = make_trainer(DDPStrategy(**arguments), **options)
    trainer.fit(model, loader(), loader())
    return trainer.global_step


@pytest.mark.parametrize(
    "arguments",
    [{}, {"find_unused_parameters": True}, {"process_group_backend": "gloo"}],
    ids=["direct", "reducer", "gloo"],
)
@pytest.mark.parametrize(
    ("model_class", "options"),
    [
        (Accumulates, {"max_epochs": 2}),
        (Evaluates, {"max_epochs": 2, "val_check_interval": 3}),
        (TwoOptimizers, {"max_epochs": 1}),
        (MLP, {"max_epochs": 2, "accumulate_grad_batches": 3}),
    ],
)
def test_permitted_differences_raise_no_error(
    model_class: type[MLP], options: dict[str, Any], arguments: dict[str, Any]
):
    if model_class is TwoOptimizers:
        arguments = {**arguments, "find_unused_parameters": True}
    assert min(run_ranks(train, model_class, arguments, options)) > 0
