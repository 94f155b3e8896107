"""Between hosts: one rank of each tells the first of all what its host's board says, and hears from that one.

They speak on lines, see :mod:`.lines`, which the watch's thread looks after: nobody waits for anybody, nor for a store.
What has failed is said at once, and so is what ranks agree on, and the first rank passes it on; the rest is said at an
interval, and more seldom the more ranks there are, so that the first hears at most :data:`SIGNS_PER_S`. When the
process ends that speaks for its host, the next one calls.

A host is lost when its kernel does not answer any more. Where the system cannot tell, one that has said nothing for as
long is.
"""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import torch.distributed as dist

from lightning_strategies_ext.connections import LOST_S
from lightning_strategies_ext.failure.center import Center
from lightning_strategies_ext.failure.lines import ROOM_NUM_BYTES, Lines
from lightning_strategies_ext.failure.signs import Failure, Sign
from lightning_strategies_ext.failure.waiting import Waiting
from lightning_strategies_ext.peers import Peer

#: How often a host says what it knows, in seconds, if there are not so many ranks that it takes longer.
INTERVAL_S = 1.0
SIGNS_PER_S = 1000
#: How long a rank waits at its end for others to hear of a failure, in seconds.
HEARD_S = 3.0
_POLL_S = 0.05
#: How long the rank that speaks for a host may take to notice what another one of it knows to have failed, in seconds.
NOTICE_S = 1.0
#: What is said of one rank at most, in bytes.
_SIGN_NUM_BYTES = ROOM_NUM_BYTES // 4


class Hosts:
    """What one rank knows of the other hosts. All ranks create theirs together.

    Args:
        store: The store that all ranks share.
        peers: All ranks.
        rank: Global rank of this process.
        number: Tells these from others with the same store.
        waiting: Of the watch's thread, which is the one that calls all but :meth:`close`.

    Attributes:
        signs: What ranks of other hosts say: all, for the first rank of all; that one, for who speaks for another host.
    """

    def __init__(self, store: dist.Store, peers: Mapping[int, Peer], rank: int, number: int, waiting: Waiting) -> None:
        self.signs: dict[int, Sign] = {}
        self._rank = rank
        self._peers = peers
        self._first = min(peers)
        self._beside: dict[str, list[int]] = {}
        for other, peer in sorted(peers.items()):
            self._beside.setdefault(peer.host, []).append(other)
        self._here = self._ranks_beside(rank)
        self._interval_s = max(INTERVAL_S, len(peers) / SIGNS_PER_S)
        self._lost_s = LOST_S + self._interval_s
        self._heard_at: dict[int, float] = {}
        self._told_at = time.monotonic() - self._interval_s
        self._told: Failure | None = None
        self._failed_at = time.monotonic()
        self._untold: deque[Sign] = deque()
        self._told_of_agreement: dict[int, tuple[object, ...]] = {}
        self._signs_here: Mapping[int, Sign] = {}
        self._waiting = waiting
        self._lines = Lines(waiting, self._on_words)
        callers = peers.keys() - set(self._here)
        self._center = Center(store, f"lightning_strategies_ext/hosts/{number}", peers, rank, callers, self._lines)
        self._began_at = time.monotonic()
        self._has_called = False
        if self._is_to_call(0.0):
            self._call(may_have_ended=False)
            self._note_new_lines()

    def tell(self, signs: Mapping[int, Sign], failure: Failure | None) -> None:
        """Says what this host knows, if this rank is to, and if it is time; returns at once.

        Args:
            signs: Of the ranks of this host.
            failure: What has failed first, as far as they know.
        """
        self._note_new_lines()
        now, own = time.monotonic(), replace(signs.get(self._rank, Sign(self._rank)), failure=failure)
        self._signs_here = signs = {**signs, self._rank: own}
        if failure is None:
            self._failed_at = now
        if self._is_to_call(now - self._failed_at):
            self._call(may_have_ended=True)
        if failure is not None and failure != self._told:
            self._lines.say(own.dump(ROOM_NUM_BYTES), to_all=True)
        self._told = failure
        is_time = now - self._told_at >= self._interval_s
        if is_time:
            self._told_at = now
        if self._rank == self._first:
            if (is_time or self._is_new(own)) and self._lines.say(own.dump(_SIGN_NUM_BYTES)):
                self._told_of_agreement[self._rank] = own.of_agreement
        elif self._lines.ranks:
            new = [sign for sign in signs.values() if self._is_new(sign)]
            self._untold = deque(signs.values()) if is_time else self._untold + deque(new)
            self._told_of_agreement = {rank: sign.of_agreement for rank, sign in signs.items()}
        while self._untold and self._lines.say(self._untold[0].dump(_SIGN_NUM_BYTES)):
            self._untold.popleft()
        self._lines.send_rest()

    def lost(self) -> list[int]:
        """The ranks of a host that does not answer any more, as far as this rank can know; or none."""
        late = time.monotonic() - self._lost_s
        silent = {rank for rank in self._lines.ranks - self._lines.asked if self._heard_at.get(rank, late) < late}
        return self._ranks_beside(min(lost)) if (lost := self._lines.lost | silent) else []

    def gone(self) -> set[int]:
        """The ranks of other hosts whose processes are known to have ended without a goodbye."""
        return self._lines.gone

    def left(self) -> set[int]:
        """The ranks of other hosts that have said goodbye, and say no more."""
        return self._lines.left

    def unheard(self) -> set[int]:
        """The ranks of other hosts of which this rank, if it is the first, knows nothing yet, and may still hear."""
        if self._lines.port is None or time.monotonic() - self._began_at > LOST_S:
            return set()
        return self._peers.keys() - self.signs.keys() - set(self._here)

    def forget(self) -> None:
        """Lets time start anew: this process was stopped, say, or a stage begins."""
        self._heard_at = dict.fromkeys(self._heard_at, time.monotonic())

    def close(self) -> None:
        """Ends it in good order, when the watch's thread has ended; waits a moment for others to hear of a failure."""
        if self._told is not None:
            deadline, failed = time.monotonic() + HEARD_S, self._told.ranks
            if self._is_to_call(NOTICE_S):
                self._call(may_have_ended=True)
                self._lines.say(replace(self._signs_here[self._rank], failure=self._told).dump(ROOM_NUM_BYTES))
            while not self._lines.is_heard(without=failed) and not self.lost() and time.monotonic() < deadline:
                self._waiting.wait(_POLL_S)
        self._lines.close()

    def _is_new(self, sign: Sign) -> bool:
        return self._told_of_agreement.get(sign.rank) != sign.of_agreement

    def _is_to_call(self, failed_s: float) -> bool:
        """Whether this rank is to speak for its host: the first that has not ended, or that knows what has failed.

        Args:
            failed_s: For how long this rank has known of a failure, in seconds.
        """
        if self._has_called or self._first in self._here:
            return False
        speaker = next((rank for rank in self._here if not _has_ended(self._signs_here.get(rank))), self._rank)
        sign = self._signs_here.get(speaker)
        return speaker == self._rank or (failed_s >= NOTICE_S and (sign is None or sign.failure is None))

    def _call(self, *, may_have_ended: bool) -> None:
        self._has_called = True
        self._center.call(may_have_ended=may_have_ended)

    def _note_new_lines(self) -> None:
        for rank in self._lines.ranks - self._heard_at.keys():
            self._note(rank)

    def _note(self, rank: int) -> None:
        """Notes who is to be heard of by way of a rank from now on: some may never come to say a word."""
        self._heard_at[rank] = time.monotonic()
        to_hear_of = self._ranks_beside(rank) if self._rank == self._first else [rank]
        self.signs = {**{other: Sign(other) for other in to_hear_of}, **self.signs}

    def _on_words(self, rank: int, words: bytes) -> bool:
        sign = Sign.load(words)
        if rank not in self._heard_at:
            self._note(rank)
        self._heard_at[rank] = time.monotonic()
        before = self.signs.get(sign.rank)
        if sign.rank in self._ranks_beside(rank):
            self.signs[sign.rank] = sign
        return sign.failure is not None and (before is None or before.failure is None)

    def _ranks_beside(self, rank: int) -> list[int]:
        return self._beside[self._peers[rank].host]


def _has_ended(sign: Sign | None) -> bool:
    return sign is not None and sign.state == "ended"
