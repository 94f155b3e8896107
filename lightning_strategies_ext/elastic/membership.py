"""Membership of elastic training: the interface between ``fit`` and the service that assigns ranks to processes.

The service is ``horovodrun``'s elastic driver, the main process that has started the workers, or torchrun. Ranks
*rendezvous* before each world, as in torch's elastic launcher: each receives its rank, publishes its process and its
progress, and receives those of all other ranks.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from lightning_strategies_ext._system.peers import Peer

#: Exit code of a rank that leaves after a SIGTERM. With 0, ``horovodrun`` would end the whole job.
SIGTERM_EXIT_CODE = 128 + 15


class MembershipServiceError(RuntimeError):
    """The membership service does not respond."""


@dataclass(frozen=True)
class Member:
    """A rank of a world, at the time of the rendezvous.

    Attributes:
        peer: Process of the rank.
        fit_number: Number of its current ``fit``, counted in its process from 1; 0 for a new rank, see :attr:`is_new`.
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
        """Whether the rank has not been in a world of this ``fit``, or has no commit from an earlier process."""
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
        has_joined: Whether this rank takes part in the collectives of a world. False only for a process that was
            started later than the first world, until it enters its own first world.
        waiting_reason: Why a process may wait for its rank in the next world: a sentence with a period, for users.
        no_rank_reason: Why a process may get no rank in the next world: a clause for users, without a period.
        sigterm_consequence: Consequence of a SIGTERM for the job while ranks wait for the next world, a clause for
            users; None if only this rank leaves, as at any other time.
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
            on_wait: Called several times per second with the seconds waited so far. Its exceptions end the wait.

        Returns:
            The rank; None if this process gets none, because the next world has enough ranks or the job ends.

        Raises:
            MembershipServiceError: If the membership service does not respond.
        """

    def rendezvous(self, member: Member, on_wait: Callable[[float], None]) -> bool:
        """Waits until all ranks of the next world have joined.

        Args:
            member: Description of this rank, for the other ranks.
            on_wait: Called as in :meth:`next_rank`.

        Returns:
            Whether all ranks have joined, so that :attr:`members` is set.

        Raises:
            MembershipServiceError: If the membership service does not respond.
        """

    def leave(self, *, is_coordinated: bool) -> None:
        """Closes the connections to the other ranks.

        Args:
            is_coordinated: Whether all ranks leave together. If not, collectives of the other ranks are aborted.
        """

    def is_peer_loss(self, error: BaseException) -> bool:
        """Whether an exception means that another rank is lost."""

    def listen(self) -> MembershipListener:
        """Starts the detection of hosts or workers that join or leave."""
