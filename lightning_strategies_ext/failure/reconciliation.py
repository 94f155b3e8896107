"""Reconciliation: when one rank fails, the other ranks on its host end too, instead of waiting for it.

A rank that fails says so in the key-value store that the ranks share, with its trace. Ranks that fail as well, on their
own or because a collective lost its peer, say so too and are left to end by themselves. A rank that is still running
after a grace period is blocked where no exception reaches it, and is killed.

What it does not promise: ending ranks on other hosts. Those end when their backend notices the lost connection (gloo:
at once; NCCL: at its timeout).
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import count

import psutil
import torch.distributed as dist

from lightning_strategies_ext.peers import Peer, host_identity

#: How long failing ranks may take to say so before connections are closed on the others, in seconds.
ANNOUNCE_S = 1.0
#: How long the others then have to end by themselves, in seconds.
GRACE_S = 5.0
_POLL_INTERVAL_S = 0.05
# Counted per process and not per strategy: what one Trainer has left in the store must not be read by the next.
_stage_numbers: Iterator[int] = count()


class Reconciliation:
    """One rank's knowledge of the others. Create it on all ranks together: it learns where each one runs.

    Args:
        store: The store that all ranks share.
        rank: Global rank of this process.
        world_size: Number of ranks.
        wake: Lets ranks that are blocked in a collective with this one fail, if it can; gets those that are.

    Attributes:
        default_store: That store.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, wake: Callable[[Sequence[Peer]], None]) -> None:
        self._rank = rank
        self._wake = wake
        self.default_store = store
        addresses = dist.PrefixStore(f"lightning_strategies_ext/peers/{next(_stage_numbers)}", store)
        addresses.set(str(rank), json.dumps(asdict(Peer.this_process(rank))))
        others = [other for other in range(world_size) if other != rank]
        self._peers: Sequence[Peer] = [Peer(**json.loads(addresses.get(str(other)))) for other in others]
        self._host = host_identity()
        self.start_stage()

    def start_stage(self) -> None:
        """Forgets the failures of the stage before; called by all ranks together."""
        prefix = f"lightning_strategies_ext/reconciliation/{next(_stage_numbers)}"
        self._store = dist.PrefixStore(prefix, self.default_store)

    def wake_this_rank(self) -> None:
        """Lets the collective fail that this rank is in, if its backend can."""
        self._wake(self._peers)

    def died(self) -> set[int]:
        """The other ranks of this host whose processes have ended."""
        return {peer.rank for peer in self._peers if peer.host == self._host and not peer.is_running()}

    def first_failure(self) -> str | None:
        """The trace of another rank that failed before, with its rank, or None."""
        for peer in self._peers:
            if self._has_failed(peer):
                return f"Rank {peer.rank} failed first:\n{self._store.get(_key(peer.rank)).decode()}"
        return None

    def announce(self, trace: str) -> None:
        """Says that this rank has failed and will end by itself; returns at once."""
        with suppress(RuntimeError):  # the store went away with rank 0: the others know that something is wrong
            self._store.set(_key(self._rank), trace)

    def reconciliate(self, trace: str) -> None:
        """Announces that this rank has failed and ends the ranks of this host that do not end by themselves.

        Returns after at most :data:`ANNOUNCE_S` + :data:`GRACE_S` seconds, at once when the others have failed too.

        Args:
            trace: The trace of this rank's failure, shown if another rank has to be killed.
        """
        self.announce(trace)
        if not self._wait_for_others(ANNOUNCE_S):
            self._wake(self._unreconciled())
            self._wait_for_others(GRACE_S)
        for peer in self._unreconciled():
            _say(f"rank {self._rank} failed and rank {peer.rank} (pid {peer.pid}) does not end, it is killed. {trace}")
            with suppress(psutil.NoSuchProcess):
                psutil.Process(peer.pid).kill()

    def _wait_for_others(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._unreconciled():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_INTERVAL_S)
        return True

    def _unreconciled(self) -> list[Peer]:
        return [
            peer for peer in self._peers if peer.host == self._host and peer.is_running() and not self._has_failed(peer)
        ]

    def _has_failed(self, peer: Peer) -> bool:
        try:
            return bool(self._store.check([_key(peer.rank)]))
        except RuntimeError:
            return False


def _key(rank: int) -> str:
    return f"failed/{rank}"


def _say(message: str) -> None:
    print(f"lightning-strategies-ext: {message}", file=sys.stderr, flush=True)  # noqa: T201
