"""Start and exit of the failure monitor; test_failures.py tests its effects."""

import faulthandler
import os
import time

import psutil
import pytest
import torch.distributed as dist

from lightning_strategies_ext import RankFailedError
from lightning_strategies_ext._system import peers
from lightning_strategies_ext.failure import failure_monitor, process_exit
from lightning_strategies_ext.failure.failure_monitor import FailureMonitor
from lightning_strategies_ext.failure.rank_status import CollectiveProgress
from tests.support.ranks import outcomes_of_ranks, run_ranks

pytestmark = pytest.mark.processes


def fail_and_end_at_once() -> list[str]:
    rank = int(os.environ["LOCAL_RANK"])
    peers.host_identity = lambda: f"host {rank}"  # each rank has its own host
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, is_master=rank == 0)
    own = FailureMonitor(store, rank, 2, CollectiveProgress(), lambda peers: None, lambda pid: None)
    own.begin_stage(None)
    store.set(f"{rank} is there", "")
    store.wait([f"{1 - rank} is there"])
    if rank == 1:
        own.announce_failure(ValueError("no"))
        own.close()
        return []
    failure = own.wait_for_failure(60.0)
    own.close()
    return [] if failure is None else [failure.headline]


def create_monitor(startup_timeout_s: float) -> bool | str:
    rank = int(os.environ["LOCAL_RANK"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, is_master=rank == 0)

    class Slow(failure_monitor.ExitTracker):
        def __init__(self, *args):
            time.sleep(1.0)
            store.set("nearly", "")
            super().__init__(*args)

    if rank == 1:
        failure_monitor.ExitTracker = Slow
    failure_monitor.STARTUP_TIMEOUT_S = startup_timeout_s
    try:
        FailureMonitor(store, rank, 2, CollectiveProgress(), lambda peers: None, lambda pid: None)
        found: bool | str = store.check(["nearly"])
    except RankFailedError as error:
        found = str(error)
    if rank == 1:
        store.set("1 is done", "")
    else:
        store.wait(["1 is done"])  # this process serves the store
    return found


def test_no_rank_continues_before_all_monitors_run():
    assert run_ranks(create_monitor, 60.0) == [True, True]


def test_a_rank_whose_peers_do_not_reach_the_startup_barrier_raises():
    first, _ = run_ranks(create_monitor, 0.1)
    assert "Only 1 of 2 ranks passed the startup barrier within 0.1 s" in first


def fail_while_the_output_of_the_other_rank_is_not_read() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, is_master=rank == 0)
    own = FailureMonitor(store, rank, 2, CollectiveProgress(), lambda peers: None, lambda pid: None)
    own.begin_stage(None)
    if rank == 0:
        pid = int(store.get("1"))
        own.announce_failure(ValueError("no"))
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.1)
        return
    reads, writes = os.pipe()
    os.close(reads)
    os.dup2(writes, 2)
    store.set("1", str(os.getpid()))
    time.sleep(1000)


def test_a_rank_whose_output_is_read_no_more_is_terminated_by_its_monitor():
    _, second = outcomes_of_ranks(fail_while_the_output_of_the_other_rank_is_not_read)
    assert second.exit_code == process_exit.MONITOR_EXIT_CODE


def finish_the_last_stage_after_a_failure(is_raised: bool) -> bool | None:
    rank = int(os.environ["LOCAL_RANK"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, is_master=rank == 0)
    own = FailureMonitor(store, rank, 2, CollectiveProgress(), lambda peers: None, lambda pid: None)
    own.begin_stage(None)
    if rank == 1:
        own.announce_failure(ValueError("no"))
        store.wait(["0 has ended"])
        return None
    assert own.wait_for_failure(60.0) is not None
    own.was_raised = is_raised
    own.finish_stage()
    own._on_exit()
    faulthandler.cancel_dump_traceback_later()  # the time limit of the exit
    store.set("0 has ended", "")
    must_fail, process_exit._must_fail = process_exit._must_fail, False
    return must_fail


@pytest.mark.parametrize("is_raised", [False, True])
def test_a_failure_detected_at_exit_is_reported_unless_the_script_caught_it(is_raised):
    first, _ = outcomes_of_ranks(finish_the_last_stage_after_a_failure, is_raised)
    assert first.error is None, first
    assert first.value is not is_raised
    assert ("rank 1 on" in first.output and "ValueError: no" in first.output) is not is_raised, first.output


def test_a_rank_that_is_alone_on_its_host_publishes_its_failure_before_it_exits():
    assert run_ranks(fail_and_end_at_once) == [["ValueError: no"], []]
