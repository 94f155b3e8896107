"""No training step of ``ddp_ext`` makes the host wait for the GPU; with ``ddp`` each does (Lightning issue 21487).

Counted by torch's profiler over so many steps and over twice as many, so that what happens once cancels out.
"""

from collections import Counter
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.profiler import ProfilerActivity, profile

from tests.gpu.devices import DEVICE_TYPE, ON_CPU, Ranks
from tests.support.models import MLP, loader, make_trainer

pytestmark = pytest.mark.processes

#: The profiler's names, or their beginnings, of all by which a host waits for a GPU or reads from it.
WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "aten::_local_scalar_dense",
    "Memcpy DtoH",
)
#: DDP rebuilds its buckets and samples its own times in the first steps.
FIRST, STEPS = 12, 10


class Counts(pl.Callback):
    """Counts over ``steps`` steps, from before the first of them begins to where the last has ended."""

    def __init__(self, steps: int) -> None:
        self.last = FIRST + steps - 1
        self.waits: Counter[str] = Counter()
        self.launches = 0
        self.profile = profile(activities=[ProfilerActivity.CPU, *([] if ON_CPU else [ProfilerActivity.CUDA])])

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == FIRST - 1:
            self.profile.start()
        elif batch_idx == self.last:
            self.profile.stop()
            for event in self.profile.events():
                self.launches += event.name.startswith("aten::addmm" if ON_CPU else "cudaLaunchKernel")
                self.waits.update(name for name in WAITS if event.name.startswith(name))


class InMemory(MLP):
    """Its batch is on the device from the first step on: copying it there is no part of what is counted."""

    batch: Any = None

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        if self.batch is None:
            self.batch = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return self.batch

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


class Reading(InMemory):
    """Reads its loss in every step: what the count must not miss."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.seen = loss.item()
        return loss


def waits_per_step(where: dict[str, Any], strategy: str, make_model: type[InMemory]) -> dict[str, float]:
    counts = [Counts(STEPS), Counts(2 * STEPS)]
    for counted in counts:
        # Within one epoch, since Lightning may wait between two.
        trainer = make_trainer(strategy, max_epochs=1, callbacks=[counted], **where)
        trainer.fit(make_model(), loader(num_samples=4 * 2 * (counted.last + 5)))
        assert counted.launches > 0, "the profiler saw nothing of the device"
    once, twice = (counted.waits for counted in counts)
    return {name: (twice[name] - once[name]) / STEPS for name in WAITS if twice[name] != once[name]}


def test_no_step_of_ours_makes_the_host_wait(ranks: Ranks) -> None:
    assert ranks.run(waits_per_step, "ddp_ext", InMemory) == [{}] * ranks.world_size


def test_the_count_misses_no_reading_of_a_number(ranks: Ranks) -> None:
    for waits in ranks.run(waits_per_step, "ddp_ext", Reading):
        assert waits["aten::_local_scalar_dense"] == 1
        assert DEVICE_TYPE == "cpu" or waits["Memcpy DtoH"] == 1


def test_every_step_of_stock_makes_the_host_wait_once(two_ranks: Ranks) -> None:
    # Where this fails and the tests before pass, Lightning has mended issue 21487.
    for waits in two_ranks.run(waits_per_step, "ddp", InMemory):
        assert waits["aten::_local_scalar_dense"] == 1
