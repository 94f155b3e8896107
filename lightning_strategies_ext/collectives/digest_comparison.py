"""Comparison of the values that ranks pass to a packed exchange, see :mod:`.packed_exchange`.

The ranks have different values if their digests differ. Over gloo, Horovod, and ``shm``, the host compares the digests
before it uses a value. On a GPU, it compares them later.
"""

import json
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.distributed import Store

from lightning_strategies_ext._system.gpu_sync import synchronize_gpu


class Contribution(NamedTuple):
    """What some ranks have passed to an exchange.

    Attributes:
        ranks: The ranks, in ascending order.
        is_final: Whether these ranks will pass no more values of this kind.
        description: Description of the values of the first of them; None if it could not be read.
    """

    ranks: Sequence[int]
    is_final: bool
    description: Any


class DifferentPartsError(Exception):
    """The ranks have passed values of different names, reductions, dtypes, or shapes. Raised on every rank.

    Attributes:
        contributions: One entry for each distinct set of values, in the order of its first rank; at most
            :data:`MAX_CONTRIBUTIONS`.
        has_all: Whether there are no more distinct sets.
    """

    def __init__(self, contributions: Sequence[Contribution], *, has_all: bool) -> None:
        super().__init__("the ranks exchange different values")
        self.contributions = contributions
        self.has_all = has_all


#: Number of distinct sets of values that an error describes.
MAX_CONTRIBUTIONS: Final = 8


class DeferredComparison:
    """Digests of exchanges on a GPU, which the host compares when the GPU has completed the exchanges.

    Ranks may compare an exchange after different collectives, so an error must not start one. Each rank therefore
    publishes the description of its values in a store before the first exchange of them.

    Args:
        find_store: Function that returns the store of all ranks; called before the first exchange.
    """

    def __init__(self, find_store: Callable[[], Store | None]) -> None:
        self._find_store = find_store
        self._store: Store | None = None
        self._published: set[int] = set()
        self._pending: deque[tuple[torch.cuda.Event | None, Tensor, int]] = deque()

    def publish(self, rank: int, digest: int, describe: Callable[[], Any]) -> None:
        """Publishes a description of this rank, unless it has done so.

        Args:
            rank: This rank.
            digest: Digest of the values.
            describe: Function that returns the description, of types that JSON has.
        """
        if digest in self._published:
            return
        if self._store is None:
            self._store = self._find_store()
        if self._store is not None:
            self._store.set(f"{rank}/{digest}", json.dumps(describe()))
        self._published.add(digest)

    def add(self, digests: Tensor, own: int) -> None:
        """Starts to copy the digests of all ranks to the host; ``own`` is this rank's digest."""
        copy = torch.empty(digests.shape, dtype=digests.dtype, pin_memory=digests.is_cuda)
        copy.copy_(digests, non_blocking=True)
        event = torch.cuda.Event() if digests.is_cuda else None
        if event is not None:
            event.record()
        self._pending.append((event, copy, own))

    def check(self, *, waits: bool) -> None:
        """Compares digests, see :meth:`PackedExchange.check_deferred`."""
        while self._pending:
            event, digests, own = self._pending[0]
            if event is not None and not event.query():
                if not waits:
                    return
                event.synchronize()
            self._pending.popleft()
            if (digests != own).any():
                synchronize_gpu()  # raises if the exchange was aborted, so that the digests are undefined
                self._raise_difference(digests.tolist())

    def _raise_difference(self, digests: Sequence[int]) -> None:
        ranks: dict[int, list[int]] = {}
        for rank, digest in enumerate(digests):
            ranks.setdefault(digest, []).append(rank)
        contributions = [
            Contribution(ranks_of_part, True, self._read(ranks_of_part[0], digest))
            for digest, ranks_of_part in [*ranks.items()][:MAX_CONTRIBUTIONS]
        ]
        raise DifferentPartsError(contributions, has_all=len(ranks) <= MAX_CONTRIBUTIONS)

    def _read(self, rank: int, digest: int) -> Any:
        key = f"{rank}/{digest}"
        try:
            return None if self._store is None or not self._store.check([key]) else json.loads(self._store.get(key))
        except RuntimeError:  # the process of the store has exited, possibly because it has compared earlier
            return None
