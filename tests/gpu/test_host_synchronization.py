"""Training steps of ``ddp_ext`` do not make the host wait for the GPU; steps of ``ddp`` do (Lightning issue 21487).

Torch's profiler counts over a number of steps and over twice the number, so that one-time events cancel out.
"""

from collections import Counter
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.profiler import ProfilerActivity, profile

from tests.gpu.devices import DEVICE_TYPE, ON_CPU, Ranks
from tests.support.models import MLP, loader, make_trainer

pytestmark = pytest.mark.processes

#: The profiler's names, or their prefixes, of all calls in which a host waits for a GPU or reads from its memory.
WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "aten::_local_scalar_dense",
    "Memcpy DtoH",
)
#: Number of first steps that are not counted: DDP rebuilds its buckets and samples run times in these steps.
FIRST, STEPS = 12, 10


class Counts(pl.Callback):
    """A callback that counts events over ``steps`` steps, from the start of the first step to the end of the last."""

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
    """A net with a batch that is always on the device, so that no copies of batches are counted."""

    batch: Any = None

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        if self.batch is None:
            self.batch = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return self.batch

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


class Reading(InMemory):
    """A net that reads its loss in each step, which the count must include."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.seen = loss.item()
        return loss


def waits_per_step(where: dict[str, Any], strategy: str, make_model: type[InMemory]) -> dict[str, float]:
    counts = [Counts(STEPS), Counts(2 * STEPS)]
    for counted in counts:
        # Within one epoch, because Lightning may wait between two epochs.
        trainer = make_trainer(strategy, max_epochs=1, callbacks=[counted], **where)
        trainer.fit(make_model(), loader(num_samples=4 * 2 * (counted.last + 5)))
        assert counted.launches > 0, "the profiler recorded no events of the device"
    once, twice = (counted.waits for counted in counts)
    return {name: (twice[name] - once[name]) / STEPS for name in WAITS if twice[name] != once[name]}


def test_no_step_makes_the_host_wait(ranks: Ranks) -> None:
    assert ranks.run(waits_per_step, "ddp_ext", InMemory) == [{}] * ranks.world_size


def test_the_count_misses_no_reading_of_a_number(ranks: Ranks) -> None:
    for waits in ranks.run(waits_per_step, "ddp_ext", Reading):
        assert waits["aten::_local_scalar_dense"] == 1
        assert DEVICE_TYPE == "cpu" or waits["Memcpy DtoH"] == 1


def test_every_step_of_stock_makes_the_host_wait_once(two_ranks: Ranks) -> None:
    # If only this test of the module fails, Lightning has fixed issue 21487.
    for waits in two_ranks.run(waits_per_step, "ddp", InMemory):
        assert waits["aten::_local_scalar_dense"] == 1
