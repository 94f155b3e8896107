"""A fetcher that gives a rank as many training batches as the other ranks have, its last one again if need be."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_strategies_ext.exceptions import UnevenInputsError

ADVICE = (
    "Give all ranks the same number of batches, or give the strategy `uneven_inputs='stop'` to end the epoch with the"
    " first that runs out, or 'join' to let the others train to their end."
)


@dataclass
class Batch:
    """The training batch that a rank is at.

    Attributes:
        number: Batches of this epoch so far, with this one.
        is_shadow: Whether it is the last one again, and counts for nothing.
        has_next: Whether this rank has another one after it; None if all ranks know that without being told.
    """

    number: int = 0
    is_shadow: bool = False
    has_next: bool | None = None


class EvenFetcher:
    """Gives a rank's training loop its batches, and as many as it is told.

    It stands in for Lightning's fetcher, to which everything else goes that is asked of it.

    Args:
        inner: Lightning's.
        begin: Told of each batch.
        num_own: How many there are on this rank; None if that is not known.
        agreed: How many each epoch has on all ranks; infinity if that is not known.
        ends_with_own: Whether the epoch ends where this rank's own batches do.
    """

    _OWN = (
        "inner",
        "begin",
        "num_own",
        "agreed",
        "ends_with_own",
        "fetched",
        "done",
        "first_missed",
        "_last",
        "_ahead",
    )

    fetched: int
    done: bool
    first_missed: dict[int, int]
    _last: Any
    _ahead: Any

    def __init__(
        self,
        inner: Any,
        begin: Callable[[Batch], None],
        num_own: int | None,
        agreed: float,
        *,
        ends_with_own: bool = False,
    ) -> None:
        self.inner = inner
        self.begin = begin
        self.num_own = num_own
        self.agreed = agreed
        self.ends_with_own = ends_with_own
        self._reset()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.inner, name, value)

    def __iter__(self) -> "EvenFetcher":
        iter(self.inner)
        self._reset()
        return self

    def __next__(self) -> Any:
        if self.done or (self.ends_with_own and self._ahead is None):
            self.done = True
            raise StopIteration
        number = self.fetched + 1
        if self.num_own is None:
            item, batch = self._next_of_unknown(number)
        else:
            is_shadow = number > self.num_own
            is_again = is_shadow and self._last is not _NOT_DRAWN
            item, batch = self._last if is_again else next(self.inner), Batch(number, is_shadow)
        self._last = item
        self.fetched = number
        # Lightning takes a limit for the length and draws no batch ahead. Where a stream is shorter than the limit, no
        # batch is the last one, so Lightning drops the rest of the last window of accumulation.
        is_last = self.ends_with_own and batch.has_next is False and self.inner.length is None
        self.done = number >= self.agreed or is_last
        self.begin(batch)
        return item

    def end(self) -> None:
        """Ends the epoch."""
        self.done = True

    def note_short(self, short: list[int], number: int) -> None:
        """Keeps which ranks had no batch left after this one, when they are first heard of."""
        for rank in short:
            self.first_missed.setdefault(rank, number)

    def _next_of_unknown(self, number: int) -> tuple[Any, Batch]:
        item = self._draw() if self._ahead is _NOT_DRAWN else self._ahead
        is_shadow = item is None
        if is_shadow and self._last is _NOT_DRAWN:
            raise UnevenInputsError(f"This rank has no training batch at all. {ADVICE.partition(',')[0]}.")
        self._ahead = None if is_shadow else self._draw()
        return self._last if is_shadow else item, Batch(number, is_shadow, self._ahead is not None)

    def _draw(self) -> Any:
        return next(self.inner, None)

    def _reset(self) -> None:
        self.fetched = 0
        self.done = False
        self.first_missed = {}
        self._last = self._ahead = _NOT_DRAWN


_NOT_DRAWN = object()
