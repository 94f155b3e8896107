"""The signs of a host's ranks: what this one says on the board of what its training thread does, and what others say.

Saying and reading take no lock and wait for nobody; who calls sees to it that only one thread does at a time.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from lightning_strategies_ext.failure.activity import Activity
from lightning_strategies_ext.failure.ballots import Ballot, Decision, Departed, Departures
from lightning_strategies_ext.failure.board import SLOT_NUM_BYTES, Board
from lightning_strategies_ext.failure.signs import Failure, Progress, Sign, State

#: How often ranks are to say something, in seconds.
INTERVAL_S = 0.25
#: A rank is still when it has been at one place for so long, in seconds; from then on it says where.
STILL_S = 2.0
#: Modules in which a thread waits for other ranks.
_OF_COLLECTIVES = ("torch.distributed", "torch.nn.parallel.distributed", "horovod", "lightning_strategies_ext")
#: Where one of them is no collective.
_OF_FAILURES = "lightning_strategies_ext.failure"
#: What a rank waits for after its part of a stage has ended.
_END_OF_STAGE = object()


class HostSigns:
    """One rank's view of them. All ranks of a host create theirs together; the calling thread is the one that trains.

    Args:
        store: Shared by the ranks, for these alone.
        rank: Global rank of this process.
        ranks: Those of this host, this one among them.
        progress: Of this rank.
        where: See below.

    Attributes:
        activity: Of the thread that trains.
        state: Of this rank.
        stage: See :class:`.Sign`.
        where: Gives what this rank is at, for people.
        ballot: See :class:`.Sign`, as for those that follow.
        decision: What this rank knows of it.
        departed: Of this rank.
        departures: What this rank knows of them.
    """

    def __init__(
        self, store: dist.Store, rank: int, ranks: Iterable[int], progress: Progress, where: Callable[[], str]
    ) -> None:
        self.activity = Activity(threading.current_thread())
        self.state: State = "left"
        self.stage = 0
        self.where = where
        self.ballot: Ballot | None = None
        self.decision: Decision | None = None
        self.departed: Departed | None = None
        self.departures: Departures | None = None
        self._rank = rank
        self._ranks = sorted(ranks)
        self._progress = progress
        self._beats = self._num_begun = 0
        self._waits_s = 0.0
        self._waited_for: Any = None
        self._last_signs: dict[int, Sign] = {}
        self._board = Board.of_host(store, "path", rank, self._ranks)

    def look(self, elapsed_s: float) -> None:
        """Looks at the thread that trains, so many seconds after the last time."""
        before, self._num_begun = self._num_begun, self._progress.num_begun()
        self.activity.sample(elapsed_s, has_moved=self._num_begun != before)
        waiting_for = _END_OF_STAGE if self.state == "left" else self._progress.waiting_for()
        is_same = waiting_for is not None and waiting_for is self._waited_for
        is_in_collective = is_same or (waiting_for is None and self._is_in_collective())
        has_waited = is_in_collective and (self._num_begun == before or self.state == "left")
        self._waits_s = self._waits_s + elapsed_s if has_waited else 0.0
        self._waited_for = waiting_for

    def say(self, failure: Failure | None) -> None:
        """Says what was seen, and what this rank knows to have failed first."""
        self._beats += 1
        if self._board is not None:
            self._board.write(self._sign(failure).dump(SLOT_NUM_BYTES - 64))

    def read(self) -> dict[int, Sign]:
        """What each rank has last said, by rank; those that have said nothing so far are missing."""
        if self._board is not None:
            for slot, rank in enumerate(self._ranks):
                content = self._board.read(slot)
                if content is not None:
                    self._last_signs[rank] = Sign.load(content)
        return self._last_signs

    def where_now(self) -> str:
        """What this rank is at, for people."""
        try:
            return self.where()
        except Exception:  # asked beside the training thread, while the Trainer is taken down, say
            return ""

    def close(self) -> None:
        """Lets go of the board. A second call does no harm."""
        if self._board is not None:
            self._board.close()
        self._board = None

    def _sign(self, failure: Failure | None) -> Sign:
        activity, waited_for = self.activity, self._waited_for
        is_still = activity.still_s >= STILL_S
        return Sign(
            rank=self._rank,
            beats=self._beats,
            state=self.state,
            stage=self.stage,
            where=self.where_now(),
            num_begun=self._num_begun,
            waits_s=self._waits_s,
            still_s=activity.still_s,
            idle_s=activity.idle_s,
            is_debugged=is_still and activity.is_debugged,
            collective=getattr(waited_for, "name", "") or ("a collective" if self._waits_s > 0 else ""),
            frames=tuple(activity.user_frames()) if is_still else (),
            stack=activity.stack() if is_still else "",
            failure=failure,
            ballot=self.ballot,
            decision=self.decision,
            departed=self.departed,
            departures=self.departures,
        )

    def _is_in_collective(self) -> bool:
        module = self.activity.module
        return module.startswith(_OF_COLLECTIVES) and not module.startswith(_OF_FAILURES)
