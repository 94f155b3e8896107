"""Departure: a rank that has ended its stage takes part in no more collectives of it, and nobody waits for it there.

Ranks that get different numbers of batches end a stage at different times. Where processes end with it, the others find
the connection closed. Workers stay, so each rank says in the shared key-value store that it has ended its stage, and a
thread of each rank that has not looks there. Once another has, and this rank waits in a collective that the other did
not begin, it is cut off from the others, so that the collective fails.

What it does not promise: waking a rank out of NCCL, whose watchdog does it at the timeout, or out of a collective
between hosts.
"""

import logging
import threading
from collections.abc import Iterator
from itertools import count
from typing import Any, Protocol

import torch.distributed as dist

log = logging.getLogger(__name__)

#: How often a rank looks, in seconds; the ranks of large worlds look less often, for rank 0 to serve 1,000 a second.
POLL_INTERVAL_S = 0.5
#: How long a rank must have waited in one collective of ``shm`` for a rank that has left, in seconds.
PATIENCE_S = 1.5

_stage_numbers: Iterator[int] = count()


class Progress(Protocol):
    """How far this rank is among the collectives of a stage; an engine knows."""

    def num_begun(self) -> int:
        """How many collectives this rank has begun; zero where the backend does not count."""

    def waiting_for(self) -> Any:
        """The operation that this rank waits for, if it does and its backend knows."""

    def cut_off(self) -> None:
        """Lets the collective fail that this rank is in, if its backend can."""


class Departure:
    """One rank's part. All ranks create theirs together, for one stage.

    Args:
        store: The store that all ranks share.
        rank: Global rank of this process.
        world_size: Number of ranks.
        progress: Of this rank.

    Attributes:
        reason: Why this rank was cut off, for the user; None if it was not.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, progress: Progress) -> None:
        self._store = dist.PrefixStore(f"lightning_strategies_ext/departure/{next(_stage_numbers)}", store)
        self._rank = rank
        self._world_size = world_size
        self._interval_s = max(POLL_INTERVAL_S, world_size / 1000)
        self._progress = progress
        self.reason: str | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="departure", daemon=True)
        self._thread.start()

    def depart(self) -> None:
        """Says that this rank has ended its stage. A second call, or one after :meth:`close`, does nothing."""
        if self._closed.is_set():
            return
        self.close()
        try:
            self._store.set(str(self._rank), str(self._progress.num_begun()))
            self._store.set("somebody", "")
        except RuntimeError as error:  # the store went away with rank 0, which has ended
            log.debug("rank %d cannot say that it has ended its stage: %s", self._rank, error)

    def close(self) -> None:
        """Ends this rank's part without a word."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        try:
            while not self._closed.wait(self._interval_s):
                if self._store.check(["somebody"]):
                    self._watch_collectives()
                    return
        except RuntimeError as error:  # the store went away with rank 0
            log.debug("rank %d no longer watches who has ended the stage: %s", self._rank, error)

    def _watch_collectives(self) -> None:
        waiting, polls = None, 0
        while not self._closed.wait(self._interval_s):
            departed = self._departed()
            begun = min(departed.values())
            now = self._progress.waiting_for()
            polls = polls + 1 if now is not None and now is waiting else 0
            waiting = now
            if self._progress.num_begun() > begun or polls * self._interval_s >= PATIENCE_S:
                ranks = ", ".join(map(str, departed))
                self.reason = (
                    f"rank {self._rank} waits in a collective for rank {ranks}, which has ended its stage already."
                    " Ranks got different numbers of batches, or went different ways. Give all the same number, by a"
                    " DistributedSampler or `limit_train_batches`."
                )
                self._progress.cut_off()
                return

    def _departed(self) -> dict[int, int]:
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        return {rank: int(self._store.get(str(rank))) for rank in others if self._store.check([str(rank)])}
