"""Ranks with different numbers of batches: one that waits for a rank that has ended its stage fails within seconds."""

import time
from typing import Any

import pytest

from lightning_strategies_ext import DDPSpawnStrategy, DDPStrategy, UnevenInputsError, WorkerRaisedError
from tests.support.ddp_spawn_trainers import seeded, spawn_trainer
from tests.support.models import MLP, assert_same_bits, loader, make_trainer, state_of
from tests.support.ranks import outcomes_of_ranks


class Uneven(MLP):
    """Rank 0 has half as many batches."""

    def train_dataloader(self):
        return loader(num_samples=16 if self.trainer.global_rank == 0 else 32)


EXPECTED = r"rank 1 waits in a collective for rank 0, which has ended its stage already"


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_a_worker_that_has_more_batches_is_told_of(backend):
    model = seeded(Uneven)
    trainer = spawn_trainer(
        DDPSpawnStrategy(process_group_backend=backend), max_epochs=1, use_distributed_sampler=False
    )
    start = time.monotonic()
    with pytest.raises(WorkerRaisedError, match=EXPECTED) as caught:
        trainer.fit(model)
    assert time.monotonic() - start < 60  # of which most is the start of workers on a busy machine
    assert isinstance(caught.value.__cause__, UnevenInputsError)
    assert caught.value.error_index == 1
    assert trainer.global_step == 4  # the state of rank 0 has come back
    again = seeded()
    trainer = spawn_trainer(DDPSpawnStrategy(process_group_backend=backend), max_epochs=1)
    trainer.fit(again, loader())
    assert trainer.global_step == 8


def fit_unevenly(backend: Any) -> str:
    trainer = make_trainer(DDPStrategy(process_group_backend=backend), max_epochs=1, use_distributed_sampler=False)
    try:
        trainer.fit(Uneven())
    except UnevenInputsError as error:
        return str(error)
    time.sleep(15)  # the script goes on
    return "ended"


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_process_that_has_more_batches_is_told_of_while_the_other_goes_on(backend):
    first, second = outcomes_of_ranks(fit_unevenly, backend, timeout_s=100)
    assert first.value == "ended" or first.exit_code == -9, first
    assert EXPECTED in str(second.value), second


def test_ranks_that_end_at_different_times_are_left_alone():
    slow, plain = seeded(EndsSlowly), seeded()
    trainer = spawn_trainer(max_epochs=1)
    trainer.fit(slow, loader())
    assert trainer.callback_metrics["last"] == 1
    spawn_trainer(max_epochs=1).fit(plain, loader())
    assert_same_bits(state_of(slow), state_of(plain))


class EndsSlowly(MLP):
    def on_fit_end(self):
        if self.trainer.global_rank == 1:
            time.sleep(4)

    def on_train_epoch_end(self):
        self.log("last", 1.0, sync_dist=True)
