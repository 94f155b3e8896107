"""Remote status: one rank of each host sends the statuses of its host to rank 0, and receives rank 0's status.

The ranks use peer links (:mod:`.peer_links`) on the thread of the failure monitor; nothing blocks. Failures and
agreement state are sent at once, and rank 0 forwards them. Other statuses are sent at an interval that grows with the
number of ranks, so that rank 0 receives at most :data:`MAX_STATUSES_PER_S`. If the leader of a host exits, the next
rank connects.

A host is lost if its kernel does not respond to keepalives. On systems without keepalive settings, a host is lost if it
has sent nothing for the same time.
"""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import torch.distributed as dist

from lightning_strategies_ext._system.connections import HOST_LOSS_TIMEOUT_S
from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext._system.selector_loop import SelectorLoop
from lightning_strategies_ext.failure.failure_detector import Observation
from lightning_strategies_ext.failure.peer_links import WINDOW_NUM_BYTES, CoordinatorEndpoint, PeerLinks
from lightning_strategies_ext.failure.rank_status import Failure, RankStatus

#: Seconds between two reports of a host; more in large worlds.
REPORT_INTERVAL_S = 1.0
MAX_STATUSES_PER_S = 1000
#: Seconds that a rank waits at its exit for acknowledgements of a failure.
ACK_TIMEOUT_S = 3.0
_POLL_S = 0.05
#: Seconds in which the leader of a host must detect a failure that another rank of the host knows.
LEADER_DETECTION_S = 1.0
#: Maximum size of one status, in bytes.
_STATUS_NUM_BYTES = WINDOW_NUM_BYTES // 4


class RemoteStatus:
    """Statuses of the ranks of other hosts; no statuses if all ranks are on one host.

    Collective: all ranks create it together, with a number that distinguishes it from others with the same store. The
    monitor thread, which waits in ``loop``, calls :meth:`publish`.

    Attributes:
        statuses: Statuses by rank: of all other hosts' ranks on rank 0, of rank 0 on the leaders of other hosts.
    """

    def __init__(
        self, store: dist.Store, peers: Mapping[int, Peer], rank: int, number: int, loop: SelectorLoop
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
        self._began_at = self._failed_at = time.monotonic()
        self._published_at = self._began_at - self._interval_s
        self._published_failure: Failure | None = None
        self._unsent: deque[RankStatus] = deque()
        self._sent_agreement_state: dict[int, tuple[object, ...]] = {}
        self._local_statuses: Mapping[int, RankStatus] = {}
        self._loop = loop
        self._links = PeerLinks(loop, self._on_message)
        self._has_connected = False
        self._coordinator: CoordinatorEndpoint | None = None
        if len(self._ranks_by_host) > 1:
            key, allowed_ranks = f"lightning_strategies_ext/hosts/{number}", peers.keys() - set(self._local_ranks)
            self._coordinator = CoordinatorEndpoint(store, key, peers, rank, allowed_ranks, self._links)
        self._connect_as_leader(0.0, may_have_exited=False)
        self._register_new_links()

    def publish(self, statuses: Mapping[int, RankStatus], failure: Failure | None) -> None:
        """Sends the statuses of this host, if this rank is its leader and they are due; returns at once.

        The status of this rank is sent with ``failure``, the first failure that the rank knows of by now.
        """
        if self._coordinator is None:
            return
        self._register_new_links()
        now, own = time.monotonic(), replace(statuses.get(self._rank, RankStatus(self._rank)), failure=failure)
        self._local_statuses = statuses = {**statuses, self._rank: own}
        if failure is None:
            self._failed_at = now
        self._connect_as_leader(now - self._failed_at)
        if failure is not None and failure != self._published_failure:
            self._links.send(own.dump(WINDOW_NUM_BYTES), is_urgent=True)
        self._published_failure = failure
        is_time = now - self._published_at >= self._interval_s
        if is_time:
            self._published_at = now
        if self._rank == self._first:
            if (is_time or self._has_unsent_agreement_state(own)) and self._links.send(own.dump(_STATUS_NUM_BYTES)):
                self._sent_agreement_state[self._rank] = own.agreement_state
        elif self._links.ranks:
            new = [status for status in statuses.values() if self._has_unsent_agreement_state(status)]
            self._unsent = deque(statuses.values()) if is_time else self._unsent + deque(new)
            self._sent_agreement_state = {rank: status.agreement_state for rank, status in statuses.items()}
        while self._unsent and self._links.send(self._unsent[0].dump(_STATUS_NUM_BYTES)):
            self._unsent.popleft()
        self._links.flush()

    def add_remote(self, local: Observation) -> Observation:
        """Returns an observation of this host with all that this rank knows of other hosts."""
        return replace(
            local,
            # Exits before statuses: a rank may publish its stage exit and then exit its process.
            exited_ranks=self._links.disconnected.union(local.exited_ranks),
            statuses={**self.statuses, **local.statuses},
            lost_ranks=self.lost_ranks(),
            unknown_ranks=self.unknown_ranks(),
            closed_ranks=self._links.closed,
        )

    def lost_ranks(self) -> list[int]:
        """Returns the ranks of a lost host that this rank is linked with, or an empty list."""
        late = time.monotonic() - self._lost_s
        timed_out = {
            rank for rank in self._links.ranks - self._links.with_keepalive if self._received_at.get(rank, late) < late
        }
        return self._ranks_on_same_host(min(lost)) if (lost := self._links.unreachable | timed_out) else []

    def unknown_ranks(self) -> set[int]:
        """Returns the ranks of other hosts whose first status rank 0 still expects; empty on other ranks."""
        if self._links.port is None or time.monotonic() - self._began_at > HOST_LOSS_TIMEOUT_S:
            return set()
        return self._peers.keys() - self.statuses.keys() - set(self._local_ranks)

    def reset_timeouts(self) -> None:
        """Restarts all timeouts, for example after this process was suspended, or when a stage begins."""
        self._received_at = dict.fromkeys(self._received_at, time.monotonic())

    def close(self) -> None:
        """Sends a goodbye after the monitor thread has ended; waits up to 3 s for acknowledgements of a failure."""
        if self._published_failure is not None:
            deadline, failed = time.monotonic() + ACK_TIMEOUT_S, self._published_failure.ranks
            if self._connect_as_leader(LEADER_DETECTION_S):
                own = replace(self._local_statuses[self._rank], failure=self._published_failure)
                self._links.send(own.dump(WINDOW_NUM_BYTES))
            while time.monotonic() < deadline and not self._links.is_acknowledged(without=failed):
                if self.lost_ranks():
                    break
                self._loop.wait(_POLL_S)
        self._links.close()

    def _has_unsent_agreement_state(self, status: RankStatus) -> bool:
        return self._sent_agreement_state.get(status.rank) != status.agreement_state

    def _connect_as_leader(self, failed_s: float, *, may_have_exited: bool = True) -> bool:
        """Connects, once, if this rank has to; returns whether it has tried now.

        The lowest rank of a host that runs connects, or a rank that has known of a failure for ``failed_s`` seconds.
        """
        if self._coordinator is None or self._has_connected or self._first in self._local_ranks:
            return False
        statuses = {rank: self._local_statuses.get(rank, RankStatus(rank)) for rank in self._local_ranks}
        leader = next((rank for rank, status in statuses.items() if status.state != "exited"), self._rank)
        if leader != self._rank and (failed_s < LEADER_DETECTION_S or statuses[leader].failure is not None):
            return False
        self._has_connected = True
        self._coordinator.connect(may_have_exited=may_have_exited)
        return True

    def _register_new_links(self) -> None:
        """Registers the ranks whose statuses arrive over new links; some may never send a status."""
        for rank in self._links.ranks - self._received_at.keys():
            self._received_at[rank] = time.monotonic()
            ranks = self._ranks_on_same_host(rank) if self._rank == self._first else [rank]
            self.statuses = {**{other: RankStatus(other) for other in ranks}, **self.statuses}

    def _on_message(self, rank: int, message: bytes) -> bool:
        status = RankStatus.load(message)
        if rank not in self._received_at:
            self._register_new_links()
        self._received_at[rank] = time.monotonic()
        before = self.statuses.get(status.rank)
        if status.rank in self._ranks_on_same_host(rank):
            self.statuses[status.rank] = status
        return status.failure is not None and (before is None or before.failure is None)

    def _ranks_on_same_host(self, rank: int) -> list[int]:
        return self._ranks_by_host[self._peers[rank].host]
