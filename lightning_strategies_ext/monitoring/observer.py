"""Interface by which engines report their exchanges."""

from typing import Protocol


class ExchangeObserver(Protocol):
    """Receives the times of exchanges. Engines without an observer do not measure them."""

    def on_exchange_change(self) -> None:
        """Called on the training thread in a step: its exchange and later ones may contain other gradients."""

    def on_exchange(
        self, begin_ns: int, ready_ns: int, end_ns: int, num_bytes: int, *, is_model_exchange: bool = False
    ) -> None:
        """Called on the training thread after each exchange. Times are values of ``time.time_ns()``.

        Args:
            begin_ns: Time at which the exchange started.
            ready_ns: Time from which this rank only waited for the exchange.
            end_ns: Time at which the exchange ended on this rank.
            num_bytes: Number of bytes that this rank has contributed.
            is_model_exchange: Whether models were averaged, in some steps, instead of gradients, in every step.
        """
