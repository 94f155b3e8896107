"""After the hang timeout, a hung rank makes all ranks exit with an error that has its stack; a slow rank does not."""

import ctypes
import io
import os
import pdb
import time
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, Dataset

from lightning_strategies_ext import (
    DDPSpawnStrategy,
    DDPStrategy,
    RankFailedError,
    WorkerRaisedError,
)
from lightning_strategies_ext import fabric as ext
from tests.support.ddp_spawn_trainers import spawn_trainer
from tests.support.models import MLP, dataset, loader, make_trainer
from tests.support.ranks import outcomes_of_ranks, run_ranks

#: Longer than a write to a busy disk, and than the start of a DataLoader worker on busy cores.
HANG_TIMEOUT_S = 4.0
LONGER_S = 6.0
#: Process IDs of all ranks, which each rank has.
pids: list[int] = []


class Delays(Callback):
    """A callback that delays or hangs rank 1 at a batch, while rank 0 waits for its gradients."""

    def __init__(self, activity: str, batch_idx: int = 3) -> None:
        self.activity = activity
        self.batch_idx = batch_idx

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pids[:] = trainer.strategy.all_gather(torch.tensor(os.getpid())).tolist()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and batch_idx == self.batch_idx:
            globals()[self.activity](pl_module)


def validate_alone(model: MLP) -> None:
    end = time.monotonic() + LONGER_S
    while time.monotonic() < end:
        with torch.no_grad():
            model.net(torch.randn(512, 8))


def debug(model: MLP) -> None:
    class Waits(io.StringIO):
        def readline(self, *args: Any) -> str:
            time.sleep(LONGER_S)
            return "continue\n"

    pdb.Pdb(stdin=Waits(), stdout=io.StringIO(), nosigint=True).set_trace()


def sleep(model: MLP) -> None:
    time.sleep(LONGER_S)


def sleep_a_little(model: MLP) -> None:
    time.sleep(HANG_TIMEOUT_S / 4)


def sleep_indefinitely(model: MLP) -> None:
    time.sleep(3600)


def stop_all(model: MLP) -> None:
    """Stops both ranks, like a scheduler that reassigns the cores for a while; a child process continues the ranks."""
    ranks = [psutil.Process(pid) for pid in pids]
    if os.fork() == 0:
        for rank in ranks:
            rank.suspend()
        time.sleep(LONGER_S)
        for rank in ranks:
            rank.resume()
        os._exit(0)
    time.sleep(0.5)


def train(activity: str, backend: str, hang_timeout: Any) -> int:
    trainer = make_trainer(
        DDPStrategy(hang_timeout=hang_timeout, process_group_backend=backend),
        max_epochs=1,
        callbacks=[Delays(activity)],
    )
    trainer.fit(MLP(), loader(80))
    return trainer.global_step


@pytest.mark.processes
@pytest.mark.parametrize(
    ("activity", "backend", "hang_timeout"),
    [
        ("validate_alone", "shm", HANG_TIMEOUT_S),
        ("debug", "gloo", HANG_TIMEOUT_S),
        ("sleep_a_little", "shm", timedelta(seconds=HANG_TIMEOUT_S)),
        ("sleep", "gloo", None),
        ("stop_all", "shm", HANG_TIMEOUT_S),
    ],
)
def test_a_slow_rank_is_not_hung(activity, backend, hang_timeout):
    assert run_ranks(train, activity, backend, hang_timeout) == [10, 10]


class HoldsPythonsLock(Callback):
    """A callback that holds the GIL on rank 0 for a while after the last batch, which delays its rank status."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_rank == 0:
            ctypes.PyDLL(None).usleep(900_000)


def train_slow_to_the_end() -> int:
    strategy = DDPStrategy(hang_timeout=HANG_TIMEOUT_S, process_group_backend="gloo")
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[Delays("validate_alone", 9), HoldsPythonsLock()])
    trainer.fit(MLP(), loader(80))
    return trainer.global_step


@pytest.mark.processes
def test_a_rank_that_waited_for_the_last_batch_of_another_rank_is_not_hung():
    assert run_ranks(train_slow_to_the_end) == [10, 10]


class SlowOnce(Dataset):
    """A dataset whose DataLoader worker on rank 1 computes or sleeps for long at a sample of batch 3."""

    def __init__(self, activity: str) -> None:
        self.activity = activity
        self.data = dataset(80)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int):
        if index == 2 * 4 * 3 + 1:  # batches of four samples on two ranks
            end = time.monotonic() + LONGER_S
            while time.monotonic() < end:
                sum(range(1000)) if self.activity == "computes" else time.sleep(3600)
        return self.data[index]


def train_on(activity: str) -> int:
    trainer = make_trainer(DDPStrategy(hang_timeout=HANG_TIMEOUT_S), max_epochs=1)
    trainer.fit(MLP(), DataLoader(SlowOnce(activity), batch_size=4, num_workers=1))
    return trainer.global_step


@pytest.mark.processes
def test_a_rank_whose_dataloader_is_slow_is_not_hung():
    assert run_ranks(train_on, "computes") == [10, 10]


@pytest.mark.processes
def test_a_rank_whose_dataloader_is_idle_is_hung():
    outcomes = outcomes_of_ranks(train_on, "sleeps")
    assert all(outcome.exit_code for outcome in outcomes), outcomes
    assert any("rank 1 is stuck" in outcome.output for outcome in outcomes), "\n".join(map(str, outcomes))


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_that_sleeps_ends_all_ranks_and_the_error_has_the_stacks_of_all(backend):
    trainer = spawn_trainer(
        DDPSpawnStrategy(hang_timeout=HANG_TIMEOUT_S, process_group_backend=backend),
        max_epochs=1,
        callbacks=[Delays("sleep_indefinitely")],
    )
    begin = time.monotonic()
    with pytest.raises(
        WorkerRaisedError, match=r"rank 1 on .* is stuck, last seen in train, epoch 0, step 3"
    ) as caught:
        trainer.fit(MLP(), loader(80))
    assert time.monotonic() - begin < 200  # mostly the start of workers on a busy machine
    assert isinstance(caught.value.__cause__, RankFailedError)
    text = str(caught.value)
    assert "rank 0 waited 4 s for it in" in text
    assert "in sleep_indefinitely\n    time.sleep(3600)" in text
    assert "Rank 0 (train, epoch 0, step 3) waits in" in text
    assert "in training_step" in text or "in backward" in text


class WaitsInItsOwnGroup(Callback):
    """Makes the ranks wait for each other in different groups."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.groups = [torch.distributed.new_group() for _ in range(trainer.world_size)]

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            torch.distributed.all_reduce(torch.ones(3), group=self.groups[trainer.global_rank])


def train_in_own_groups() -> None:
    strategy = DDPStrategy(hang_timeout=HANG_TIMEOUT_S, process_group_backend="gloo")
    make_trainer(strategy, max_epochs=1, callbacks=[WaitsInItsOwnGroup()]).fit(MLP(), loader(80))


@pytest.mark.processes
def test_two_ranks_that_wait_for_each_other_exit_by_themselves_and_one_reports_why():
    outcomes = outcomes_of_ranks(train_in_own_groups)
    output = "".join(outcome.output for outcome in outcomes)
    assert [outcome.exit_code for outcome in outcomes] == [1, 1], output
    assert "did not exit by itself" not in output
    assert output.count("lightning-strategies-ext: ranks 0-1 on") == 1, output
    for outcome in outcomes:
        assert "RankFailedError: ranks 0-1 on" in outcome.output, outcome.output


@pytest.mark.parametrize("kind", [DDPStrategy, DDPSpawnStrategy, ext.DDPStrategy])
@pytest.mark.parametrize(
    ("hang_timeout", "error"), [(0, ValueError), (-1.0, ValueError), ("5", TypeError), (True, TypeError)]
)
def test_an_invalid_hang_timeout_is_rejected(kind, hang_timeout, error):
    with pytest.raises(error, match="`hang_timeout` must be"):
        kind(hang_timeout=hang_timeout)
