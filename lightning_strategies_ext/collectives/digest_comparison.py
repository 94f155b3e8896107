"""Comparison of the values that ranks pass to a packed exchange, see :mod:`.packed_exchange`.

The ranks have different values if their digests differ. The error has a description of the values of each rank. Ranks
that compare at the same time send their descriptions. On GPUs, they compare at different times, so each rank publishes
its descriptions in a store before the exchange.
"""

import json
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store

from lightning_strategies_ext._system.gpu_sync import is_aborted
from lightning_strategies_ext.collectives.packed_layout import ABSENT, FINAL


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
    """The ranks have passed values of different names, reductions, dtypes, or shapes.

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


def error_of(
    digests: Sequence[int], flags: Sequence[int], description_of: Callable[[int, int], Any]
) -> DifferentPartsError:
    """Returns the error for ranks with different values.

    Args:
        digests: Digest of each rank.
        flags: Flag of each rank; those that are absent have no values.
        description_of: Function that returns the description of a rank, given the rank and its digest.
    """
    ranks: dict[tuple[int, int], list[int]] = {}
    for rank, (digest, flag) in enumerate(zip(digests, flags, strict=True)):
        if flag != ABSENT:
            ranks.setdefault((digest, flag), []).append(rank)
    contributions = [
        Contribution(ranks_of_part, flag == FINAL, description_of(ranks_of_part[0], digest))
        for (digest, flag), ranks_of_part in [*ranks.items()][:MAX_CONTRIBUTIONS]
    ]
    return DifferentPartsError(contributions, has_all=len(ranks) <= MAX_CONTRIBUTIONS)


class DeferredComparison:
    """Compares the digests of exchanges on a GPU after the GPU has completed them. Its errors need no collective.

    Args:
        find_store: Function that returns a store of all ranks whose keys no other object uses; None if there are no
            other ranks. It is called before the first exchange.
    """

    def __init__(self, find_store: Callable[[], Store | None]) -> None:
        self._find_store = find_store
        self._store: Store | None = None
        self._published: dict[int, Any] = {}
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
        self._published[digest] = describe()
        with suppress(RuntimeError):  # the process of the store has exited, so the exchange will fail
            if self._store is not None:
                self._store.set(f"{rank}/{digest}", json.dumps(self._published[digest]))

    def add(self, digests: Tensor, own: int) -> None:
        """Starts to copy the digests of all ranks to the host; ``own`` is this rank's digest."""
        copy = torch.empty(digests.shape, dtype=digests.dtype, device="cpu", pin_memory=digests.is_cuda)
        copy.copy_(digests, non_blocking=True)
        event = torch.cuda.Event() if digests.is_cuda else None
        if event is not None:
            event.record()
        self._pending.append((event, copy, own))

    def check(self, *, waits: bool) -> None:
        """Compares the digests that have been copied.

        Args:
            waits: Whether to wait for digests that have not been copied yet.

        Raises:
            DifferentPartsError: If digests differ.
            torch.distributed.DistBackendError: If digests differ because collectives were aborted.
        """
        while self._pending:
            event, digests, own = self._pending[0]
            if event is not None and not event.query():
                if not waits:
                    return
                event.synchronize()
            self._pending.popleft()
            if (digests != own).any():
                if is_aborted():
                    raise dist.DistBackendError("The exchange of logged values was aborted.")
                raise error_of(digests.tolist(), [FINAL] * len(digests), self.read)

    def read(self, rank: int, digest: int) -> Any:
        """Returns the description that a rank has published, or this rank's own of equal values; None without both."""
        key = f"{rank}/{digest}"
        with suppress(RuntimeError):  # the process of the store has exited, possibly because it has raised the error
            if self._store is not None and self._store.check([key]):
                return json.loads(self._store.get(key))
        return self._published.get(digest)
