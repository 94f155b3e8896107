"""Exchange of the values of ``self.log(..., sync_dist=True)``: one per step, and one at the end of an epoch.

Lightning reduces each value by itself, when it is logged and again at the end of the epoch, and matches the values of
different ranks by their order. Here the values that a ``training_step``, ``validation_step``, or ``test_step`` logs are
exchanged together when the hook returns, and the values of an epoch before the ``on_*_epoch_end`` hooks. Values are
matched by key (:mod:`.packed_exchange`). Metrics of torchmetrics are computed together after these hooks
(:mod:`.metric_states`).
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from traceback import walk_stack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store

from lightning_strategies_ext._lightning.trainer_logging import (
    ExchangedResults,
    LoggedMetric,
    set_step_values,
    step_values,
)
from lightning_strategies_ext._system.call_sites import is_user_code
from lightning_strategies_ext.collectives import Collectives, LocalCollectives
from lightning_strategies_ext.collectives.digest_comparison import Contribution, DifferentPartsError
from lightning_strategies_ext.collectives.packed_exchange import PackedExchange, Parts, parts_of
from lightning_strategies_ext.exceptions import LoggedKeysError
from lightning_strategies_ext.failure.rank_status import format_ranks
from lightning_strategies_ext.pytorch import metric_states
from lightning_strategies_ext.torch_distributed.backend_checks import backends_in

#: Name of the exchanges, from which the collectives derive their identity.
_NAME = "logged_values"
_OP = attrgetter("op")
#: Number of keys that an error lists per rank.
_MAX_KEYS_LISTED = 8
#: What stands for the reduction of a metric of torchmetrics.
_METRIC = "metric"
#: Key, name, reduction, hook, and location of each value of a rank.
_Description = list[tuple[str, str, str, str, str]]


class LoggedValues:
    """Exchanges the synchronized values of one rank during a stage.

    Args:
        collectives: Function that returns the current collectives of this rank.
        reduce: Function that Lightning passes to ``self.log`` for synchronized values.
        device: Device of this rank.
        find_store: Function that returns a store of all ranks, in which they publish descriptions on GPUs.

    Attributes:
        device_type: Type of this rank's device; values on other devices are not exchanged together.
        pending: Values of the current hook, by key, which :meth:`start` exchanges.
        is_in_flight: Whether the values of the last hook are being exchanged.
        is_shadowed: Function that returns whether ranks without batches may repeat the current step, so that a value is
            reduced at once over the other ranks (``uneven_inputs="join"``); None if no rank does.
    """

    def __init__(
        self,
        collectives: Callable[[], Collectives],
        reduce: Callable[..., Any],
        device: torch.device,
        find_store: Callable[[], Store | None] | None = None,
    ) -> None:
        self.device_type = device.type
        self.pending: dict[str, LoggedMetric] = {}
        self.is_in_flight = False
        self.is_shadowed: Callable[[Tensor], bool] | None = None
        self._collectives = collectives
        self._reduce = reduce
        self._device = device
        self._find_store = None if device.type == "cpu" else find_store
        self._presence: list[tuple[bool, int]] = []
        self._next_loader = 0
        self._exchange = PackedExchange(_NAME, device, self._find_store)
        self._metrics: Sequence[LoggedMetric] = ()
        self._finish: Callable[[], list[Tensor]] = list

    def start(self) -> None:
        """Starts to exchange the pending values. Collective: all ranks call it when a hook returns."""
        keys, metrics = (*self.pending,), (*self.pending.values(),)
        self.pending.clear()
        if self.is_in_flight:
            self.finish()
        parts = keys, tuple(map(_OP, metrics)), step_values(metrics)
        start = self._exchange.start if self._find_store is None else self._exchange.start_deferred
        try:
            self._finish = start(self._collectives(), "step", parts, lambda: _describe(metrics))
        except DifferentPartsError as error:
            raise _error_of(error.contributions) from None
        self._metrics, self.is_in_flight = metrics, True

    def finish(self, *, waits_for_gpu: bool = False) -> None:
        """Waits for the exchange of a step, if one is in flight, and stores the reduced values.

        On a GPU, values may become NaN before the host raises.

        Args:
            waits_for_gpu: Whether to wait until the ranks' keys are known to be equal on a GPU.

        Raises:
            LoggedKeysError: If the ranks have logged different keys.
        """
        try:
            if self.is_in_flight:
                self.is_in_flight = False
                set_step_values(self._metrics, self._finish())
            if self._find_store is not None:
                self._exchange.check_deferred(waits=waits_for_gpu)
        except DifferentPartsError as error:
            raise _error_of(error.contributions) from None

    def reduce_epoch(self, metrics: Sequence[LoggedMetric], *, is_final: bool = True) -> None:
        """Reduces the values of an epoch. Collective: all ranks call it.

        A mean is the sum over the samples of all ranks, divided by their number. Lightning divides the mean of the sums
        by the mean of the numbers, which it rounds down (Lightning issue 21838).

        A rank that reads a value in a hook may have logged fewer keys than ranks that do not read. The ranks then
        reduce the keys that all of them have, and the rest in another exchange.

        Args:
            metrics: Values that have not been reduced yet, at least one.
            is_final: Whether this rank has logged all values of the epoch, or of the hooks at its end.

        Raises:
            LoggedKeysError: If the ranks have logged different keys.
        """
        self._exchange_common(metrics, self._reduce_now, is_final)

    def compute_metrics(self, metrics: Sequence[LoggedMetric], *, is_final: bool = True) -> None:
        """Computes metrics of torchmetrics from the states of all ranks. Collective: all ranks call it.

        Metrics whose states cannot be gathered together are left to torchmetrics, see
        :func:`.metric_states.is_gathered`.

        Args:
            metrics: Metrics that Lightning is about to compute.
            is_final: As for :meth:`reduce_epoch`.

        Raises:
            LoggedKeysError: If the ranks have logged different metrics, or states of one metric differ in number.
        """
        collectives = self._collectives()
        gathered = [metric for metric in metrics if metric_states.is_gathered(metric.value, self.device_type)]
        if gathered and not collectives.is_local and collectives.rank() is not None and collectives.world_size() > 1:
            self._exchange_common(gathered, self._compute_now, is_final)

    def _exchange_common(
        self,
        metrics: Sequence[LoggedMetric],
        exchange: Callable[[Sequence[LoggedMetric], bool], None],
        is_final: bool,
    ) -> None:
        remaining = {_key_of(metric): metric for metric in metrics}
        while remaining:
            chosen = [*remaining.values()]
            try:
                exchange(chosen, is_final)
            except DifferentPartsError as error:
                common = _keys_of_readers(error)
                chosen = [metric for key, metric in remaining.items() if key in common]
                if not chosen:
                    raise _error_of(error.contributions) from None
                exchange(chosen, True)
            for metric in chosen:
                del remaining[_key_of(metric)]

    def _reduce_now(self, metrics: Sequence[LoggedMetric], is_final: bool) -> None:
        parts, description = _epoch_parts(metrics, self._device), _describe(metrics)
        finish = self._exchange.start(self._collectives(), "epoch", parts, lambda: description, is_final=is_final)
        for metric, value in zip(metrics, _epoch_values(description, finish()), strict=True):
            metric.set_epoch_value(value)

    def _compute_now(self, metrics: Sequence[LoggedMetric], is_final: bool) -> None:
        collectives = self._collectives()
        values = [*{id(metric.value): metric.value for metric in metrics}.values()]
        own = [metric_states.list_states(value) for value in values]
        data = metric_states.to_bytes(own, self._device)
        length = torch.tensor(len(data), device=self._device)
        parts = parts_of((_key_of(metric), "max", length) for metric in metrics)
        finish = self._exchange.start(collectives, "metrics", parts, lambda: _describe(metrics), is_final=is_final)
        max_num_bytes = int(finish()[0])
        gathered = metric_states.gather_bytes(collectives, data, max_num_bytes)
        states = [metric_states.from_bytes(of_rank) for of_rank in gathered]
        for value, *states_of_ranks in zip(values, *states, strict=True):
            if len({*map(len, states_of_ranks)}) > 1:
                label = next(metric.label for metric in metrics if metric.value is value)
                raise _error_of_states(label, [*map(len, states_of_ranks)])
            metric_states.compute(value, states_of_ranks)
        for metric in metrics:
            metric.compute()  # keeps the result of the metric

    def count_evaluating(self, has_batches: list[bool]) -> list[int]:
        """Counts the ranks that have batches of each DataLoader of an evaluation. Collective: all ranks call it.

        Args:
            has_batches: Whether this rank has batches of each DataLoader.
        """
        flags = torch.tensor([*map(int, has_batches)], device=self._device)
        counts: list[int] = self._reduce(flags, reduce_op="sum").tolist()
        self._presence = [*zip(has_batches, counts, strict=True)]
        self._next_loader = 0
        return counts

    def reduce_evaluation(self, results: ExchangedResults, update_epoch_metrics: Callable[[int], Any]) -> None:
        """Reduces the values of an evaluation, or of one DataLoader, when its loop has reached the end.

        Lightning calls it once per DataLoader that has batches, and once more at the end. A rank without batches of a
        DataLoader takes part in the exchange for it without values, and receives the values of the other ranks.

        Args:
            results: This rank's values.
            update_epoch_metrics: Function that is called with the index of a DataLoader whose values this rank has
                received.

        Raises:
            LoggedKeysError: If the ranks have logged different keys.
        """
        if len(self._presence) > 1 and results.dataloader_idx is None and not self._next_loader:
            results.dataloader_idx = 0  # this rank has no batches of the first DataLoader
        current = results.dataloader_idx or 0
        is_end = self._next_loader > current
        collectives = self._collectives()
        for index in range(self._next_loader, len(self._presence) if is_end else current + 1):
            has_batches, num_ranks = self._presence[index] if index < len(self._presence) else (True, 0)
            if not collectives.is_local and 0 < num_ranks < collectives.world_size():
                self._reduce_with_absent(results, has_batches)
                if index != current:
                    update_epoch_metrics(index)
        self._next_loader = 0 if is_end else current + 1
        results.reduce_epoch(is_final=True)

    def _reduce_with_absent(self, results: ExchangedResults, has_batches: bool) -> None:
        # Hooks such as `on_validation_epoch_start` have run on ranks without batches, too.
        missing = [*results.missing(), *results.missing_metrics()] if has_batches else []
        metrics = [metric for metric in missing if metric.is_of_batches]
        parts = _epoch_parts(metrics, self._device) if has_batches else None

        functions = partial(_describe, metrics), lambda: [metric.settings for metric in metrics]
        try:
            reduced = self._exchange.run_with_absent(self._collectives(), "evaluation", parts, *functions)
        except DifferentPartsError as error:
            raise _error_of(error.contributions) from None
        if reduced is None:
            return
        description, settings, parts_of_first = reduced
        values = dict(zip((entry[0] for entry in description), _epoch_values(description, parts_of_first), strict=True))
        for metric in metrics:
            if metric.is_tensor:
                metric.set_epoch_value(values[_key_of(metric)])
        for arguments, entry in zip(settings, description, strict=True) if not has_batches else ():
            if entry[2] == _METRIC:
                results.add_metric(arguments)
            else:
                results.add_reduced(arguments, values[entry[0]], self._reduce)

    def reset(self) -> None:
        """Drops values that have not been exchanged, after this rank has failed or has left its world."""
        self.pending.clear()
        self.is_in_flight, self.is_shadowed = False, None
        # An exchange that other ranks have left may still write to its memory.
        self._exchange = PackedExchange(_NAME, self._device, self._find_store)
        self._next_loader = 0

    def find_location(self) -> str:
        """Returns file and line of the user's code that is running; empty if only libraries are running."""
        for frame, line in walk_stack(None):
            path = frame.f_code.co_filename
            if is_user_code(path):
                return f"{path}:{line}".removeprefix(os.getcwd() + os.sep)
        return ""


def can_exchange(device: torch.device, backend: str | None) -> bool:
    """Returns whether ranks exchange values together: on CPUs, and over NCCL.

    Args:
        device: Device of this rank.
        backend: Backend of torch.distributed; None for the default of the device, empty for another engine.
    """
    if backend is None:
        backend = dist.Backend.default_device_backend_map.get(device.type, "")
    return device.type == "cpu" or (device.type == "cuda" and "nccl" in backends_in(backend))


#: Values of a rank before its stage has started, which logs none.
NO_LOGGED_VALUES = LoggedValues(lambda: LocalCollectives(0, 1), lambda value, *_: value, torch.device("cpu"))


def _key_of(metric: LoggedMetric) -> str:
    return f"{metric.hook}.{metric.label}"


def _describe(metrics: Sequence[LoggedMetric]) -> _Description:
    return [
        (
            _key_of(metric),
            metric.label,
            f"{metric.op}, {str(metric.epoch_value.dtype).removeprefix('torch.')}" if metric.is_tensor else _METRIC,
            metric.hook,
            metric.location,
        )
        for metric in metrics
    ]


def _epoch_parts(metrics: Sequence[LoggedMetric], device: torch.device) -> Parts:
    """Returns the values of an epoch; a mean has two: the sum over samples and their number.

    A metric of torchmetrics has no value here, only its key.
    """
    rows = []
    for metric in metrics:
        key = _key_of(metric)
        if not metric.is_tensor:
            rows.append((key, "max", torch.zeros(1, device=device)))
            continue
        rows.append((key, "sum" if metric.is_mean else metric.op, metric.epoch_value))
        if metric.is_mean:
            rows.append((f"{key} samples", "sum", metric.num_samples))
    return parts_of(rows)


def _epoch_values(description: _Description, parts: Sequence[Tensor]) -> list[Tensor]:
    """Returns the result of each key from the reduced values of :func:`_epoch_parts`."""
    reduced = iter(parts)
    return [
        next(reduced) / next(reduced) if reduction.startswith("mean") else next(reduced)
        for _, _, reduction, _, _ in description
    ]


def _keys_of_readers(error: DifferentPartsError) -> set[str]:
    """Returns the keys that all ranks have, if ranks that read a value have logged only some keys of the others."""
    keys = [{(key, reduction) for key, _, reduction, _, _ in each.description or ()} for each in error.contributions]
    final = [own for own, each in zip(keys, error.contributions, strict=True) if each.is_final]
    reading = [own for own, each in zip(keys, error.contributions, strict=True) if not each.is_final]
    if not error.has_all or not reading or any(own != final[0] for own in final):
        return set()
    if final and any(not own <= final[0] for own in reading):
        return set()
    return {key for key, _ in keys[0].intersection(*keys[1:])}


def _error_of(contributions: Sequence[Contribution]) -> LoggedKeysError:
    """Returns the error that names the keys that only some ranks have logged."""
    reductions = [{key: reduction for key, _, reduction, _, _ in each.description or ()} for each in contributions]
    common = {key for key, reduction in reductions[0].items() if all(each.get(key) == reduction for each in reductions)}
    texts = [
        _text_of(each, common, reductions, " logged values" if number == 0 else "")
        for number, each in enumerate(contributions)
    ]
    text = ", ".join(texts)
    return LoggedKeysError(f"{text[0].upper()}{text[1:]}. Log the same keys with the same arguments on all ranks.")


def _error_of_states(label: str, numbers: list[int]) -> LoggedKeysError:
    """Returns the error for a metric whose states consist of different numbers of tensors on the ranks."""
    other = next(rank for rank, number in enumerate(numbers) if number != numbers[0])
    return LoggedKeysError(
        f"The states of the metric {label!r} consist of {numbers[0]} tensors on rank 0, but of {numbers[other]} on rank"
        f' {other}, so that torchmetrics cannot combine them. Use `dist_reduce_fx="cat"` in `add_state` for states that'
        " are lists, or compute the metric on each rank and log the result with `sync_dist=True`."
    )


def _text_of(contribution: Contribution, common: set[str], reductions: Sequence[dict[str, str]], subject: str) -> str:
    """Returns what some ranks reduce, as part of a sentence."""
    verb = "reduces" if len(contribution.ranks) == 1 else "reduce"
    ranks = f"{format_ranks(contribution.ranks)} {verb}"
    if contribution.description is None:
        return f"{ranks} other logged values"
    description = sorted(contribution.description)
    own = [entry for entry in description if entry[0] not in common]
    if not description:
        return f"{ranks} no logged values"
    listed = description if len(description) <= _MAX_KEYS_LISTED else own[:_MAX_KEYS_LISTED]
    names = [
        repr(name) + (f" ({reduction})" if _differs_in_reduction(key, reductions) else "")
        for key, name, reduction, _, _ in listed
    ]
    if not names:
        return f"{ranks} only the {len(description)}{subject} that all ranks reduce"
    num_others = len(description) - len(listed)
    others = f" and {num_others} others" if num_others else ""
    _, _, _, hook, location = (own or description)[0]
    return f"{ranks}{subject} [{', '.join(names)}]{others} in {hook}" + (f" ({location})" if location else "")


def _differs_in_reduction(key: str, reductions: Sequence[dict[str, str]]) -> bool:
    """Returns whether all ranks log a key, but not with the same reduction and dtype."""
    return all(key in each for each in reductions) and len({each[key] for each in reductions}) > 1
