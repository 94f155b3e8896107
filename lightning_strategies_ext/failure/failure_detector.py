"""Failure detector: finds failed ranks from statuses, process exits, link losses, and heartbeat ages."""

from collections.abc import Callable, Iterable, Mapping

from lightning_strategies_ext._system.connections import HOST_LOSS_TIMEOUT_S
from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext.failure import detection
from lightning_strategies_ext.failure.exit_tracker import ExitTracker
from lightning_strategies_ext.failure.local_status import LocalStatus
from lightning_strategies_ext.failure.rank_status import Failure, HeartbeatAges, RankStatus
from lightning_strategies_ext.failure.remote_status import RemoteStatus

#: A rank without a heartbeat for this many seconds is unresponsive: stopped, or its GIL is held.
HEARTBEAT_TIMEOUT_S = 2.5
#: Seconds that rank 0 adds to the hang timeout for ranks of other hosts, whose own hosts detect a hang first.
REMOTE_MARGIN_S = 2.0


class FailureDetector:
    """Detects failures of other ranks. It never blocks and has no lock: the caller serializes the calls.

    Args:
        rank: Global rank of this process.
        peers: All ranks.
        local_peers: Ranks of this host.
        local_status: Statuses of the ranks of this host.
        hosts: Statuses of other hosts; None if all ranks are on this host.
        exit_tracker: Tracker of the other processes of this host.
        get_exit_code: Callable that returns the exit code of a process that this process has started, by its pid; None
            if the exit code is unknown.
    """

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, Peer],
        local_peers: Mapping[int, Peer],
        local_status: LocalStatus,
        hosts: RemoteStatus | None,
        exit_tracker: ExitTracker,
        get_exit_code: Callable[[int], int | None],
    ) -> None:
        self._rank = rank
        self._peers = peers
        self._local_peers = local_peers
        self._local_status = local_status
        self._remote_status = hosts
        self._exit_tracker = exit_tracker
        self._get_exit_code = get_exit_code
        self._heartbeat_ages = HeartbeatAges()

    def statuses(self) -> dict[int, RankStatus]:
        """Returns the newest status of each rank, by rank; without ranks whose status is unknown."""
        return {
            **(self._remote_status.statuses if self._remote_status is not None else {}),
            **self._local_status.read(),
        }

    def update(self, elapsed_s: float) -> dict[int, RankStatus]:
        """Returns the statuses and updates the heartbeat ages, ``elapsed_s`` seconds after the last update."""
        statuses = self.statuses()
        self._heartbeat_ages.update(statuses, elapsed_s)
        return statuses

    def unresponsive_local_peers(self, ranks: Iterable[int]) -> list[Peer]:
        """Returns those of some ranks that are on this host and unresponsive, so that they cannot exit themselves."""
        here = [self._local_peers[rank] for rank in ranks if rank in self._local_peers and rank != self._rank]
        return [peer for peer in here if self._heartbeat_ages.age_s.get(peer.rank, 0) >= HEARTBEAT_TIMEOUT_S]

    def ranks_in_stage(self, stage: int) -> tuple[set[int], set[int]]:
        """Returns the other ranks that have not exited a stage.

        Args:
            stage: Stage that this rank has exited.

        Returns:
            The ranks that may still exit the stage, and the ranks that failed in it or whose processes have exited.
        """
        # Before the statuses are read: a rank may publish its stage exit and then exit its process.
        died = {rank for rank, peer in self._local_peers.items() if not peer.is_running()}
        statuses = self.statuses()
        known = {*statuses, *self._local_peers}
        if self._remote_status is not None:
            died |= self._remote_status.disconnected_ranks()
            known |= self._remote_status.unknown_ranks()  # a stage may be shorter than the interval of statuses
        staying: set[int] = set()
        failed: set[int] = set()
        for rank in known - {self._rank}:
            status = statuses.get(rank, RankStatus(rank))
            departed = status.stage_exit
            if departed is not None and departed.stage >= stage:
                failed |= {rank} if departed.has_failed and departed.stage == stage else set()
            elif status.state in ("failed", "exited") or rank in died:
                failed.add(rank)
            elif status.stage <= stage:
                staying.add(rank)
        return staying - (set() if self._remote_status is None else self._remote_status.closed_ranks()), failed

    def detect(self, statuses: Mapping[int, RankStatus], hang_timeout_s: float | None) -> Failure | None:
        """Returns a failure that other ranks cannot report themselves, or None.

        Args:
            statuses: Statuses that :meth:`update` returned.
            hang_timeout_s: Hang timeout in seconds; None for no limit.
        """
        died = self._exit_tracker.exited_ranks() | (
            set() if self._remote_status is None else self._remote_status.disconnected_ranks()
        )
        peers = [self._peers[rank] for rank in sorted(died)]
        failure = detection.diagnose_exit(statuses, peers, self._get_exit_code, self._rank)
        if failure is None and self._remote_status is not None:
            failure = detection.diagnose_host_loss(self._remote_status.lost_ranks(), statuses, self._peers, self._rank)
        return failure or (None if hang_timeout_s is None else self._detect_hang(statuses, hang_timeout_s))

    def _detect_hang(self, statuses: Mapping[int, RankStatus], hang_timeout_s: float) -> Failure | None:
        """Rank 0 knows all statuses and detects every hang; other ranks detect unresponsive ranks that they know of."""
        if len(statuses) < len(self._peers):
            here = {rank: status for rank, status in statuses.items() if rank in self._local_peers}
            return self._detect_unresponsive(here, hang_timeout_s) or self._detect_unresponsive(
                statuses, max(hang_timeout_s, HOST_LOSS_TIMEOUT_S) + REMOTE_MARGIN_S
            )
        failure = self._diagnose_hang(statuses, hang_timeout_s)
        if failure is None or any(rank in self._local_peers for rank in failure.ranks):
            return failure
        # Their own host has more information and reports first if it can; the loss of the host is detected first too.
        elsewhere_s = hang_timeout_s + REMOTE_MARGIN_S
        failure = self._diagnose_hang(statuses, elsewhere_s)
        silent_s = [self._heartbeat_ages.age_s[rank] for rank in failure.ranks] if failure is not None else []
        return (
            None
            if any(elsewhere_s <= seconds < HOST_LOSS_TIMEOUT_S + REMOTE_MARGIN_S for seconds in silent_s)
            else failure
        )

    def _diagnose_hang(self, statuses: Mapping[int, RankStatus], hang_timeout_s: float) -> Failure | None:
        return detection.diagnose_hang(statuses, self._heartbeat_ages.age_s, hang_timeout_s, self._peers, self._rank)

    def _detect_unresponsive(self, statuses: Mapping[int, RankStatus], hang_timeout_s: float) -> Failure | None:
        failure = self._diagnose_hang(statuses, hang_timeout_s)
        are_silent = failure is not None and all(
            self._heartbeat_ages.age_s[rank] >= hang_timeout_s for rank in failure.ranks
        )
        return failure if are_silent else None
