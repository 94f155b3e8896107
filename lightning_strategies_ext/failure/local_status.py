"""Local status: publishes this rank's status in the status table of its host, and reads the other statuses there.

Neither blocks nor locks. The caller serializes the calls.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from lightning_strategies_ext.failure.rank_status import (
    CollectiveProgress,
    Failure,
    RankState,
    RankStatus,
    StageExit,
    StageExits,
    StopDecision,
    StopVote,
)
from lightning_strategies_ext.failure.status_table import SLOT_NUM_BYTES, StatusTable
from lightning_strategies_ext.failure.thread_activity import ThreadActivity

#: Seconds between two heartbeats.
HEARTBEAT_INTERVAL_S = 0.25
#: Seconds after which a rank publishes a stack that has not changed.
STACK_AFTER_S = 2.0
#: Modules in which a thread waits for other ranks in a collective.
_COLLECTIVE_MODULES = ("torch.distributed", "torch.nn.parallel.distributed", "horovod", "lightning_strategies_ext")
#: Modules of these that run no collective.
_MODULES_WITHOUT_COLLECTIVES = "lightning_strategies_ext.failure"
#: Stands for the work that a rank waits for after it has finished its stage.
_END_OF_STAGE = object()


class LocalStatus:
    """Statuses of the ranks of this host. Collective among these ranks; the training thread creates it.

    Args:
        store: Store that the ranks of this host share, for this object alone.
        rank: Global rank of this process.
        ranks: Ranks of this host, including this rank.
        progress: Progress of this rank's collectives.
        where: Callable that returns stage and step as text.

    Attributes:
        activity: Activity of the training thread.
        state: State of this rank.
        stage: Number of stages that this rank has begun.
        step_source: Callable that returns stage and step as text.
        stop_vote: This rank's vote in its newest stop agreement.
        stop_decision: Newest decision of a stop agreement that this rank knows of.
        stage_exit: Newest stage exit of this rank.
        stage_exits: Exits of other ranks from this rank's stage.
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
        self._heartbeat = self._num_started = 0
        self._in_collective_s = 0.0
        self._pending_work: Any = None
        self._last_statuses: dict[int, RankStatus] = {}
        self._status_table = StatusTable.open_for_host(store, "path", rank, self._ranks)

    def sample_training_thread(self, elapsed_s: float) -> None:
        """Samples the training thread, ``elapsed_s`` seconds after the last sample."""
        before, self._num_started = self._num_started, self._progress.num_started()
        self.activity.sample(elapsed_s, has_moved=self._num_started != before)
        waiting_for = _END_OF_STAGE if self.state == "finished" else self._progress.pending_work()
        is_same = waiting_for is not None and waiting_for is self._pending_work
        is_in_collective = is_same or (waiting_for is None and self._is_in_collective())
        has_waited = is_in_collective and (self._num_started == before or self.state == "finished")
        self._in_collective_s = self._in_collective_s + elapsed_s if has_waited else 0.0
        self._pending_work = waiting_for

    def publish(self, failure: Failure | None) -> None:
        """Publishes this rank's status and the first failure that it knows of."""
        self._heartbeat += 1
        if self._status_table is not None:
            self._status_table.write(self._status(failure).dump(SLOT_NUM_BYTES - 64))

    def read(self) -> dict[int, RankStatus]:
        """Returns the newest status of each rank of this host, by rank; without ranks that have published none."""
        if self._status_table is not None:
            for slot, rank in enumerate(self._ranks):
                content = self._status_table.read(slot)
                if content is not None:
                    self._last_statuses[rank] = RankStatus.load(content)
        return self._last_statuses

    def current_step_text(self) -> str:
        """Returns stage and step as text; empty if they cannot be determined."""
        try:
            return self.step_source()
        except Exception:  # the training thread may be tearing down the Trainer at the same time
            return ""

    def close(self) -> None:
        """Closes the status table. A second call is a no-op."""
        if self._status_table is not None:
            self._status_table.close()
        self._status_table = None

    def _status(self, failure: Failure | None) -> RankStatus:
        activity, pending_work = self.activity, self._pending_work
        is_still = activity.unchanged_s >= STACK_AFTER_S
        return RankStatus(
            rank=self._rank,
            heartbeat=self._heartbeat,
            state=self.state,
            stage=self.stage,
            stage_and_step=self.current_step_text(),
            num_started=self._num_started,
            in_collective_s=self._in_collective_s,
            unchanged_s=activity.unchanged_s,
            idle_s=activity.idle_s,
            is_in_debugger=is_still and activity.is_in_debugger,
            collective=getattr(pending_work, "name", "") or ("a collective" if self._in_collective_s > 0 else ""),
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
        return module.startswith(_COLLECTIVE_MODULES) and not module.startswith(_MODULES_WITHOUT_COLLECTIVES)
