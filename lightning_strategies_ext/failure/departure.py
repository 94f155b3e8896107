"""Departure: a rank that has ended its stage takes part in no more collectives of it, and nobody waits for it there.

Ranks that get different numbers of batches end a stage at different times. Where processes end with it, the others find
the connection closed. Workers stay, so each rank says in the shared key-value store that it has ended its stage, and
each rank that has not looks there (:mod:`.store_thread`). Once another has, and this rank waits in a collective that
the other did not begin, it is cut off from the others, so that the collective fails. The store goes with rank 0, so at
the end of its process rank 0 first gives the others a moment to learn of it; and since that process is the one that
the user has started, it does not end as if all had gone well then.

What it does not promise: waking a rank out of NCCL, whose watchdog does it at the timeout, or out of a collective
between hosts.
"""

import atexit
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count

import torch.distributed as dist

from lightning_strategies_ext.failure import report
from lightning_strategies_ext.failure.ending import fail_at_exit
from lightning_strategies_ext.failure.signs import Failure, Progress
from lightning_strategies_ext.failure.store_thread import StoreThread

log = logging.getLogger(__name__)

#: How often a rank looks, in seconds; the ranks of large worlds look less often, for rank 0 to serve 1,000 a second.
POLL_INTERVAL_S = 0.5
#: How long a rank must have waited in one collective of ``shm`` for a rank that has left, in seconds.
PATIENCE_S = 1.5
#: How much longer to hear why, in seconds.
WHY_S = 1.0
_LINGER_POLL_S = 0.05

_stage_numbers: Iterator[int] = count()


class Departure:
    """One rank's part. All ranks create theirs together, for one stage.

    Args:
        store: The store that all ranks share.
        thread: Asks the store.
        rank: Global rank of this process.
        world_size: Number of ranks.
        progress: Of this rank.
        cut_off: Lets the collective fail that this rank is in, if its backend can.
        died: The other ranks of this host whose processes have ended.
        why: Waits for some seconds at most to be told what has failed first.
        is_job: Whether the job ends with the process of rank 0, as with scripts; workers have a main process.

    Attributes:
        reason: Why this rank was cut off, for the user; None if it was not.
    """

    def __init__(
        self,
        store: dist.Store,
        thread: StoreThread,
        rank: int,
        world_size: int,
        progress: Progress,
        cut_off: Callable[[], None],
        died: Callable[[], set[int]],
        why: Callable[[float], Failure | None],
        is_job: bool,
    ) -> None:
        self._store = dist.PrefixStore(f"lightning_strategies_ext/departure/{next(_stage_numbers)}", store)
        self._rank = rank
        self._world_size = world_size
        self.interval_s = max(POLL_INTERVAL_S, world_size / 1000)
        self._progress = progress
        self._cut_off = cut_off
        self._died = died
        self.why = why
        self._is_job = is_job
        self.reason: str | None = None
        self._is_closed = False
        self._has_somebody_left = False
        self._waiting_for: object = None
        self._waits_s = 0.0
        self._thread = thread
        thread.ask(self)

    def depart(self) -> None:
        """Says that this rank has ended its stage. A second call, or one after :meth:`close`, does nothing."""
        if self._is_closed:
            return
        self.close()
        self._say(str(self._rank), str(self._progress.num_begun()))
        self._say("somebody")
        if self._rank == 0 and self._is_job:
            _linger_at_exit(self)

    def fail(self) -> None:
        """Ends the part of a rank that has failed; nobody need wait for it to learn of anything."""
        if not self._is_closed:
            self.close()
            self._say(_failed(self._rank))

    def explain(self) -> str | None:
        """Why a collective has failed, if it did because another rank has ended the stage and then its process."""
        if self.reason is None and not self._is_closed:
            with suppress(RuntimeError):  # the store went away with rank 0, which has ended otherwise
                self._note_reason(self._departed())
        return self.reason

    def linger(self) -> list[int]:
        """Waits until all others have ended the stage or failed in it, or it is known why all end.

        Returns:
            Those that have failed or are lost, or whose processes have ended before the stage.
        """
        others = {rank for rank in range(self._world_size) if rank != self._rank}
        failed: set[int] = set()
        with suppress(RuntimeError):  # the store is elsewhere, and gone
            while others and not self._store.check([str(rank) for rank in others]):
                died = self._died()  # asked first: a rank may say that it has ended the stage, and then end
                others = {rank for rank in others if not self._store.check([str(rank)])}
                failed |= {rank for rank in others if rank in died or self._store.check([_failed(rank)])}
                if (failure := self.why(0.0)) is not None:  # all know of it and end: some without a word in the store
                    return sorted(failed | set(failure.ranks))
                others -= failed
                time.sleep(max(_LINGER_POLL_S, len(others) / 500))
        return sorted(failed)

    def abandon(self) -> None:
        """Ends this rank's part without a word to the others, who may be gone with the store."""
        self._is_closed = True

    def close(self) -> None:
        """Ends this rank's part without a word."""
        self._is_closed = True
        self._thread.drop(self)

    def look(self) -> bool:
        """Asks the store who has ended the stage, and cuts this rank off if it waits for one. Whether to ask again."""
        try:
            if self._has_somebody_left:
                return not self._is_waiting_in_vain()
            self._has_somebody_left = self._store.check(["somebody"])
        except RuntimeError as error:  # the store went away with rank 0
            log.debug("rank %d no longer asks who has ended the stage: %s", self._rank, error)
            return False
        return True

    def _is_waiting_in_vain(self) -> bool:
        departed = self._departed()
        now = self._progress.waiting_for()
        self._waits_s = self._waits_s + self.interval_s if now is not None and now is self._waiting_for else 0.0
        self._waiting_for = now
        if self._is_closed or (self._progress.num_begun() <= min(departed.values()) and self._waits_s < PATIENCE_S):
            return False
        self._note_reason(departed)
        self._cut_off()
        return True

    def _note_reason(self, departed: dict[int, int]) -> None:
        if departed:
            self.reason = (
                f"rank {self._rank} waits in a collective for rank {', '.join(map(str, departed))}, which has ended its"
                " stage already. Ranks got different numbers of batches, or went different ways. Give all the same"
                " number, by a DistributedSampler or `limit_train_batches`."
            )
            self._say(_failed(self._rank))

    def _say(self, key: str, value: str = "") -> None:
        try:
            self._store.set(key, value)
        except RuntimeError as error:  # the store went away with rank 0, which has ended
            log.debug("rank %d cannot say %r of the stage: %s", self._rank, key, error)

    def _departed(self) -> dict[int, int]:
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        return {rank: int(self._store.get(str(rank))) for rank in others if self._store.check([str(rank)])}


def _failed(rank: int) -> str:
    return f"{rank} has failed"


_last: Departure | None = None


def _linger_at_exit(departure: Departure) -> None:
    global _last
    _last = departure
    atexit.unregister(_linger)
    atexit.register(_linger)  # so that it comes before the process group, which was made before, is left


def _linger() -> None:
    failed = [] if _last is None else _last.linger()
    if failed:
        ranks = ", ".join(map(str, failed))
        failure = None if _last is None else _last.why(WHY_S)
        if failure is not None:
            report.show_block(failure)
        report.say(f"rank {ranks} failed after this one had ended its stage; the exit code is 1.")
        fail_at_exit()
