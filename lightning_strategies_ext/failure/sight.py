"""What a rank sees of the others: what they say, whose processes have ended, who is silent, lost or stuck."""

from collections.abc import Callable, Iterable, Mapping

from lightning_strategies_ext.connections import LOST_S
from lightning_strategies_ext.failure import detection
from lightning_strategies_ext.failure.deaths import Deaths
from lightning_strategies_ext.failure.host_signs import HostSigns
from lightning_strategies_ext.failure.hosts import Hosts
from lightning_strategies_ext.failure.signs import Failure, Sign, Silence
from lightning_strategies_ext.peers import Peer

#: One that has said nothing for so long, in seconds, is stopped, or held where it cannot end by itself.
SILENT_S = 2.5
#: How much longer the first rank waits before it takes ranks of other hosts for stuck, in seconds.
ELSEWHERE_S = 2.0


class Sight:
    """One rank's. It takes no lock and waits for nobody; who calls sees to it that only one thread does at a time.

    Args:
        rank: Global rank of this process.
        peers: All ranks.
        here: Those of this host.
        own: What these say.
        hosts: What other hosts say; None if there are none.
        deaths: Of the other processes of this host.
        exit_code_of: Tells the exit code of a process that this one has started, by its pid; None if it does not know.
    """

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, Peer],
        here: Mapping[int, Peer],
        own: HostSigns,
        hosts: Hosts | None,
        deaths: Deaths,
        exit_code_of: Callable[[int], int | None],
    ) -> None:
        self._rank = rank
        self._peers = peers
        self._here = here
        self._own = own
        self._hosts = hosts
        self._deaths = deaths
        self._exit_code_of = exit_code_of
        self._silence = Silence()

    def signs(self) -> dict[int, Sign]:
        """What each rank has last said, by rank; those of which nothing is known are missing."""
        return {**(self._hosts.signs if self._hosts is not None else {}), **self._own.read()}

    def look(self, elapsed_s: float) -> dict[int, Sign]:
        """The same, and notes who has said nothing since the last look, so many seconds ago."""
        signs = self.signs()
        self._silence.note(signs, elapsed_s)
        return signs

    def silent_here(self, ranks: Iterable[int]) -> list[Peer]:
        """Of some ranks, those of this host that cannot end by themselves: stopped ones, say."""
        here = [self._here[rank] for rank in ranks if rank in self._here and rank != self._rank]
        return [peer for peer in here if self._silence.seconds.get(peer.rank, 0) >= SILENT_S]

    def who_stays(self, stage: int) -> tuple[set[int], set[int]]:
        """Of the other ranks that this one can hear of, those that have not left a stage.

        Args:
            stage: That this rank has left.

        Returns:
            Those that may still leave it, and those that have failed in it, or whose processes have ended.
        """
        # Asked before what they say: a rank may say that it has left the stage, and then end.
        died = {rank for rank, peer in self._here.items() if not peer.is_running()}
        signs = self.signs()
        known = {*signs, *self._here}
        if self._hosts is not None:
            died |= self._hosts.gone()
            known |= self._hosts.unheard()  # a stage may take less time than two looks
        staying: set[int] = set()
        failed: set[int] = set()
        for rank in known - {self._rank}:
            sign = signs.get(rank, Sign(rank))
            departed = sign.departed
            if departed is not None and departed.stage >= stage:
                failed |= {rank} if departed.has_failed and departed.stage == stage else set()
            elif sign.state in ("failed", "ended") or rank in died:
                failed.add(rank)
            elif sign.stage <= stage:
                staying.add(rank)
        return staying - (set() if self._hosts is None else self._hosts.left()), failed

    def failure(self, signs: Mapping[int, Sign], patience_s: float | None) -> Failure | None:
        """The failure of others that cannot say it themselves, if there is one.

        Args:
            signs: What :meth:`look` gave.
            patience_s: For how long ranks may wait for one that does not move, in seconds; None for ever.
        """
        died = self._deaths.gone() | (set() if self._hosts is None else self._hosts.gone())
        peers = [self._peers[rank] for rank in sorted(died)]
        failure = detection.death(signs, peers, self._exit_code_of, self._rank)
        if failure is None and self._hosts is not None:
            failure = detection.loss(self._hosts.lost(), signs, self._peers, self._rank)
        return failure or (None if patience_s is None else self._stuck(signs, patience_s))

    def _stuck(self, signs: Mapping[int, Sign], patience_s: float) -> Failure | None:
        """Who does not come: of all, for the first rank of all; for others, who is silent of those they know of."""
        if len(signs) < len(self._peers):
            here = {rank: sign for rank, sign in signs.items() if rank in self._here}
            return self._silent(here, patience_s) or self._silent(signs, max(patience_s, LOST_S) + ELSEWHERE_S)
        failure = self._missing(signs, patience_s)
        if failure is None or any(rank in self._here for rank in failure.ranks):
            return failure
        # Their own host knows more of them, and says so first if it can; and if it is lost, that will be known first.
        elsewhere_s = patience_s + ELSEWHERE_S
        failure = self._missing(signs, elsewhere_s)
        silent_s = [self._silence.seconds[rank] for rank in failure.ranks] if failure is not None else []
        return None if any(elsewhere_s <= seconds < LOST_S + ELSEWHERE_S for seconds in silent_s) else failure

    def _missing(self, signs: Mapping[int, Sign], patience_s: float) -> Failure | None:
        return detection.stuck(signs, self._silence.seconds, patience_s, self._peers, self._rank)

    def _silent(self, signs: Mapping[int, Sign], patience_s: float) -> Failure | None:
        failure = self._missing(signs, patience_s)
        are_silent = failure is not None and all(self._silence.seconds[rank] >= patience_s for rank in failure.ranks)
        return failure if are_silent else None
