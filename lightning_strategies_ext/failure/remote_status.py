"""Between hosts: one rank of each tells the first of all what its host's board says, and hears from that one.

They speak on lines, see :mod:`.peer_links`, which the watch's thread looks after: nobody waits for anybody, nor for
a store.
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

from lightning_strategies_ext._system.connections import HOST_LOSS_TIMEOUT_S
from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext._system.selector_loop import SelectorLoop
from lightning_strategies_ext.failure.center import CoordinatorEndpoint
from lightning_strategies_ext.failure.peer_links import WINDOW_NUM_BYTES, PeerLinks
from lightning_strategies_ext.failure.rank_status import Failure, RankStatus

#: How often a host says what it knows, in seconds, if there are not so many ranks that it takes longer.
REPORT_INTERVAL_S = 1.0
MAX_STATUSES_PER_S = 1000
#: How long a rank waits at its end for others to hear of a failure, in seconds.
ACK_TIMEOUT_S = 3.0
_POLL_S = 0.05
#: How long the rank that speaks for a host may take to notice what another one of it knows to have failed, in seconds.
LEADER_DETECTION_S = 1.0
#: What is said of one rank at most, in bytes.
_SIGN_NUM_BYTES = WINDOW_NUM_BYTES // 4


class RemoteStatus:
    """What one rank knows of the other hosts. All ranks create theirs together.

    Args:
        store: The store that all ranks share.
        peers: All ranks.
        rank: Global rank of this process.
        number: Tells these from others with the same store.
        waiting: Of the watch's thread, which is the one that calls all but :meth:`close`.

    Attributes:
        statuses: What ranks of other hosts say: all, for the first rank of all; that one, for who speaks for another
            host.
    """

    def __init__(
        self, store: dist.Store, peers: Mapping[int, Peer], rank: int, number: int, waiting: SelectorLoop
    ) -> None:
        self.statuses: dict[int, RankStatus] = {}
        self._rank = rank
        self._peers = peers
        self._first = min(peers)
        self._ranks_by_host: dict[str, list[int]] = {}
        for other, peer in sorted(peers.items()):
            self._ranks_by_host.setdefault(peer.host, []).append(other)
        self._local_ranks = self._ranks_on_same_host(rank)
        self._interval_s = max(REPORT_INTERVAL_S, len(peers) / MAX_STATUSES_PER_S)
        self._lost_s = HOST_LOSS_TIMEOUT_S + self._interval_s
        self._received_at: dict[int, float] = {}
        self._told_at = time.monotonic() - self._interval_s
        self._published_failure: Failure | None = None
        self._failed_at = time.monotonic()
        self._unsent: deque[RankStatus] = deque()
        self._sent_agreement_state: dict[int, tuple[object, ...]] = {}
        self._signs_here: Mapping[int, RankStatus] = {}
        self._waiting = waiting
        self._lines = PeerLinks(waiting, self._on_message)
        callers = peers.keys() - set(self._local_ranks)
        self._center = CoordinatorEndpoint(
            store, f"lightning_strategies_ext/hosts/{number}", peers, rank, callers, self._lines
        )
        self._began_at = time.monotonic()
        self._has_called = False
        if self._is_host_leader(0.0):
            self._connect(may_have_exited=False)
            self._register_new_links()

    def publish(self, statuses: Mapping[int, RankStatus], failure: Failure | None) -> None:
        """Says what this host knows, if this rank is to, and if it is time; returns at once.

        Args:
            statuses: Of the ranks of this host.
            failure: What has failed first, as far as they know.
        """
        self._register_new_links()
        now, own = time.monotonic(), replace(statuses.get(self._rank, RankStatus(self._rank)), failure=failure)
        self._signs_here = statuses = {**statuses, self._rank: own}
        if failure is None:
            self._failed_at = now
        if self._is_host_leader(now - self._failed_at):
            self._connect(may_have_exited=True)
        if failure is not None and failure != self._published_failure:
            self._lines.send(own.dump(WINDOW_NUM_BYTES), is_urgent=True)
        self._published_failure = failure
        is_time = now - self._told_at >= self._interval_s
        if is_time:
            self._told_at = now
        if self._rank == self._first:
            if (is_time or self._has_unsent_agreement_state(own)) and self._lines.send(own.dump(_SIGN_NUM_BYTES)):
                self._sent_agreement_state[self._rank] = own.agreement_state
        elif self._lines.ranks:
            new = [sign for sign in statuses.values() if self._has_unsent_agreement_state(sign)]
            self._unsent = deque(statuses.values()) if is_time else self._unsent + deque(new)
            self._sent_agreement_state = {rank: sign.agreement_state for rank, sign in statuses.items()}
        while self._unsent and self._lines.send(self._unsent[0].dump(_SIGN_NUM_BYTES)):
            self._unsent.popleft()
        self._lines.flush()

    def lost_ranks(self) -> list[int]:
        """The ranks of a host that does not answer any more, as far as this rank can know; or none."""
        late = time.monotonic() - self._lost_s
        silent = {
            rank for rank in self._lines.ranks - self._lines.kept_alive if self._received_at.get(rank, late) < late
        }
        return self._ranks_on_same_host(min(lost)) if (lost := self._lines.unreachable | silent) else []

    def disconnected_ranks(self) -> set[int]:
        """The ranks of other hosts whose processes are known to have ended without a goodbye."""
        return self._lines.disconnected

    def closed_ranks(self) -> set[int]:
        """The ranks of other hosts that have said goodbye, and say no more."""
        return self._lines.closed

    def unknown_ranks(self) -> set[int]:
        """The ranks of other hosts of which this rank, if it is the first, knows nothing yet, and may still hear."""
        if self._lines.port is None or time.monotonic() - self._began_at > HOST_LOSS_TIMEOUT_S:
            return set()
        return self._peers.keys() - self.statuses.keys() - set(self._local_ranks)

    def reset_timeouts(self) -> None:
        """Lets time start anew: this process was stopped, say, or a stage begins."""
        self._received_at = dict.fromkeys(self._received_at, time.monotonic())

    def close(self) -> None:
        """Ends it in good order, when the watch's thread has ended; waits a moment for others to hear of a failure."""
        if self._published_failure is not None:
            deadline, failed = time.monotonic() + ACK_TIMEOUT_S, self._published_failure.ranks
            if self._is_host_leader(LEADER_DETECTION_S):
                self._connect(may_have_exited=True)
                self._lines.send(
                    replace(self._signs_here[self._rank], failure=self._published_failure).dump(WINDOW_NUM_BYTES)
                )
            while (
                not self._lines.is_acknowledged(without=failed)
                and not self.lost_ranks()
                and time.monotonic() < deadline
            ):
                self._waiting.wait(_POLL_S)
        self._lines.close()

    def _has_unsent_agreement_state(self, sign: RankStatus) -> bool:
        return self._sent_agreement_state.get(sign.rank) != sign.agreement_state

    def _is_host_leader(self, failed_s: float) -> bool:
        """Whether this rank is to speak for its host: the first that has not ended, or that knows what has failed.

        Args:
            failed_s: For how long this rank has known of a failure, in seconds.
        """
        if self._has_called or self._first in self._local_ranks:
            return False
        speaker = next((rank for rank in self._local_ranks if not _has_ended(self._signs_here.get(rank))), self._rank)
        sign = self._signs_here.get(speaker)
        return speaker == self._rank or (failed_s >= LEADER_DETECTION_S and (sign is None or sign.failure is None))

    def _connect(self, *, may_have_exited: bool) -> None:
        self._has_called = True
        self._center.connect(may_have_exited=may_have_exited)

    def _register_new_links(self) -> None:
        for rank in self._lines.ranks - self._received_at.keys():
            self._register_link(rank)

    def _register_link(self, rank: int) -> None:
        """Notes who is to be heard of by way of a rank from now on: some may never come to say a word."""
        self._received_at[rank] = time.monotonic()
        to_hear_of = self._ranks_on_same_host(rank) if self._rank == self._first else [rank]
        self.statuses = {**{other: RankStatus(other) for other in to_hear_of}, **self.statuses}

    def _on_message(self, rank: int, words: bytes) -> bool:
        sign = RankStatus.load(words)
        if rank not in self._received_at:
            self._register_link(rank)
        self._received_at[rank] = time.monotonic()
        before = self.statuses.get(sign.rank)
        if sign.rank in self._ranks_on_same_host(rank):
            self.statuses[sign.rank] = sign
        return sign.failure is not None and (before is None or before.failure is None)

    def _ranks_on_same_host(self, rank: int) -> list[int]:
        return self._ranks_by_host[self._peers[rank].host]


def _has_ended(sign: RankStatus | None) -> bool:
    return sign is not None and sign.state == "exited"
