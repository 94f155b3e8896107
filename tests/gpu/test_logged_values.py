"""Values of ``self.log(..., sync_dist=True)`` over NCCL: equal to ``ddp``, in one exchange that no host waits for."""

import time
from typing import Any

import pytest
import torch
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC

from lightning_strategies_ext.pytorch import metric_states
from tests.gpu.devices import Ranks
from tests.gpu.test_host_synchronization import InMemory, waits_per_step
from tests.pytorch.test_logged_values import OPERATIONS, Recorder
from tests.support.models import MLP, loader, make_trainer
from tests.support.ranks import leave_process_group

pytestmark = pytest.mark.processes


class Logs(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.area = MeanMetric(), BinaryAUROC()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        for op in OPERATIONS:
            value = loss.detach().double() if op == "max" else loss
            self.log(f"{op}_both", value, sync_dist=True, reduce_fx=op, on_step=True, on_epoch=True)
            self.log(f"{op}_half", loss.detach().half(), sync_dist=True, reduce_fx=op)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True, on_step=True)
        self.mean.update(loss)
        self.area.update(torch.rand(4, device=self.device), torch.tensor([0, 1, 1, 0], device=self.device))
        self.log_dict({"mean": self.mean, "area": self.area})


def log_with_both(where: dict[str, Any]) -> list[Any]:
    received, exchanges = [], []
    gather_bytes = metric_states.gather_bytes

    def count_and_gather(*args: Any) -> Any:
        exchanges.append(args)
        return gather_bytes(*args)

    metric_states.gather_bytes = count_and_gather
    for name in ("ddp_ext", "ddp"):
        torch.manual_seed(3)
        recorder = Recorder()
        trainer = make_trainer(name, logger=recorder, log_every_n_steps=1, max_epochs=2, **where)
        trainer.fit(Logs(), loader(32), loader(32))
        received.append(recorder.received)
        leave_process_group()
    return [*received, len(exchanges)]


def test_values_are_bitwise_those_of_ddp(two_ranks: Ranks) -> None:
    for ext, stock, num_exchanges in two_ranks.run(log_with_both):
        assert len(ext) > 8
        assert ext == stock
        assert num_exchanges == 2  # states of metrics, in each of two epochs


class LogsInMemory(InMemory):
    """Logs values that are on the device."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for key in range(5):
            self.log(f"key_{key}", loss.detach(), sync_dist=True, on_step=True, on_epoch=key > 2)
        return loss


def test_a_step_that_logs_does_not_make_the_host_wait(two_ranks: Ranks) -> None:
    for waits in two_ranks.run(waits_per_step, "ddp_ext", LogsInMemory):
        waits.pop("Memcpy DtoH", None)  # the digests, to pinned memory
        assert waits == {}


class LogsOtherKey(MLP):
    def on_train_start(self) -> None:
        self.store = self.trainer.strategy.prefix_store("test", 0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("b" if self.global_rank and batch_idx > 2 else "a", loss, sync_dist=True)
        time.sleep(0.05)  # a slow step, so that the GPU completes the exchange before the next step
        return loss


def log_other_key(where: dict[str, Any]) -> str:
    model, trainer = LogsOtherKey(), make_trainer("ddp_ext", max_epochs=1, **where)
    try:
        trainer.fit(model, loader(128))
    except Exception as error:
        model.store.set(f"raised {trainer.global_rank}", "")
        model.store.wait([f"raised {rank}" for rank in range(2)])
        return str(error)
    return ""


def test_other_keys_on_one_rank_are_an_error(two_ranks: Ranks) -> None:
    texts = two_ranks.run(log_other_key)
    assert all("Rank 0 reduces logged values ['a'] in training_step" in text for text in texts), texts
