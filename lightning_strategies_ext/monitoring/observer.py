"""What an engine tells of its exchanges, to whoever listens."""

from typing import Protocol


class ExchangeObserver(Protocol):
    """Hears of exchanges; an engine that has none asks no clock."""

    def exchange_changes(self) -> None:
        """Called on the thread that trains, in a step: from its exchange on, they may be of other gradients."""

    def exchanged(
        self, begin_ns: int, ready_ns: int, end_ns: int, num_bytes: int, *, is_of_models: bool = False
    ) -> None:
        """Called on the thread that trains when an exchange is over. All times are those of ``time.time_ns()``.

        Args:
            begin_ns: When the first of it was handed over.
            ready_ns: From when on this rank had nothing to do but wait for it.
            end_ns: When it was over on this rank.
            num_bytes: What this rank has handed over.
            is_of_models: Whether models were brought together, in some steps, and not gradients, in each.
        """
