"""One that others wait for in vain is killed by one of them; in a whole ``fit``, see :mod:`...elastic`'s tests."""

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_strategies_ext._system.peers import Peer, exchange_peers
from lightning_strategies_ext.failure.process_exit import MONITOR_EXIT_CODE
from lightning_strategies_ext.failure.rank_status import CollectiveProgress
from lightning_strategies_ext.failure.vigil import CONFIRMATION_S, Vigil
from tests.support.ranks import Outcome, outcomes_of_ranks

pytestmark = pytest.mark.processes

PATIENCE_S = 2.0
#: Which rank 0 serves.
stores: list[dist.TCPStore] = []


class Waits(CollectiveProgress):
    """Of a rank that waits in a collective for ever."""

    def pending_work(self) -> Any:
        return PATIENCE_S


def begin(progress: CollectiveProgress) -> tuple[list[Peer], Vigil]:
    rank, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), world_size, rank == 0, timeout)
    stores.append(store)
    peers = list(exchange_peers(dist.PrefixStore("peers", store), rank, world_size).values())
    return peers, Vigil(dist.PrefixStore("vigil", store), peers, rank, progress, PATIENCE_S, lambda: "step 3")


def codes_of(outcomes: list[Outcome]) -> list[int | None]:
    return [outcome.exit_code for outcome in outcomes]


def wait_for_each_other() -> None:
    begin(Waits())
    time.sleep(60)


def test_all_that_wait_for_each_other_end():
    outcomes = outcomes_of_ranks(wait_for_each_other, world_size=3)
    assert codes_of(outcomes) == [MONITOR_EXIT_CODE, -signal.SIGKILL, -signal.SIGKILL], "\n".join(map(str, outcomes))
    assert "ranks 0-2 on " in outcomes[0].output
    assert "are stuck, last seen in step 3:" in outcomes[0].output
    assert "Killing ranks 0-2 so that the other ranks can continue." in outcomes[0].output


def wait_having_left() -> None:
    peers, vigil = begin(CollectiveProgress())
    if os.environ["LOCAL_RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    if os.environ["LOCAL_RANK"] == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    vigil.mark_finished()
    deadline = time.monotonic() + 60
    while peers[1].is_running() and time.monotonic() < deadline:
        time.sleep(0.1)
    vigil.close()


def test_one_that_is_stopped_is_killed_by_one_that_has_left_the_others():
    outcomes = outcomes_of_ranks(wait_having_left, world_size=3)
    assert codes_of(outcomes) == [0, -signal.SIGKILL, -signal.SIGKILL], "\n".join(map(str, outcomes))
    assert "rank 1 is stopped" in outcomes[0].output
    assert outcomes[0].output.count("Killing rank 1 so that the other ranks can continue.") == 1


def compute_and_end() -> bool:
    rank = int(os.environ["LOCAL_RANK"])
    _, vigil = begin(Waits() if rank == 0 else CollectiveProgress())
    deadline = time.monotonic() + 2.5 * PATIENCE_S
    while time.monotonic() < deadline:
        time.sleep(0.05) if rank == 0 else sum(range(10_000))
    if rank == 1:
        vigil.close()
        os._exit(0)
    time.sleep(2 * CONFIRMATION_S)  # in a collective with nobody, from which it would be woken
    vigil.close()
    vigil.close()
    return True


def test_one_that_computes_is_waited_for_and_nobody_is_killed_who_waits_for_one_that_has_ended():
    outcomes = outcomes_of_ranks(compute_and_end)
    assert codes_of(outcomes) == [0, 0], str(outcomes[1])
    assert outcomes[0].value
    assert "killed" not in "".join(outcome.output for outcome in outcomes)
