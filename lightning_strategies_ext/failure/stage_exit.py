"""Stage exits: a rank that has finished its stage takes part in no more collectives, and no rank waits for it there.

Ranks with different numbers of batches finish a stage at different times. If processes exit with the stage, the other
ranks find their connections closed. Workers do not exit, so each rank publishes its stage exit through its failure
monitor (:mod:`.failure_monitor`). If this rank then waits in a collective that the other rank has not started, the
collective is aborted. The exit code of a job is that of the processes that the user or a launcher has started: at its
exit, each rank waits until the other ranks have exited the stage too, and exits with code 1 if one of them fails.

Limitations: collectives of NCCL, which torch's watchdog aborts at the timeout, and collectives between hosts are not
aborted.
"""

import atexit
import time
from typing import Any

from lightning_strategies_ext._system.call_sites import call_site_of_exception
from lightning_strategies_ext.failure import failure_report
from lightning_strategies_ext.failure.failure_detector import collective_grace_s
from lightning_strategies_ext.failure.failure_monitor import FailureMonitor
from lightning_strategies_ext.failure.process_exit import fail_at_exit
from lightning_strategies_ext.failure.rank_status import StageExits, format_ranks, merge_stage_exits

#: Seconds that a rank waits at its exit for the reason of a failure.
REASON_TIMEOUT_S = 1.0
_POLL_S = 0.05


class StageExitHandler:
    """Announces the stage exit of this rank, and handles those of other ranks.

    Collective: all ranks create it together.

    Args:
        monitor: Failure monitor of this rank.
        ends_with_process: Whether the job ends with the ranks' processes, as with scripts; workers have a main process.

    Attributes:
        reason: Why this rank's collectives were aborted, for the user; None if they were not.
    """

    def __init__(self, monitor: FailureMonitor, *, ends_with_process: bool) -> None:
        self.monitor = monitor
        self.reason: str | None = None
        self._exits: StageExits | None = None
        self._ends_with_process = ends_with_process
        self._is_closed = False
        self._grace_s = collective_grace_s(monitor.observe())
        self._pending_work: Any = None
        self._in_collective_s = 0.0
        monitor.on_stage_exits = self._on_stage_exits
        atexit.unregister(_wait_for_others_at_exit)  # the job has another stage

    def announce_exit(self, *, has_failed: bool) -> None:
        """Announces that this rank has finished its stage, or failed in it. A no-op after :meth:`close`."""
        if self._is_closed:
            return
        self.close()
        self.monitor.announce_stage_exit(has_failed=has_failed)
        if self._ends_with_process and not has_failed:
            atexit.register(_wait_for_others_at_exit, self)  # runs before the process group is destroyed

    def explain_collective_error(self, exception: BaseException) -> str | None:
        """Returns why a collective raised, if another rank had finished the stage and exited; else None."""
        if self.reason is None and not self._is_closed:
            observed = self.monitor.observe()
            exits = merge_stage_exits(observed.statuses.values(), observed.own.stage)
            if exits is not None:
                self._set_reason(exits, "")
        # The monitor may read the stack of this thread after the exception has left the user's call.
        if self._exits is not None and (site := call_site_of_exception(exception)):
            self.reason = self._describe(self._exits, site)
        return self.reason

    def wait_for_others(self) -> list[int]:
        """Waits until all other ranks have exited the stage or failed in it, or until this rank knows of a failure.

        Returns:
            The ranks that failed, are lost, or whose processes exited before the stage; empty if this rank failed.
        """
        while True:
            staying, failed = self.monitor.ranks_in_stage()
            if (failure := self.monitor.wait_for_failure(0.0)) is not None:  # all ranks exit
                return [] if self.monitor.rank in failure.ranks else sorted(failed | set(failure.ranks))
            if not staying:
                return sorted(failed)
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Ends this rank's part; announces nothing."""
        self._is_closed = True

    def _on_stage_exits(self, exits: StageExits, elapsed_s: float) -> None:
        """Aborts this rank's collectives if it waits for a rank that has finished the stage; called by the monitor."""
        if self._is_closed or self.reason is not None:
            return
        now = self.monitor.progress.pending_work()
        is_same = now is not None and now is self._pending_work
        self._in_collective_s = self._in_collective_s + elapsed_s if is_same else 0.0
        self._pending_work = now
        if self.monitor.progress.num_started() > exits.num_started or self._in_collective_s >= self._grace_s:
            self._set_reason(exits, self.monitor.call_site())
            self.monitor.policy.abort_own_collectives()

    def _set_reason(self, exits: StageExits, call_site: str) -> None:
        self._exits, self.reason = exits, self._describe(exits, call_site)
        self.monitor.announce_stage_exit(has_failed=True)

    def _describe(self, exits: StageExits, call_site: str) -> str:
        others, has = format_ranks(exits.ranks, exits.num_ranks), "has" if exits.num_ranks == 1 else "have"
        rank = self.monitor.rank
        return (
            f"rank {rank} is waiting in a collective for {others}, which {has} already finished this stage."
            + (f" Rank {rank} waits at {call_site}." if call_site else "")
            + " The ranks processed different numbers of batches or took different code paths. Give"
            " all ranks the same number of batches (`DistributedSampler`, `limit_train_batches=...`), and call"
            " collectives on all ranks."
        )


def _wait_for_others_at_exit(handler: StageExitHandler) -> None:
    failed = handler.wait_for_others()
    if failed:
        failure = handler.monitor.wait_for_failure(REASON_TIMEOUT_S)
        if failure is not None:
            observed = handler.monitor.observe()
            if observed.rank == min(observed.peers.keys() - failure.unable_to_report or failure.ranks):
                failure_report.print_report(failure)
        ranks = format_ranks(failed)
        failure_report.print_line(f"{ranks} failed after this rank had finished its stage. Exiting with code 1.")
        fail_at_exit()
