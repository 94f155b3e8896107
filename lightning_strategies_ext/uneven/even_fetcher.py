"""Fetcher that returns the same number of training batches on all ranks; it repeats the last batch if needed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_strategies_ext.exceptions import UnevenInputsError

ADVICE = (
    "Give all ranks the same number of batches, or set `uneven_inputs='stop'` on the strategy to end the epoch with"
    " the first rank that runs out, or 'join' to let the other ranks train to their end."
)


@dataclass
class CurrentBatch:
    """Current training batch of a rank.

    Attributes:
        number: Number of this batch in the epoch, from 1.
        is_shadow: Whether it repeats the last batch, without effect.
        has_next: Whether this rank has another batch; None if all ranks know this without a transfer.
    """

    number: int = 0
    is_shadow: bool = False
    has_next: bool | None = None


class EvenFetcher:
    """Returns a rank's batches to the training loop, for the agreed number of steps.

    Replaces Lightning's fetcher, and forwards all other attributes to it.

    Args:
        inner: Lightning's fetcher.
        on_batch: Function that is called with each batch.
        num_local: Number of batches of this rank; None if unknown.
        num_agreed: Number of batches of each epoch on all ranks; infinity if unknown.
        ends_with_local: Whether the epoch ends after the last batch of this rank.
    """

    _OWN_ATTRIBUTES = (
        "inner",
        "on_batch",
        "num_local",
        "num_agreed",
        "ends_with_local",
        "fetched",
        "done",
        "first_missing",
        "_last",
        "_ahead",
    )

    fetched: int
    done: bool
    first_missing: dict[int, int]
    _last: Any
    _ahead: Any

    def __init__(
        self,
        inner: Any,
        on_batch: Callable[[CurrentBatch], None],
        num_local: int | None,
        num_agreed: float,
        *,
        ends_with_local: bool = False,
    ) -> None:
        self.inner = inner
        self.on_batch = on_batch
        self.num_local = num_local
        self.num_agreed = num_agreed
        self.ends_with_local = ends_with_local
        self._reset()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN_ATTRIBUTES:
            object.__setattr__(self, name, value)
        else:
            setattr(self.inner, name, value)

    def __iter__(self) -> "EvenFetcher":
        iter(self.inner)
        self._reset()
        return self

    def __next__(self) -> Any:
        if self.done or (self.ends_with_local and self._ahead is None):
            self.done = True
            raise StopIteration
        number = self.fetched + 1
        if self.num_local is None:
            item, batch = self._next_of_unknown(number)
        else:
            is_shadow = number > self.num_local
            is_again = is_shadow and self._last is not _NOT_DRAWN
            item, batch = self._last if is_again else next(self.inner), CurrentBatch(number, is_shadow)
        self._last = item
        self.fetched = number
        # Lightning treats a limit as the length and fetches no batch ahead. If a stream is shorter than the limit, no
        # batch is the last one, and Lightning drops the rest of the last accumulation window.
        is_last = self.ends_with_local and batch.has_next is False and self.inner.length is None
        self.done = number >= self.num_agreed or is_last
        self.on_batch(batch)
        return item

    def end(self) -> None:
        """Ends the epoch."""
        self.done = True

    def record_exhausted(self, exhausted: list[int], number: int) -> None:
        """Records the ranks without a batch after this one, at the first call for each rank."""
        for rank in exhausted:
            self.first_missing.setdefault(rank, number)

    def _next_of_unknown(self, number: int) -> tuple[Any, CurrentBatch]:
        item = self._draw() if self._ahead is _NOT_DRAWN else self._ahead
        is_shadow = item is None
        if is_shadow and self._last is _NOT_DRAWN:
            raise UnevenInputsError(f"This rank has no training batch at all. {ADVICE.partition(',')[0]}.")
        self._ahead = None if is_shadow else self._draw()
        return self._last if is_shadow else item, CurrentBatch(number, is_shadow, self._ahead is not None)

    def _draw(self) -> Any:
        return next(self.inner, None)

    def _reset(self) -> None:
        self.fetched = 0
        self.done = False
        self.first_missing = {}
        self._last = self._ahead = _NOT_DRAWN


_NOT_DRAWN = object()
