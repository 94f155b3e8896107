"""Comparison of the operations of ranks, and the error if ranks have paired different operations.

Each rank detects a mismatch by itself before it uses the data of the other ranks: rounds compare the operations with
every message, and the native library does so, too. After a mismatch, a rank reads its own stack, sends the other ranks
a text with its operation and the user's call, and waits for their texts. The error of every rank therefore names both
calls. Without a mismatch, no stack is read.
"""

import time
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Final, NamedTuple

from torch.distributed import DistBackendError

from lightning_strategies_ext._system.call_sites import call_site_of_process
from lightning_strategies_ext.identities import FIELDS, GRADIENTS, describe_identity, merge_identities
from lightning_strategies_ext.shm.links import MESSAGE_NUM_BYTES, Links, LocalPeer, MismatchFoundError, PeerLostError

#: Seconds that a rank waits for the text of another rank.
_TEXT_TIMEOUT_S: Final = 2.0


class Operation(NamedTuple):
    """Operation of one rank.

    Attributes:
        collective: Name of the collective, with its arguments as far as ranks compare them.
        tensors: Text about the tensors, which follows the name.
        identity: Identity of the operation, see :mod:`lightning_strategies_ext.identities`.
    """

    collective: str
    tensors: str
    identity: int

    def __str__(self) -> str:
        identity_text = describe_identity(self.identity)
        call = f"{self.collective}{self.tensors}"
        return f"exchanges {identity_text} by {call}" if identity_text else f"calls {call}"

    def differs_from(self, other: "Operation") -> bool:
        """Returns whether two ranks must not pair these operations."""
        return self[:2] != other[:2] or merge_identities(self.identity, other.identity) is None

    @property
    def is_of_gradients(self) -> bool:
        """Whether gradients are exchanged."""
        return self.identity & FIELDS[0] == GRADIENTS


class Comparison:
    """Creates the error of one rank after a mismatch.

    Args:
        local_rank: Local rank of this process: its index among the ranks of the group on this host.
        own: Information about this rank.
        peers: Other ranks of the host, by local rank.
        links: Links to the peers.
    """

    def __init__(self, local_rank: int, own: LocalPeer, peers: Mapping[int, LocalPeer], links: Links) -> None:
        self._local_rank = local_rank
        self._ranks = {local_rank: own, **peers}
        self._links = links

    def mismatch(self, operations: Sequence[Operation | None]) -> DistBackendError:
        """Returns the error after this rank has found a mismatch; exchanges the user's calls with the other ranks.

        Args:
            operations: Operation of each rank of the host; None if it is unknown. At least two are known.
        """
        known = {local_rank: operation for local_rank, operation in enumerate(operations) if operation is not None}
        pairs = combinations(known, 2)
        pair = next((pair for pair in pairs if known[pair[0]].differs_from(known[pair[1]])), tuple(known)[:2])
        own_text = self._report(known[self._local_rank])
        texts = {
            local_rank: own_text if local_rank == self._local_rank else self._receive(local_rank) for local_rank in pair
        }
        first, second = (known[local_rank] for local_rank in pair)
        if first.is_of_gradients and second.is_of_gradients:
            advice = (
                "A rank has left out a backward pass, or has run one more than the others. Run the same backward"
                " passes for each batch on every rank; a loss of zero, such as `0 * output.sum()`, keeps the ranks"
                " together"
            )
        elif first.collective == second.collective and merge_identities(first.identity, second.identity) is not None:
            advice = "Pass tensors of the same shape and dtype on all ranks, for example by padding them"
        else:
            advice = "Call the same collectives in the same order on all ranks"
        return self._error({local_rank: text or str(known[local_rank]) for local_rank, text in texts.items()}, advice)

    def reply_to_mismatch(self, found: MismatchFoundError, own: Operation) -> DistBackendError:
        """Returns the error after a peer has found a mismatch first; sends the peer the call of this rank."""
        local_rank = next(local_rank for local_rank, peer in self._ranks.items() if peer == found.peer)
        return self._error({local_rank: str(found), self._local_rank: self._report(own)})

    def _report(self, own: Operation) -> str:
        """Sends the peers the operation and the user's call of this rank, and returns them as a text."""
        site = call_site_of_process()
        text = f"{own}, at {site}" if site else str(own)
        self._links.report_mismatch(text)
        return text

    def _receive(self, local_rank: int) -> str:
        """Returns the text of a peer; empty if none arrives, because the peer does not run."""
        peer, into = self._ranks[local_rank], memoryview(bytearray(MESSAGE_NUM_BYTES))
        deadline = time.monotonic() + _TEXT_TIMEOUT_S
        try:
            while True:
                if not self._links.receive(peer, into):  # earlier messages belong to operations that have failed
                    self._links.wait([peer], deadline)
        except MismatchFoundError as found:
            return str(found)
        except (PeerLostError, TimeoutError):
            return ""

    def _error(self, texts: Mapping[int, str], advice: str = "") -> DistBackendError:
        ranks = sorted(texts, key=lambda local_rank: self._ranks[local_rank].global_rank)
        listed = "; ".join(f"rank {self._ranks[local_rank].global_rank} {texts[local_rank]}" for local_rank in ranks)
        return DistBackendError(f"the ranks do not call the same collectives: {listed}{advice and f'. {advice}'}")
