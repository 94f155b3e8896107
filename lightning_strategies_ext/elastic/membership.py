"""Who the ranks are: what an elastic ``fit`` asks of an engine that knows, as a Protocol.

Ranks *rendezvous* before each world, as in torch's elastic launcher: each is given its number, says where it runs and
how far it has come, and learns the same of all others.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from lightning_strategies_ext._system.peers import Peer


class MembershipServiceError(RuntimeError):
    """Whoever numbers the ranks does not answer any more."""


@dataclass(frozen=True)
class Member:
    """A rank of a world, as it was when it came.

    Attributes:
        peer: Where it runs.
        fit: Number of the ``fit`` that it is in, counted in its process; 0 if it has not been in one.
        batches: Batches that were done at its last commit; -1 without one.
        step: Optimizer steps that were.
        done: Optimizer steps that it had done when it came.
    """

    peer: Peer
    fit: int = 0
    batches: int = -1
    step: int = -1
    done: int = 0

    @property
    def is_new(self) -> bool:
        """Whether its process has just started."""
        return self.fit == 0

    def encoded(self) -> bytes:
        """As a key-value store keeps it."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, value: bytes) -> "Member":
        """The reverse of :meth:`encoded`."""
        return cls.of(json.loads(value))

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "Member":
        """The reverse of ``dataclasses.asdict``, by way of JSON."""
        peer = fields["peer"]
        return cls(**{**fields, "peer": Peer(**{**peer, "addresses": tuple(peer["addresses"])})})


def peers_of(members: Sequence[Member]) -> dict[int, Peer]:
    """Returns the processes of the members of a world, by rank."""
    return {rank: member.peer for rank, member in enumerate(members)}


class MembershipListener(Protocol):
    """Hears that hosts have come or gone.

    Attributes:
        has_changed: Whether one has come since it was last set to False.
    """

    has_changed: bool

    def close(self) -> None:
        """Hears no more."""


class Membership(Protocol):
    """This process among ranks that change, for its life.

    Attributes:
        members: The ranks of the world that this one is in, in their order.
        has_joined: Whether this rank takes part in what they do. One that joins does not before its ``fit`` has come as
            far as that of the others.
        waiting_reason: What ranks wait for that have no place in a new world yet; for people.
        no_rank_reason: Why there may be none any more.
        sigterm_consequence: What a SIGTERM means that comes then; None if it is as any other.
    """

    members: list[Member]
    has_joined: bool

    @property
    def waiting_reason(self) -> str: ...  # noqa: D102

    @property
    def no_rank_reason(self) -> str: ...  # noqa: D102

    @property
    def sigterm_consequence(self) -> str | None: ...  # noqa: D102

    def next_rank(self, on_wait: Callable[[float], None]) -> int | None:
        """Says that this rank has left the world and is ready for the next; waits for its number in it.

        Args:
            on_wait: Called several times per second with the seconds waited so far; may raise to give up.

        Returns:
            The rank; None if there is no use for this one any more.

        Raises:
            MembershipServiceError: If nobody answers.
        """

    def rendezvous(self, member: Member, on_wait: Callable[[float], None]) -> bool:
        """Waits until all ranks of the next world are there.

        Args:
            member: This rank.
            on_wait: See :meth:`next_rank`.

        Returns:
            Whether all have come. Then :attr:`members` are they.

        Raises:
            MembershipServiceError: If nobody answers.
        """

    def leave(self, *, agreed: bool) -> None:
        """Ends the connections to the others.

        Args:
            agreed: Whether all ranks leave together; otherwise some may wait for this one, and are let go.
        """

    def is_peer_loss(self, error: BaseException) -> bool:
        """Whether an exception says that another rank is gone."""

    def listen(self) -> MembershipListener:
        """Begins to hear of hosts that come or go."""
