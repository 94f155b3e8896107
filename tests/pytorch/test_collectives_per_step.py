"""The collectives of a training step: those of ``ddp_ext``, and those of Lightning's ``ddp``."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.imports import RequirementCache

from tests.failure.test_failures import BATCHES_PER_EPOCH, Steady
from tests.support.models import loader, make_trainer
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes


class CountCollectives(Callback):
    """A callback that profiles ten training steps, from the start of the first step to the start of the eleventh."""

    def __init__(self) -> None:
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 3:
            self.profiler.start()
        elif batch_idx == 13:
            self.profiler.stop()

    def counts(self) -> dict[str, int]:
        names = [event.name for event in self.profiler.events() if event.name.startswith(("c10d::", "shm:"))]
        return {name: names.count(name) for name in set(names)}


def count_collectives_in_ten_steps(strategy: str) -> dict[str, int]:
    count = CountCollectives()
    make_trainer(strategy, callbacks=[count], max_steps=20).fit(Steady(), loader(8 * BATCHES_PER_EPOCH))
    return count.counts()


def test_a_step_exchanges_gradients_and_nothing_else():
    assert run_ranks(count_collectives_in_ten_steps, "ddp_ext") == [{"shm:all_reduce": 10}] * 2


@pytest.mark.skipif(not RequirementCache("lightning>=2.5.3"), reason="Lightning has no such broadcast before 2.5.3")
def test_a_step_of_stock_ddp_also_waits_for_a_broadcast():
    expected = {"c10d::allreduce_": 10, "c10d::broadcast_": 10}
    assert run_ranks(count_collectives_in_ten_steps, "ddp") == [expected] * 2
