"""Rounds: exchange of data between the ranks of one host.

In a round every rank publishes some bytes, possibly none, to all other ranks, and then reads their bytes. A few bytes
are sent in the message itself, many in a slot of the segment. All collectives are sequences of rounds (see
:mod:`.algorithms`), in the same order on all ranks.

A rank publishes at most two rounds ahead of the round that it reads: its message of round k implies that it has read
round k - 2. A rank that has received the messages of round k from all peers may therefore overwrite round k - 2 with
round k + 2. Four slots therefore suffice, and no rank waits for permission to write.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.distributed import DistBackendError

from lightning_strategies_ext.identities import merge_identities
from lightning_strategies_ext.shm.comparison import Comparison, Operation
from lightning_strategies_ext.shm.links import (
    BROKEN,
    HEADER,
    INLINE_NUM_BYTES,
    LEFT,
    MESSAGE_NUM_BYTES,
    ROUND,
    Links,
    LocalPeer,
    MismatchFoundError,
)
from lightning_strategies_ext.shm.operation_ids import describe_operation
from lightning_strategies_ext.shm.segments import NUM_SLOTS, Segment

#: Maximum number of rounds that are published before the first of them has been read.
LOOKAHEAD: Final = 2
#: Seconds for which a rank polls before it sleeps. Between two polls, it yields its core.
POLL_S: Final = 100e-6
_EMPTY: Final = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class Round:
    """One round of one operation.

    Attributes:
        num_bytes: Number of bytes that each rank publishes, in rank order.
        publish: Function that writes this rank's bytes into a given tensor; not called for 0 bytes.
        read: Function that receives the bytes of each rank, in rank order, valid until it returns; an empty tensor for
            this rank.
    """

    num_bytes: Sequence[int]
    publish: Callable[[Tensor], None]
    read: Callable[[list[Tensor]], None]


class Rounds:
    """Runs the rounds of one rank.

    Args:
        local_rank: Local rank of this process: its index among the ranks of the group on this host.
        peers: Other ranks of the host, by local rank.
        links: Links to the peers.
        segments: Segments of all ranks of the host, by local rank.
        comparison: Creates the error if ranks are in different operations.

    Attributes:
        poll_s: Time for which the caller polls before it sleeps, in seconds.
    """

    poll_s: Final = POLL_S

    def __init__(
        self,
        local_rank: int,
        peers: dict[int, LocalPeer],
        links: Links,
        segments: Sequence[Segment],
        comparison: Comparison,
    ) -> None:
        self.local_rank = local_rank
        self.size = len(segments)
        self.slot_num_bytes = min(segment.slot_num_bytes for segment in segments)
        self._peers = peers
        self._links = links
        self._comparison = comparison
        self._slots = [segment.slots for segment in segments]
        self._own_message = torch.empty(MESSAGE_NUM_BYTES, dtype=torch.uint8)
        self._own_bytes = memoryview(self._own_message.numpy())  # type: ignore[arg-type]
        self._messages = [torch.empty(MESSAGE_NUM_BYTES, dtype=torch.uint8) for _ in segments]
        self._bytes = [memoryview(message.numpy()) for message in self._messages]  # type: ignore[arg-type]
        self._published = self._read = 0
        #: Operation number, size in bytes, identity, and checksum of the tensors of the current operation.
        self._own = 0, 0, 0, 0
        self._known_identity = 0  # identity of the operation, if this rank or a peer has stated it
        self._awaited: list[int] = []

    def run(
        self,
        operation: int,
        rounds: Sequence[Round],
        lookahead: int,
        deadline: float,
        identity: int = 0,
        checksum: int = 0,
    ) -> Generator[None, None, None]:
        """Runs the rounds of one operation; yields whenever other ranks are not ready yet.

        Args:
            operation: Number of the operation, from :func:`.operation_ids.operation_id`; must be equal on all ranks.
            rounds: Rounds of the operation.
            lookahead: Number of rounds that may be published before the first of them has been read; at most
                :data:`LOOKAHEAD`.
            deadline: Time on the monotonic clock until which this rank waits for others, in seconds.
            identity: Identity of the operation, see :mod:`lightning_strategies_ext.identities`.
            checksum: Checksum of coalesced tensors, from :func:`.operation_ids.checksum_of`; equal on all ranks.

        Raises:
            PeerLostError: If a peer has exited or left the group.
            TimeoutError: If a peer does not receive messages before the deadline.
            DistBackendError: If the ranks are in different operations.
        """
        # Messages have 16 bits for the round number, which suffice: ranks are at most two rounds apart.
        total = sum(sum(step.num_bytes) for step in rounds)
        self._own = operation, total, identity, checksum
        self._known_identity = identity
        for step in rounds[:lookahead]:
            self._publish(step, deadline)
        for index, step in enumerate(rounds):
            self._awaited = list(self._peers)
            while self._awaited:
                if self._receive(self._awaited[0]):
                    del self._awaited[0]
                else:
                    yield
            step.read(self._views(step))
            self._read += 1
            if index + lookahead < len(rounds):
                self._publish(rounds[index + lookahead], deadline)

    def wait(self, deadline: float) -> None:
        """Sleeps until a message has arrived from a peer that the operation waits for.

        Raises:
            PeerLostError: If an awaited peer has exited or left the group.
            TimeoutError: If no message has arrived before the deadline.
        """
        self._links.wait([self._peers[local_rank] for local_rank in self._awaited], deadline)

    def leave(self) -> None:
        """Leaves the group and notifies the peers."""
        self._links.shut_down(LEFT)

    def close(self) -> None:
        """Closes the links; no thread may use them any more."""
        self._links.close()

    def abort(self, reason: str) -> None:
        """Leaves the group because of an error, and sends the reason to the peers."""
        self._links.shut_down(BROKEN, reason)

    def _publish(self, step: Round, deadline: float) -> None:
        num_bytes = step.num_bytes[self.local_rank]
        HEADER.pack_into(self._own_bytes, 0, ROUND, self._published & 0xFFFF, *self._own)
        length = HEADER.size
        if 0 < num_bytes <= INLINE_NUM_BYTES:
            length += num_bytes
            step.publish(self._own_message[HEADER.size : length])
        elif num_bytes:
            step.publish(self._slots[self.local_rank][self._published % NUM_SLOTS][:num_bytes])
        self._published += 1
        message = [self._own_bytes[:length]]
        for peer in self._peers.values():
            self._links.send(peer, message, deadline)

    def _receive(self, local_rank: int) -> bool:
        peer, into = self._peers[local_rank], self._bytes[local_rank]
        if not self._links.receive(peer, into):
            return False
        _, number, operation, total, identity, checksum = HEADER.unpack_from(into)
        known: int | None = self._known_identity
        if identity != known:
            known = merge_identities(self._known_identity, identity)
        is_own = (operation, total, checksum) == (self._own[0], self._own[1], self._own[3])
        if not is_own or number != self._read & 0xFFFF or known is None:
            operations = [
                None if other == self.local_rank or other in self._awaited[1:] else received_operation(message)
                for other, message in enumerate(self._bytes)
            ]
            operations[self.local_rank] = self.current_operation
            raise self._comparison.mismatch(operations)
        self._known_identity = known
        return True

    @property
    def current_operation(self) -> Operation:
        """The operation of this rank."""
        return _described(*self._own)

    def reply_to_mismatch(self, found: MismatchFoundError) -> DistBackendError:
        """Returns the error after a peer has found a mismatch, see :meth:`.Comparison.reply_to_mismatch`."""
        return self._comparison.reply_to_mismatch(found, self.current_operation)

    def _views(self, step: Round) -> list[Tensor]:
        views = []
        for local_rank, num_bytes in enumerate(step.num_bytes):
            if not num_bytes or local_rank == self.local_rank:
                views.append(_EMPTY)
            elif num_bytes > INLINE_NUM_BYTES:
                views.append(self._slots[local_rank][self._read % NUM_SLOTS][:num_bytes])
            else:
                views.append(self._messages[local_rank][HEADER.size : HEADER.size + num_bytes])
        return views


def received_operation(message: memoryview) -> Operation:
    """Returns the operation of the rank that has sent a message."""
    return _described(*HEADER.unpack_from(message)[2:])


def _described(operation: int, total: int, identity: int, checksum: int) -> Operation:
    tensors = f", {total} bytes on all ranks together"
    if checksum:
        tensors += f" (checksum of sizes and dtypes: {checksum:08x})"
    return Operation(describe_operation(operation), tensors, identity)
