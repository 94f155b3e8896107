"""The signs of a host's ranks: what this one says on the board of what its training thread does, and what others say.

Saying and reading take no lock and wait for nobody; who calls sees to it that only one thread does at a time.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from lightning_strategies_ext.failure.ballots import StageExit, StageExits, StopDecision, StopVote
from lightning_strategies_ext.failure.rank_status import CollectiveProgress, Failure, RankState, RankStatus
from lightning_strategies_ext.failure.status_table import SLOT_NUM_BYTES, StatusTable
from lightning_strategies_ext.failure.thread_activity import ThreadActivity

#: How often ranks are to say something, in seconds.
HEARTBEAT_INTERVAL_S = 0.25
#: A rank is still when it has been at one place for so long, in seconds; from then on it says where.
STACK_AFTER_S = 2.0
#: Modules in which a thread waits for other ranks.
_COLLECTIVE_MODULES = ("torch.distributed", "torch.nn.parallel.distributed", "horovod", "lightning_strategies_ext")
#: Where one of them is no collective.
_OF_FAILURES = "lightning_strategies_ext.failure"
#: What a rank waits for after its part of a stage has ended.
_END_OF_STAGE = object()


class LocalStatus:
    """One rank's view of them. All ranks of a host create theirs together; the calling thread is the one that trains.

    Args:
        store: Shared by the ranks, for these alone.
        rank: Global rank of this process.
        ranks: Those of this host, this one among them.
        progress: Of this rank.
        step_source: See below.

    Attributes:
        activity: Of the thread that trains.
        state: Of this rank.
        stage: See :class:`.RankStatus`.
        step_source: Gives what this rank is at, for people.
        stop_vote: See :class:`.RankStatus`, as for those that follow.
        stop_decision: What this rank knows of it.
        stage_exit: Of this rank.
        stage_exits: What this rank knows of them.
    """

    def __init__(
        self, store: dist.Store, rank: int, ranks: Iterable[int], progress: CollectiveProgress, where: Callable[[], str]
    ) -> None:
        self.activity = ThreadActivity(threading.current_thread())
        self.state: RankState = "finished"
        self.stage = 0
        self.step_source = where
        self.stop_vote: StopVote | None = None
        self.stop_decision: StopDecision | None = None
        self.stage_exit: StageExit | None = None
        self.stage_exits: StageExits | None = None
        self._rank = rank
        self._ranks = sorted(ranks)
        self._progress = progress
        self._heartbeat = self._num_begun = 0
        self._waits_s = 0.0
        self._waited_for: Any = None
        self._last_signs: dict[int, RankStatus] = {}
        self._board = StatusTable.open_for_host(store, "path", rank, self._ranks)

    def sample_training_thread(self, elapsed_s: float) -> None:
        """Looks at the thread that trains, so many seconds after the last time."""
        before, self._num_begun = self._num_begun, self._progress.num_started()
        self.activity.sample(elapsed_s, has_moved=self._num_begun != before)
        waiting_for = _END_OF_STAGE if self.state == "finished" else self._progress.pending_work()
        is_same = waiting_for is not None and waiting_for is self._waited_for
        is_in_collective = is_same or (waiting_for is None and self._is_in_collective())
        has_waited = is_in_collective and (self._num_begun == before or self.state == "finished")
        self._waits_s = self._waits_s + elapsed_s if has_waited else 0.0
        self._waited_for = waiting_for

    def publish(self, failure: Failure | None) -> None:
        """Says what was seen, and what this rank knows to have failed first."""
        self._heartbeat += 1
        if self._board is not None:
            self._board.write(self._sign(failure).dump(SLOT_NUM_BYTES - 64))

    def read(self) -> dict[int, RankStatus]:
        """What each rank has last said, by rank; those that have said nothing so far are missing."""
        if self._board is not None:
            for slot, rank in enumerate(self._ranks):
                content = self._board.read(slot)
                if content is not None:
                    self._last_signs[rank] = RankStatus.load(content)
        return self._last_signs

    def current_step_text(self) -> str:
        """What this rank is at, for people."""
        try:
            return self.step_source()
        except Exception:  # asked beside the training thread, while the Trainer is taken down, say
            return ""

    def close(self) -> None:
        """Lets go of the board. A second call does no harm."""
        if self._board is not None:
            self._board.close()
        self._board = None

    def _sign(self, failure: Failure | None) -> RankStatus:
        activity, waited_for = self.activity, self._waited_for
        is_still = activity.unchanged_s >= STACK_AFTER_S
        return RankStatus(
            rank=self._rank,
            heartbeat=self._heartbeat,
            state=self.state,
            stage=self.stage,
            stage_and_step=self.current_step_text(),
            num_started=self._num_begun,
            in_collective_s=self._waits_s,
            unchanged_s=activity.unchanged_s,
            idle_s=activity.idle_s,
            is_in_debugger=is_still and activity.is_in_debugger,
            collective=getattr(waited_for, "name", "") or ("a collective" if self._waits_s > 0 else ""),
            user_frames=tuple(activity.user_frames()) if is_still else (),
            stack=activity.stack() if is_still else "",
            failure=failure,
            stop_vote=self.stop_vote,
            stop_decision=self.stop_decision,
            stage_exit=self.stage_exit,
            stage_exits=self.stage_exits,
        )

    def _is_in_collective(self) -> bool:
        module = self.activity.module
        return module.startswith(_COLLECTIVE_MODULES) and not module.startswith(_OF_FAILURES)
