"""Exchange of the values of ``self.log(..., sync_dist=True)``: one per step, and one at the end of an epoch.

Lightning reduces each value by itself, when it is logged and again at the end of the epoch, and matches the values of
different ranks by their order. Here the values that a ``training_step``, ``validation_step``, or ``test_step`` logs are
exchanged together when the hook returns, and the values of an epoch before the ``on_*_epoch_end`` hooks. Values are
matched by key (:mod:`.packed_exchange`).
"""

import os
from collections.abc import Callable, Sequence
from traceback import FrameSummary, walk_stack

from torch import Tensor

from lightning_strategies_ext._lightning.trainer_logging import LoggedMetric
from lightning_strategies_ext.collectives import Collectives
from lightning_strategies_ext.collectives.packed_exchange import (
    Contribution,
    DifferentPartsError,
    PackedExchange,
    Part,
)
from lightning_strategies_ext.exceptions import LoggedKeysError
from lightning_strategies_ext.failure.rank_status import format_ranks
from lightning_strategies_ext.failure.thread_activity import user_code_frames

#: Number of keys that an error lists per rank.
_MAX_KEYS_LISTED = 8
#: Key, name, reduction, hook, and location of each value of a rank.
_Description = list[tuple[str, str, str, str, str]]


class LoggedValues:
    """Exchanges the synchronized values of one rank during a stage.

    Args:
        collectives: Function that returns the current collectives of this rank.
        is_shadowed: Function that returns whether ranks without batches may repeat the current step, so that a value is
            reduced at once over the other ranks (``uneven_inputs="join"``).

    Attributes:
        pending: Values of the current hook, by key, which :meth:`start` exchanges.
    """

    def __init__(self, collectives: Callable[[], Collectives], is_shadowed: Callable[[Tensor], bool]) -> None:
        self.pending: dict[str, LoggedMetric] = {}
        self._collectives = collectives
        self._is_shadowed = is_shadowed
        self._exchange = PackedExchange("logged_values")
        self._in_flight: tuple[list[LoggedMetric], Callable[[], list[Tensor]]] | None = None

    def accepts(self, value: Tensor) -> bool:
        """Returns whether a value of a step is exchanged with others, and not at once; the same on all ranks."""
        return value.is_cpu and not self._is_shadowed(value)

    def start(self) -> None:
        """Starts to exchange the pending values. Collective: all ranks call it when a hook returns."""
        metrics = [*self.pending.values()]
        parts = [Part(key, metric.op, metric.step_value) for key, metric in self.pending.items()]
        self.pending.clear()
        self.finish()
        try:
            finish = self._exchange.start(self._collectives(), "step", parts, lambda: _describe(metrics))
        except DifferentPartsError as error:
            raise _error_of(error.contributions) from None
        self._in_flight = metrics, finish

    def finish(self) -> None:
        """Waits for the exchange of a step, if one is in flight, and stores the reduced values.

        Raises:
            LoggedKeysError: If the ranks have logged different keys.
        """
        if self._in_flight is None:
            return
        (metrics, finish), self._in_flight = self._in_flight, None
        if self._collectives().is_local:
            return  # this rank has failed; its own values remain
        try:
            values = finish()
        except DifferentPartsError as error:
            raise _error_of(error.contributions) from None
        for metric, value in zip(metrics, values, strict=True):
            metric.set_step_value(value)

    def reduce_epoch(self, metrics: Sequence[LoggedMetric]) -> None:
        """Reduces the values of an epoch. Collective: all ranks call it.

        A mean is the sum over the samples of all ranks, divided by their number. Lightning divides the mean of the sums
        by the mean of the numbers, which it rounds down (Lightning issue 21838).

        Args:
            metrics: Values that have not been reduced yet, at least one.

        Raises:
            LoggedKeysError: If the ranks have logged different keys.
        """
        parts = []
        for metric in metrics:
            key = f"{metric.hook}.{metric.label}"
            parts.append(Part(key, "sum" if metric.is_mean else metric.op, metric.epoch_value))
            if metric.is_mean:
                parts.append(Part(f"{key} samples", "sum", metric.num_samples))
        try:
            values = iter(self._exchange.start(self._collectives(), "epoch", parts, lambda: _describe(metrics))())
        except DifferentPartsError as error:
            raise _error_of(error.contributions) from None
        for metric in metrics:
            value = next(values)
            metric.set_epoch_value(value / next(values) if metric.is_mean else value)

    def reset(self) -> None:
        """Drops values that have not been exchanged, after the ranks have left their world."""
        self.pending.clear()
        self._in_flight = None

    def find_location(self) -> str:
        """Returns file and line of the user's code that is running; empty if only libraries are running."""
        frames = [FrameSummary(frame.f_code.co_filename, line, "", lookup_line=False) for frame, line in walk_stack(None)]
        location = user_code_frames(frames[::-1])[-1].rpartition(" in ")[0]
        path = location.rpartition(":")[0]
        if path == __file__:
            return ""
        directory = os.getcwd() + os.sep
        return location.removeprefix(directory)


def _describe(metrics: Sequence[LoggedMetric]) -> _Description:
    return [
        (
            f"{metric.hook}.{metric.label}",
            metric.label,
            f"{metric.op}, {str(metric.epoch_value.dtype).removeprefix('torch.')}",
            metric.hook,
            metric.location,
        )
        for metric in metrics
    ]


def _error_of(contributions: Sequence[Contribution]) -> LoggedKeysError:
    """Returns the error that names the keys that only some ranks have logged."""
    reductions = [{key: reduction for key, _, reduction, _, _ in each.description} for each in contributions]
    common = {
        key for key, reduction in reductions[0].items() if all(each.get(key) == reduction for each in reductions)
    }
    texts = []
    for number, (ranks, description) in enumerate(contributions):
        description = sorted(description)
        own = [entry for entry in description if entry[0] not in common]
        listed = description if len(description) <= _MAX_KEYS_LISTED else own[:_MAX_KEYS_LISTED]
        names = [
            repr(name) + (f" ({reduction})" if _differs_in_reduction(key, reductions) else "")
            for key, name, reduction, _, _ in listed
        ]
        num_others = len(description) - len(listed)
        others = f" and {num_others} others" if num_others else ""
        _, _, _, hook, location = (own or description)[0]
        where = f" in {hook}" + (f" ({location})" if location else "")
        verb = "reduces" if len(ranks) == 1 else "reduce"
        what = " logged values" if number == 0 else ""
        texts.append(f"{format_ranks(ranks)} {verb}{what} [{', '.join(names)}]{others}{where}")
    text = ", ".join(texts)
    return LoggedKeysError(f"{text[0].upper()}{text[1:]}. Log the same keys with the same arguments on all ranks.")


def _differs_in_reduction(key: str, reductions: Sequence[dict[str, str]]) -> bool:
    """Returns whether all ranks log a key, but not with the same reduction and dtype."""
    return all(key in each for each in reductions) and len({each[key] for each in reductions}) > 1
