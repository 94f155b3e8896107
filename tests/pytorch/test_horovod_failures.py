"""A signal or an exception on one rank of ``horovod_ext`` makes all ranks exit."""

import os
import signal
import sys
import threading
import time
from mmap import mmap
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_strategies_ext._system.connections import record_connections, shut_down_connections
from lightning_strategies_ext.horovod import runtime
from lightning_strategies_ext.horovod.launch_info import LaunchInfo
from tests.support.horovod_ranks import run_horovod, try_horovod
from tests.support.models import MLP, loader, make_trainer
from tests.support.ranks import LIMIT_S, run_ranks

pytestmark = pytest.mark.processes


class Signals(MLP):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)


def train_until_signalled() -> Any:
    steps = []

    class Records(pl.Callback):
        def on_exception(self, trainer, pl_module, exception):
            steps.append((type(exception).__name__, trainer.global_step))

    trainer = make_trainer("horovod_ext", max_epochs=200, callbacks=[Records()])
    try:
        trainer.fit(Signals(), loader())
    except BaseException as exception:
        return steps, type(exception).__name__
    return steps, None


def test_a_sigterm_on_any_rank_ends_all_before_the_same_step():
    first, second = run_horovod("horovodrun", train_until_signalled)
    assert first == second
    assert first[0][0][0] == "SIGTERMException"


class Fails(MLP):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and self.global_rank == 1:
            raise ValueError("a bad sample")
        return super().training_step(batch, batch_idx)


def train_until_failure() -> None:
    make_trainer("horovod_ext").fit(Fails(), loader())


@pytest.mark.parametrize("launcher", ["horovodrun", "python"])
def test_a_failing_rank_ends_the_others(launcher):
    started = time.monotonic()
    output, outcomes = try_horovod(launcher, train_until_failure)
    assert time.monotonic() - started < LIMIT_S / 2
    assert outcomes[1].name == "ValueError"
    assert "a bad sample" in output or "a bad sample" in outcomes[1].text
    assert outcomes.get(0) is None or outcomes[0].name != "NoneType"


def begin_while_another_is_lost(path: Path) -> str:
    import horovod.torch as hvd

    with path.open("r+b") as file:
        reported = mmap(file.fileno(), 2)  # can be read without releasing the GIL
    launch, connections = LaunchInfo.from_environment(), set()
    assert launch is not None
    with record_connections(connections):
        runtime.start(launch, torch.device("cpu"))
    hvd.allreduce(torch.ones(1), name="both are here")
    if launch.rank == 1:
        while not reported[0]:
            time.sleep(0.01)
        shut_down_connections(lambda connection: (connection.laddr, connection.raddr) in connections)
        reported[1] = 1
        return "left"
    time.sleep(0.1)  # Horovod's thread releases the reduced tensors
    sys.setswitchinterval(60)  # this thread keeps the GIL, and Horovod's thread waits
    for number in range(8):
        hvd.allreduce_async(torch.ones(1), name=f"begun {number}")
    reported[0] = 1
    while not reported[1]:
        pass
    is_noticed_at = time.monotonic() + 1
    while time.monotonic() < is_noticed_at:
        pass
    try:
        for number in range(10_000):  # up to 100 s, because a busy machine detects the loss later
            hvd.allreduce_async(torch.ones(1), name=f"another {number}")
            time.sleep(0.01)
    except hvd.HorovodInternalError as error:
        return str(error)
    return "begun"


def test_a_rank_that_starts_an_operation_while_another_is_lost_receives_the_error(tmp_path):
    """Horovod's thread needs two locks to release tensors: Horovod's lock and the GIL."""
    path = tmp_path / "said"
    path.write_bytes(bytes(2))
    first, second = run_horovod("horovodrun", begin_while_another_is_lost, path)
    assert "Horovod has been shut down" in first
    assert second == "left"


def shut_down_at_once() -> list[bool]:
    found = []
    for _ in range(3):
        runtime.start(LaunchInfo("python", 0, 1, 0, 1), torch.device("cpu"))
        threads = [threading.Thread(target=runtime.shut_down, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        found += [thread.is_alive() for thread in threads]
    return found


def test_threads_that_shut_it_down_at_once_all_return():
    """The monitor thread shuts down when another rank hangs, the training thread after the abort of its collective."""
    assert run_ranks(shut_down_at_once, world_size=1) == [[False] * 9]
