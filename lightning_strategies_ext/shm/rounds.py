"""Rounds: the one way in which the ranks of one host exchange data.

In a round every rank publishes some bytes, possibly none, to all others, and then reads what they have published: a
few bytes in the message itself, many in a slot of its segment. All collectives are sequences of rounds (see
:mod:`.collectives`), which all ranks go through in the same order.

A rank publishes at most two rounds ahead of the one it reads: its message of round k tells that it has read round
k - 2. So who has received the messages of round k from all peers may write round k + 2 where round k - 2 was: four
slots are enough, and nobody ever waits for leave to write.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.distributed import DistBackendError

from lightning_strategies_ext.shm.calls import described
from lightning_strategies_ext.shm.links import (
    BROKEN,
    HEADER,
    INLINE_NUM_BYTES,
    LEFT,
    MESSAGE_NUM_BYTES,
    ROUND,
    LinkedRank,
    Links,
)
from lightning_strategies_ext.shm.segments import NUM_SLOTS, Segment

#: Rounds that may be published before the first of them has been read.
LOOKAHEAD: Final = 2
#: How long a rank looks for the others before it goes to sleep, in seconds; between two looks it lets others run.
SPIN_S: Final = 100e-6
_NOTHING: Final = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class Step:
    """One round of one operation.

    Attributes:
        num_bytes: How much each rank publishes, in rank order.
        publish: Writes this rank's bytes where it is told; not called for 0 bytes.
        read: Is given what each rank has published, in rank order, valid until it returns; nothing for this rank, which
            has it.
    """

    num_bytes: Sequence[int]
    publish: Callable[[Tensor], None]
    read: Callable[[list[Tensor]], None]


class Rounds:
    """The rounds of one rank.

    Args:
        rank: Its rank among those of the host.
        peers: The others, by their rank there.
        links: To them.
        segments: Everyone's, in rank order.

    Attributes:
        spin_s: How long its caller shall look for others before it sleeps, in seconds.
    """

    spin_s: Final = SPIN_S

    def __init__(self, rank: int, peers: dict[int, LinkedRank], links: Links, segments: Sequence[Segment]) -> None:
        self.rank = rank
        self.size = len(segments)
        self.slot_num_bytes = min(segment.slot_num_bytes for segment in segments)
        self._peers = peers
        self._links = links
        self._slots = [segment.slots for segment in segments]
        self._own_message = torch.empty(MESSAGE_NUM_BYTES, dtype=torch.uint8)
        self._own_bytes = memoryview(self._own_message.numpy())  # type: ignore[arg-type]
        self._messages = [torch.empty(MESSAGE_NUM_BYTES, dtype=torch.uint8) for _ in segments]
        self._bytes = [memoryview(message.numpy()) for message in self._messages]  # type: ignore[arg-type]
        self._published = self._read = 0
        self._awaited: list[int] = []

    def go_through(
        self, operation: int, steps: Sequence[Step], lookahead: int, deadline: float
    ) -> Generator[None, None, None]:
        """Goes through the rounds of one operation; yields where it has to wait for others.

        Args:
            operation: What it is, by :func:`.calls.number_of`; all ranks must agree on it.
            steps: One per round.
            lookahead: How many rounds may be published before the first of them has been read; at most
                :data:`LOOKAHEAD`.
            deadline: Until when others may be waited for, on the monotonic clock, in seconds.

        Raises:
            PeerLostError: If a peer is gone.
            TimeoutError: If a peer does not take what is sent.
            DistBackendError: If the ranks are not in the same operation.
        """
        # Messages count rounds in 16 bits, which is enough: ranks are never more than two rounds apart.
        total = sum(sum(step.num_bytes) for step in steps)
        for step in steps[:lookahead]:
            self._publish(operation, total, step, deadline)
        for index, step in enumerate(steps):
            self._awaited = list(self._peers)
            while self._awaited:
                if self._receive(self._awaited[0], operation, total, step):
                    del self._awaited[0]
                else:
                    yield
            step.read(self._views(step))
            self._read += 1
            if index + lookahead < len(steps):
                self._publish(operation, total, steps[index + lookahead], deadline)

    def wait(self, deadline: float) -> None:
        """Sleeps until the peers that an operation waits for have sent something.

        Raises:
            PeerLostError: If one is gone.
            TimeoutError: If nothing came before the deadline.
        """
        self._links.wait([self._peers[place] for place in self._awaited], deadline)

    def leave(self) -> None:
        """Leaves the peers."""
        self._links.shut(LEFT)

    def close(self) -> None:
        """Frees the links, when nobody uses them any more."""
        self._links.close()

    def break_off(self, reason: str) -> None:
        """Leaves the peers because of an error, and tells them."""
        self._links.shut(BROKEN, reason)

    def _publish(self, operation: int, total: int, step: Step, deadline: float) -> None:
        num_bytes = step.num_bytes[self.rank]
        HEADER.pack_into(self._own_bytes, 0, ROUND, self._published & 0xFFFF, operation, total)
        length = HEADER.size
        if 0 < num_bytes <= INLINE_NUM_BYTES:
            length += num_bytes
            step.publish(self._own_message[HEADER.size : length])
        elif num_bytes:
            step.publish(self._slots[self.rank][self._published % NUM_SLOTS][:num_bytes])
        self._published += 1
        message = [self._own_bytes[:length]]
        for peer in self._peers.values():
            self._links.send(peer, message, deadline)

    def _receive(self, place: int, operation: int, total: int, step: Step) -> bool:
        peer, into = self._peers[place], self._bytes[place]
        if not self._links.receive(peer, into):
            return False
        _, number, their_operation, their_total = HEADER.unpack_from(into)
        own_number = self._read & 0xFFFF
        if (their_operation, their_total, number) != (operation, total, own_number):
            if (their_operation, number) == (operation, own_number):
                raise DistBackendError(
                    f"the ranks do not call the same collectives: they call {described(operation)} with tensors of"
                    f" different sizes, with which all ranks exchange {their_total} bytes according to {peer}, and"
                    f" {total} bytes according to this rank. Give all ranks tensors of the same shape, for example by"
                    " padding them"
                )
            theirs, ours = described(their_operation), described(operation)
            raise DistBackendError(
                f"the ranks do not call the same collectives: {peer} is in {theirs}, round {number},"
                f" {their_total} bytes, and this rank in {ours}, round {own_number}, {total} bytes"
            )
        return True

    def _views(self, step: Step) -> list[Tensor]:
        views = []
        for place, num_bytes in enumerate(step.num_bytes):
            if not num_bytes or place == self.rank:
                views.append(_NOTHING)
            elif num_bytes > INLINE_NUM_BYTES:
                views.append(self._slots[place][self._read % NUM_SLOTS][:num_bytes])
            else:
                views.append(self._messages[place][HEADER.size : HEADER.size + num_bytes])
        return views
