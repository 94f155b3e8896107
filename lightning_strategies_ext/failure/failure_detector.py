"""What a rank sees of the others: what they say, whose processes have ended, who is silent, lost or stuck."""

from collections.abc import Callable, Iterable, Mapping

from lightning_strategies_ext._system.connections import HOST_LOSS_TIMEOUT_S
from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext.failure import detection
from lightning_strategies_ext.failure.exit_tracker import ExitTracker
from lightning_strategies_ext.failure.local_status import LocalStatus
from lightning_strategies_ext.failure.rank_status import Failure, HeartbeatAges, RankStatus
from lightning_strategies_ext.failure.remote_status import RemoteStatus

#: One that has said nothing for so long, in seconds, is stopped, or held where it cannot end by itself.
HEARTBEAT_TIMEOUT_S = 2.5
#: How much longer the first rank waits before it takes ranks of other hosts for stuck, in seconds.
REMOTE_MARGIN_S = 2.0


class FailureDetector:
    """One rank's. It takes no lock and waits for nobody; who calls sees to it that only one thread does at a time.

    Args:
        rank: Global rank of this process.
        peers: All ranks.
        local_peers: Those of this host.
        local_status: What these say.
        hosts: What other hosts say; None if there are none.
        exit_tracker: Of the other processes of this host.
        exit_code_of: Tells the exit code of a process that this one has started, by its pid; None if it does not know.
    """

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, Peer],
        local_peers: Mapping[int, Peer],
        local_status: LocalStatus,
        hosts: RemoteStatus | None,
        exit_tracker: ExitTracker,
        exit_code_of: Callable[[int], int | None],
    ) -> None:
        self._rank = rank
        self._peers = peers
        self._here = local_peers
        self._own = local_status
        self._hosts = hosts
        self._deaths = exit_tracker
        self._exit_code_of = exit_code_of
        self._silence = HeartbeatAges()

    def statuses(self) -> dict[int, RankStatus]:
        """What each rank has last said, by rank; those of which nothing is known are missing."""
        return {**(self._hosts.statuses if self._hosts is not None else {}), **self._own.read()}

    def update(self, elapsed_s: float) -> dict[int, RankStatus]:
        """The same, and notes who has said nothing since the last look, so many seconds ago."""
        signs = self.statuses()
        self._silence.update(signs, elapsed_s)
        return signs

    def unresponsive_local_peers(self, ranks: Iterable[int]) -> list[Peer]:
        """Of some ranks, those of this host that cannot end by themselves: stopped ones, say."""
        here = [self._here[rank] for rank in ranks if rank in self._here and rank != self._rank]
        return [peer for peer in here if self._silence.age_s.get(peer.rank, 0) >= HEARTBEAT_TIMEOUT_S]

    def ranks_in_stage(self, stage: int) -> tuple[set[int], set[int]]:
        """Of the other ranks that this one can hear of, those that have not left a stage.

        Args:
            stage: That this rank has left.

        Returns:
            Those that may still leave it, and those that have failed in it, or whose processes have ended.
        """
        # Asked before what they say: a rank may say that it has left the stage, and then end.
        died = {rank for rank, peer in self._here.items() if not peer.is_running()}
        signs = self.statuses()
        known = {*signs, *self._here}
        if self._hosts is not None:
            died |= self._hosts.disconnected_ranks()
            known |= self._hosts.unknown_ranks()  # a stage may take less time than two looks
        staying: set[int] = set()
        failed: set[int] = set()
        for rank in known - {self._rank}:
            sign = signs.get(rank, RankStatus(rank))
            departed = sign.stage_exit
            if departed is not None and departed.stage >= stage:
                failed |= {rank} if departed.has_failed and departed.stage == stage else set()
            elif sign.state in ("failed", "exited") or rank in died:
                failed.add(rank)
            elif sign.stage <= stage:
                staying.add(rank)
        return staying - (set() if self._hosts is None else self._hosts.closed_ranks()), failed

    def detect(self, statuses: Mapping[int, RankStatus], patience_s: float | None) -> Failure | None:
        """The failure of others that cannot say it themselves, if there is one.

        Args:
            statuses: What :meth:`update` gave.
            patience_s: For how long ranks may wait for one that does not move, in seconds; None for ever.
        """
        died = self._deaths.exited_ranks() | (set() if self._hosts is None else self._hosts.disconnected_ranks())
        peers = [self._peers[rank] for rank in sorted(died)]
        failure = detection.diagnose_exit(statuses, peers, self._exit_code_of, self._rank)
        if failure is None and self._hosts is not None:
            failure = detection.diagnose_host_loss(self._hosts.lost_ranks(), statuses, self._peers, self._rank)
        return failure or (None if patience_s is None else self._detect_hang(statuses, patience_s))

    def _detect_hang(self, signs: Mapping[int, RankStatus], patience_s: float) -> Failure | None:
        """Who does not come: of all, for the first rank of all; for others, who is silent of those they know of."""
        if len(signs) < len(self._peers):
            here = {rank: sign for rank, sign in signs.items() if rank in self._here}
            return self._detect_unresponsive(here, patience_s) or self._detect_unresponsive(
                signs, max(patience_s, HOST_LOSS_TIMEOUT_S) + REMOTE_MARGIN_S
            )
        failure = self._diagnose_hang(signs, patience_s)
        if failure is None or any(rank in self._here for rank in failure.ranks):
            return failure
        # Their own host knows more of them, and says so first if it can; and if it is lost, that will be known first.
        elsewhere_s = patience_s + REMOTE_MARGIN_S
        failure = self._diagnose_hang(signs, elsewhere_s)
        silent_s = [self._silence.age_s[rank] for rank in failure.ranks] if failure is not None else []
        return (
            None
            if any(elsewhere_s <= seconds < HOST_LOSS_TIMEOUT_S + REMOTE_MARGIN_S for seconds in silent_s)
            else failure
        )

    def _diagnose_hang(self, signs: Mapping[int, RankStatus], patience_s: float) -> Failure | None:
        return detection.diagnose_hang(signs, self._silence.age_s, patience_s, self._peers, self._rank)

    def _detect_unresponsive(self, signs: Mapping[int, RankStatus], patience_s: float) -> Failure | None:
        failure = self._diagnose_hang(signs, patience_s)
        are_silent = failure is not None and all(self._silence.age_s[rank] >= patience_s for rank in failure.ranks)
        return failure if are_silent else None
