"""Membership of elastic training: the Protocol by which ``fit`` uses an engine that assigns ranks to processes.

Ranks *rendezvous* before each world, as in torch's elastic launcher: each receives its rank, publishes its process and
its progress, and receives those of all other ranks.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from lightning_strategies_ext._system.peers import Peer


class MembershipServiceError(RuntimeError):
    """The process that assigns ranks does not respond any more."""


@dataclass(frozen=True)
class Member:
    """A rank of a world, at the time of the rendezvous.

    Attributes:
        peer: Process of the rank.
        fit_number: Number of its current ``fit``, counted in its process; 0 if it has been in none.
        committed_batches: Number of batches done at its last commit; -1 without a commit.
        committed_step: Number of optimizer steps done at its last commit; -1 without a commit.
        steps_done: Number of optimizer steps done at the rendezvous.
    """

    peer: Peer
    fit_number: int = 0
    committed_batches: int = -1
    committed_step: int = -1
    steps_done: int = 0

    @property
    def is_new(self) -> bool:
        """Whether its process has just started."""
        return self.fit_number == 0

    def encoded(self) -> bytes:
        """Returns the member as a value for a key-value store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, value: bytes) -> "Member":
        """Returns the member that :meth:`encoded` has encoded."""
        return cls.from_dict(json.loads(value))

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Member":
        """Returns the member with the given fields, those of ``dataclasses.asdict`` after a transfer as JSON."""
        peer = fields["peer"]
        return cls(**{**fields, "peer": Peer(**{**peer, "addresses": tuple(peer["addresses"])})})


def peers_of(members: Sequence[Member]) -> dict[int, Peer]:
    """Returns the processes of the members of a world, by rank."""
    return {rank: member.peer for rank, member in enumerate(members)}


class MembershipListener(Protocol):
    """Detects hosts or workers that join or leave.

    Attributes:
        has_changed: Whether the membership has changed since the last assignment of False.
    """

    has_changed: bool

    def close(self) -> None:
        """Stops the detection."""


class Membership(Protocol):
    """Membership of this process in one world after another.

    Attributes:
        members: Members of the current world, in the order of ranks.
        has_joined: Whether this rank takes part in training. A rank that joins does not until its ``fit`` has reached
            the step of the other ranks.
        waiting_reason: Why a rank waits for its rank in the next world; text for users.
        no_rank_reason: Why a rank may not be needed any more; text for users.
        sigterm_consequence: Consequence of a SIGTERM while a rank waits, as text; None if it is that of any SIGTERM.
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
        """Requests a rank in the next world, after this rank has left its world, and waits for it.

        Args:
            on_wait: Called several times per second with the seconds waited so far; raises to stop waiting.

        Returns:
            The rank; None if this process is not needed any more.

        Raises:
            MembershipServiceError: If the process that assigns ranks does not respond.
        """

    def rendezvous(self, member: Member, on_wait: Callable[[float], None]) -> bool:
        """Waits until all ranks of the next world have joined.

        Args:
            member: This rank.
            on_wait: Called as in :meth:`next_rank`.

        Returns:
            Whether all have joined, and :attr:`members` is set.

        Raises:
            MembershipServiceError: If the process that assigns ranks does not respond.
        """

    def leave(self, *, is_coordinated: bool) -> None:
        """Closes the connections to the other ranks.

        Args:
            is_coordinated: Whether all ranks leave together; otherwise waits of other ranks for this rank are aborted.
        """

    def is_peer_loss(self, error: BaseException) -> bool:
        """Whether an exception means that another rank is lost."""

    def listen(self) -> MembershipListener:
        """Starts the detection of hosts or workers that join or leave."""
