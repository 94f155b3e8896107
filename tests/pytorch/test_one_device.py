"""A Trainer on one device computes metrics of its own data only, in a process that is one of several ranks."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torchmetrics import SumMetric

from tests.support.models import MLP, loader, make_trainer
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes
NUM_SAMPLES = 12


class Counting(MLP):
    """A model that counts samples with a metric, which torchmetrics sums over the ranks of the default group."""

    def __init__(self) -> None:
        super().__init__()
        self.count = SumMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.count.update(torch.ones(len(batch[0])))
        self.log("count", self.count)


class ValidatesOnRankZero(Callback):
    """A callback that validates with a separate Trainer at the end of the epoch, during ``fit``."""

    count = -1.0

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            self.count = count_with("auto")


def count_with(strategy: Any, devices: int = 1) -> float:
    trainer = make_trainer(strategy, devices=devices)
    (results,) = trainer.validate(Counting(), loader(NUM_SAMPLES), verbose=False)
    return float(results["count"])


def sum_over_ranks() -> float:
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return float(ones)


def on_one_after_two() -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    callback = ValidatesOnRankZero()
    trainer = make_trainer("ddp_ext", max_epochs=1, callbacks=[callback])
    model = MLP()
    trainer.fit(model, loader())
    found: dict[str, Any] = {"in a hook": callback.count, "ranks after fit": sum_over_ranks()}
    if trainer.is_global_zero:
        found["rank 0 alone"] = count_with("auto")
    for strategy in ("auto", "dp_ext", "ddp_ext"):
        found[strategy] = count_with(strategy)
    one_device = make_trainer("ddp_ext", devices=1, max_epochs=1)
    one_device.fit(MLP(), loader(NUM_SAMPLES, batch_size=4))
    found["steps on one device"] = one_device.global_step
    found["ranks after one device"] = sum_over_ranks()
    found["on two"] = count_with("ddp_ext", devices=2)
    trainer = make_trainer("ddp_ext", max_epochs=1)
    trainer.fit(model, loader())
    found["weights"] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
    return found


def test_each_rank_counts_its_own_data_on_one_device_and_ranks_continue_together() -> None:
    first, second = run_ranks(on_one_after_two)
    assert first.pop("rank 0 alone") == first.pop("in a hook") == NUM_SAMPLES
    assert second.pop("in a hook") == -1
    assert first == second
    del first["weights"]
    assert first == {
        "ranks after fit": 2,
        "auto": NUM_SAMPLES,
        "dp_ext": NUM_SAMPLES,
        "ddp_ext": NUM_SAMPLES,
        "steps on one device": NUM_SAMPLES // 4,
        "ranks after one device": 2,
        "on two": NUM_SAMPLES,
    }
