"""Departure: a rank that has ended its stage takes part in no more collectives of it, and nobody waits for it there.

Ranks that get different numbers of batches end a stage at different times. Where processes end with it, the others find
the connection closed. Workers stay, so each rank says by its watch (:mod:`.failure_monitor`) that it has ended its
stage. Once
another has, and this rank waits in a collective that the other did not begin, it is cut off from the others, so that
the collective fails. A job has the exit code of the processes that the user or a launcher has started: at its end each
waits for the others that it hears of to end the stage, too, and does not end as if all had gone well if one fails.

What it does not promise: waking a rank out of NCCL, whose watchdog does it at the timeout, or out of a collective
between hosts.
"""

import atexit
import time
from typing import Any

from lightning_strategies_ext.failure import failure_report
from lightning_strategies_ext.failure.ballots import StageExits
from lightning_strategies_ext.failure.failure_monitor import FailureMonitor
from lightning_strategies_ext.failure.process_exit import fail_at_exit
from lightning_strategies_ext.failure.rank_status import CollectiveProgress

#: How long a rank must have waited in one collective of ``shm`` for a rank that has left, in seconds.
COLLECTIVE_GRACE_S = 1.5
#: How much longer to hear why, in seconds.
REASON_TIMEOUT_S = 1.0
_LINGER_POLL_S = 0.05


class StageExitHandler:
    """One rank's part. All ranks create theirs together, for one stage.

    Args:
        watch: Speaks with the others.
        rank: Global rank of this process.
        progress: Of this rank.
        ends_with_process: Whether the job ends with the ranks' processes, as with scripts; workers have a main process.

    Attributes:
        reason: Why this rank was cut off, for the user; None if it was not.
    """

    def __init__(
        self, watch: FailureMonitor, rank: int, progress: CollectiveProgress, *, ends_with_process: bool
    ) -> None:
        self.watch = watch
        self.reason: str | None = None
        self._rank = rank
        self._progress = progress
        self._is_job = ends_with_process
        self._is_closed = False
        self._waiting_for: Any = None
        self._waits_s = 0.0
        watch.on_stage_exits = self._on_stage_exits
        atexit.unregister(_wait_for_others_at_exit)  # the end of the stage before was not that of the job

    def announce_exit(self) -> None:
        """Says that this rank has ended its stage. A second call, or one after :meth:`close`, does nothing."""
        if self._is_closed:
            return
        self.close()
        self.watch.announce_stage_exit(self._progress.num_started())
        if self._is_job:
            atexit.register(
                _wait_for_others_at_exit, self
            )  # which comes before the process group, which was made before, is left

    def close_after_failure(self) -> None:
        """Ends the part of a rank that has failed; nobody need wait for it to learn of anything."""
        if not self._is_closed:
            self.close()
            self.watch.announce_stage_exit(self._progress.num_started(), has_failed=True)

    def explain_collective_error(self) -> str | None:
        """Why a collective has failed, if it did because another rank has ended the stage and then its process."""
        if self.reason is None and not self._is_closed:
            departures = self.watch.stage_exits()
            if departures is not None:
                self._note_reason(departures)
        return self.reason

    def wait_for_others(self) -> list[int]:
        """Waits until all others have ended the stage or failed in it, or it is known why all end.

        Returns:
            Those that have failed or are lost, or whose processes have ended before the stage; none if this one has.
        """
        while True:
            staying, failed = self.watch.ranks_in_stage()
            if (failure := self.watch.wait_for_failure(0.0)) is not None:  # all know of it and end
                return [] if self._rank in failure.ranks else sorted(failed | set(failure.ranks))
            if not staying:
                return sorted(failed)
            time.sleep(_LINGER_POLL_S)

    def close(self) -> None:
        """Ends this rank's part without a word."""
        self._is_closed = True

    def _on_stage_exits(self, departures: StageExits, elapsed_s: float) -> None:
        """Cuts this rank off if it waits for one that has ended the stage; called by the watch."""
        if self._is_closed or self.reason is not None:
            return
        now = self._progress.pending_work()
        self._waits_s = self._waits_s + elapsed_s if now is not None and now is self._waiting_for else 0.0
        self._waiting_for = now
        if self._progress.num_started() > departures.num_started or self._waits_s >= COLLECTIVE_GRACE_S:
            self._note_reason(departures)
            self.watch.abort_own_collectives()

    def _note_reason(self, departures: StageExits) -> None:
        self.reason = (
            f"rank {self._rank} waits in a collective for rank {', '.join(map(str, departures.ranks))}, which has ended"
            " its stage already. Ranks got different numbers of batches, or went different ways. Give all the same"
            " number, by a DistributedSampler or `limit_train_batches`."
        )
        self.watch.announce_stage_exit(self._progress.num_started(), has_failed=True)


def _wait_for_others_at_exit(departure: StageExitHandler) -> None:
    failed = departure.wait_for_others()
    if failed:
        ranks = ", ".join(map(str, failed))
        failure = departure.watch.wait_for_failure(REASON_TIMEOUT_S)
        if failure is not None and departure.watch.is_first_surviving_reporter(failure):
            failure_report.print_report(failure)
        failure_report.print_line(f"rank {ranks} failed after this one had ended its stage; the exit code is 1.")
        fail_at_exit()
