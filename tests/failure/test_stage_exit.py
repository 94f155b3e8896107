"""Ranks with different numbers of batches: a rank that waits for a rank that has finished its stage raises."""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_strategies_ext import ChecksOptions, DDPSpawnStrategy, DDPStrategy, UnevenInputsError, WorkerRaisedError
from lightning_strategies_ext._system import peers
from lightning_strategies_ext.checks import GROUP_FIELDS, TRAINING_FIELDS
from lightning_strategies_ext.failure.failure_monitor import FailureMonitor
from lightning_strategies_ext.failure.rank_status import CollectiveProgress
from lightning_strategies_ext.failure.stage_exit import StageExitHandler
from tests.support.ddp_spawn_trainers import seeded, spawn_trainer
from tests.support.models import MLP, assert_same_bits, loader, make_trainer, state_of
from tests.support.ranks import outcomes_of_ranks, run_ranks, run_script

pytestmark = pytest.mark.processes


class Uneven(MLP):
    """A model with a barrier in each validation batch, and with half as many batches on one rank."""

    short = 0

    def val_dataloader(self):
        return loader(num_samples=16 if self.trainer.global_rank == self.short else 32)

    def validation_step(self, batch, batch_idx):
        self.trainer.strategy.barrier()


#: Disables the comparison at the end of an epoch, with which the other rank's collective would pair.
WITHOUT_EPOCH_CHECKS = ChecksOptions(excluded_fields=(*GROUP_FIELDS, *TRAINING_FIELDS))
EXPECTED = r"rank 1 is waiting in a collective for rank 0, which has already finished this stage"


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_a_worker_with_more_batches_gets_an_error(backend):
    model = seeded(Uneven)
    trainer = spawn_trainer(
        DDPSpawnStrategy(process_group_backend=backend, checks=WITHOUT_EPOCH_CHECKS),
        max_epochs=1,
        use_distributed_sampler=False,
    )
    start = time.monotonic()
    with pytest.raises(WorkerRaisedError, match=EXPECTED) as caught:
        trainer.fit(model, loader(num_samples=16))
    assert time.monotonic() - start < 200  # mostly the start of workers on a busy machine
    assert isinstance(caught.value.__cause__, UnevenInputsError)
    assert caught.value.error_index == 1
    assert trainer.global_step == 4  # the state of rank 0 was returned
    again = seeded()
    trainer = spawn_trainer(DDPSpawnStrategy(process_group_backend=backend), max_epochs=1)
    trainer.fit(again, loader())
    assert trainer.global_step == 8


def fit_unevenly(backend: Any, announced: Path) -> str:
    strategy = DDPStrategy(process_group_backend=backend, checks=WITHOUT_EPOCH_CHECKS)
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False)
    try:
        trainer.fit(Uneven(), loader(num_samples=16))
    except UnevenInputsError as error:
        announced.touch()
        return str(error)
    while not announced.exists():  # the script continues
        time.sleep(0.1)
    return "ended"


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_process_with_more_batches_gets_an_error_while_the_other_process_runs(backend, tmp_path):
    first, second = outcomes_of_ranks(fit_unevenly, backend, tmp_path / "told")
    assert first.value == "ended" or first.exit_code == -9, first
    assert EXPECTED in str(second.value), second


def fit_with_epoch_checks() -> str:
    trainer = make_trainer(DDPStrategy(), max_epochs=1, use_distributed_sampler=False)
    with pytest.raises(RuntimeError) as raised:
        trainer.fit(Uneven(), loader(num_samples=16))
    return str(raised.value)


def test_the_comparison_after_an_epoch_names_a_collective_that_only_one_rank_calls():
    for text in run_ranks(fit_with_epoch_checks):
        assert "rank 0 calls all_gather" in text
        assert "rank 1 calls barrier" in text
        assert "`barrier` in validation_step" in text


def test_ranks_that_finish_at_different_times_get_no_error():
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


UNEVEN_SCRIPT = """
import sys

from lightning_strategies_ext import DDPStrategy
from tests.failure.test_stage_exit import WITHOUT_EPOCH_CHECKS, Uneven
from tests.support.models import loader, make_trainer

if __name__ == "__main__":
    strategy = DDPStrategy(process_group_backend=sys.argv[2], checks=WITHOUT_EPOCH_CHECKS)
    model = Uneven()
    model.short = int(sys.argv[1])
    make_trainer(strategy, max_epochs=1, use_distributed_sampler=False).fit(model, loader(num_samples=16))
"""


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("short", [0, 1])
def test_a_rank_with_more_batches_gets_an_error_after_the_stage_exit_of_its_peer(
    tmp_path: Path, short: int, backend: str
):
    script = tmp_path / "script.py"
    script.write_text(UNEVEN_SCRIPT)
    result = run_script(script, str(short), backend)
    assert result.returncode != 0
    longer = 1 - short
    reason = f"rank {longer} is waiting in a collective for rank {short}, which has already finished this stage"
    assert f"UnevenInputsError: {reason}" in result.stdout


KILLED_SCRIPT = """
import os
import signal

from tests.support.models import MLP, loader, make_trainer


class Killed(MLP):
    def predict_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().predict_step(batch, batch_idx)


if __name__ == "__main__":
    make_trainer("ddp_ext").predict(Killed(), loader())
"""


def test_a_rank_that_is_killed_outside_of_collectives_fails_the_job(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(KILLED_SCRIPT)
    result = run_script(script)
    assert result.returncode != 0, result.stdout
    assert re.search(r"rank 1 on .* failed first.*\n.*was killed by SIGKILL", result.stdout), result.stdout


def wait_at_exit(
    does: Callable[[StageExitHandler], None] | None, num_hosts: int, waiting_rank: int
) -> tuple[list[int], float] | None:
    rank = int(os.environ["LOCAL_RANK"])
    if num_hosts == 2:
        peers.host_identity = lambda: f"host {rank}"  # each rank has its own host
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, is_master=rank == 0)
    monitor = FailureMonitor(store, rank, 2, CollectiveProgress(), lambda peers: None, lambda pid: None)
    monitor.begin_stage(None)
    handler = StageExitHandler(monitor, ends_with_process=False)
    if rank == waiting_rank:
        handler.announce_exit(has_failed=False)
        begin = time.monotonic()
        store.set("one lingers", "")
        result = handler.wait_for_others(), time.monotonic() - begin
        if does is not None:
            store.set("it has ended", "")
            if rank == 0:  # this process serves the store
                store.wait(["the other has read it"])
        monitor.close()  # otherwise, this process would fail, too
        return result
    store.wait(["one lingers"])
    time.sleep(1.0)  # the minimum wait of the other rank
    if does is not None:
        does(handler)
        store.wait(["it has ended"])
        store.set("the other has read it", "")
    monitor.close()
    return None


def announce_exit(handler: StageExitHandler) -> None:
    handler.announce_exit(has_failed=False)


def fail_in_stage(handler: StageExitHandler) -> None:
    handler.announce_exit(has_failed=True)


def raise_an_error(handler: StageExitHandler) -> None:
    handler.monitor.announce_failure(ValueError("no"))


@pytest.mark.parametrize(
    ("does", "is_failure", "num_hosts", "waiting_rank"),
    [
        *(
            (announce_exit, False, 1, 0),
            (fail_in_stage, True, 1, 0),
            (raise_an_error, True, 1, 0),
            (None, True, 1, 0),
        ),
        *(
            (announce_exit, False, 2, 0),
            (raise_an_error, True, 2, 0),
            (announce_exit, False, 2, 1),
        ),
        *(
            (fail_in_stage, True, 2, 1),
            (None, False, 2, 1),
        ),  # a rank that closes its link is not waited for
    ],
)
def test_a_rank_waits_at_its_exit_until_the_other_ranks_finish_fail_or_exit(does, is_failure, num_hosts, waiting_rank):
    """The wait also works for a rank that has not received a status of another host."""
    waited_s, seconds = run_ranks(wait_at_exit, does, num_hosts, waiting_rank)[waiting_rank]
    assert waited_s == ([1 - waiting_rank] if is_failure else [])
    assert seconds >= 1.0
