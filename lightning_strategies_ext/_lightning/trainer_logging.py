"""Private names of logging: the values that ``self.log`` accumulates, and when Lightning reduces and reads them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, Protocol

from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torch import Tensor

#: Hooks whose synchronized values are exchanged together when the hook returns.
_STEP_HOOKS = ("training_step", "validation_step", "test_step")

_STEP_VALUE = attrgetter("_forward_cache")


class ValueExchange(Protocol):
    """Exchange of synchronized values between ranks, see :mod:`lightning_strategies_ext.pytorch.logged_values`.

    Attributes:
        device_type: Type of the device of the values that are exchanged together.
        pending: Values of the current hook, by key, which are exchanged when the hook returns.
        is_in_flight: Whether the values of the last hook are being exchanged.
        is_shadowed: Function that returns whether a value of a step is reduced at once, because ranks without batches
            may repeat the step. None if no rank repeats steps. The result is the same on all ranks.
    """

    device_type: str
    pending: dict[str, "LoggedMetric"]
    is_in_flight: bool
    is_shadowed: Callable[[Tensor], bool] | None

    def finish(self, *, waits_for_gpu: bool = False) -> None:
        """Waits for the values of the last hook, and optionally until their keys have been compared on a GPU."""

    def reduce_epoch(self, metrics: Sequence["LoggedMetric"], *, is_final: bool) -> None:
        """Reduces the values of an epoch; ``is_final`` states whether all ranks have logged all values."""

    def compute_metrics(self, metrics: Sequence["LoggedMetric"], *, is_final: bool) -> None:
        """Computes metrics of torchmetrics; ``is_final`` as for :meth:`reduce_epoch`."""

    def reduce_evaluation(self, results: "ExchangedResults", update_epoch_metrics: Callable[[int], Any]) -> None:
        """Reduces the values of an evaluation, or of one of its DataLoaders, when the loop has reached the end."""

    def find_location(self) -> str:
        """Returns file and line of the user's code that is running."""


class LoggedMetric(_ResultMetric):
    """One key of ``self.log``, with the values of a step and of an epoch.

    Objects are created as ``_ResultMetric``. Its constructor stores bound methods ``update`` and ``compute`` in the
    object, so this class cannot override these methods (2.5 to 2.6).
    """

    #: File and line of the user's first call of ``self.log`` with this key.
    location = ""
    #: Whether step values are exchanged when the hook returns.
    is_exchanged_after_hook = False
    #: Reduction of a step value over ranks.
    op = ""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_tensor and not kwargs and args == (self.value.device,):
            return self
        return super().to(*args, **kwargs)

    @property
    def is_synchronized(self) -> bool:
        """Whether ``sync_dist=True`` reduces the value over all ranks."""
        sync = self.meta.sync
        return bool(
            self.is_tensor
            and sync.should
            and not sync.rank_zero_only
            and sync.group is None
            and not self.meta.enable_graph
        )

    @property
    def hook(self) -> str:
        """Hook that logs the value; ``fx`` also has the index of the DataLoader."""
        return str(self.meta.fx.partition(".")[0])

    @property
    def is_of_batches(self) -> bool:
        """Whether a hook logs the value that runs once per batch."""
        return self.hook in _STEP_HOOKS or "_batch_" in self.hook

    @property
    def label(self) -> str:
        """Name of the value as loggers receive it."""
        meta = self.meta
        if not meta.add_dataloader_idx or meta.dataloader_idx is None:
            return str(meta.name)
        return str(meta.name + _ResultCollection.DATALOADER_SUFFIX.format(meta.dataloader_idx))

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of the call of ``self.log``, for a rank that has not called it."""
        names = [field.name for field in fields(self.meta) if field.name != "_sync"]
        return {name: getattr(self.meta, name) for name in names}

    @property
    def is_mean(self) -> bool:
        """Whether the value of an epoch is a sum that is divided by the number of samples."""
        return bool(self.meta.is_mean_reduction)

    @property
    def epoch_value(self) -> Tensor:
        """This rank's sum, minimum, or maximum of the epoch; for a mean, the sum over samples."""
        value: Tensor = self.value
        return value

    @property
    def num_samples(self) -> Tensor:
        """Number of samples of the sum, for a mean."""
        return self.cumulated_batch_size

    def set_epoch_value(self, value: Tensor) -> None:
        """Sets the result of the epoch; another logged value clears it."""
        self._computed: Any = value


class ExchangedResults(_ResultCollection):
    """Keys of ``self.log`` of one loop."""

    #: Values accumulated by an earlier process, for metrics that this process has not created yet.
    found: dict[str, dict[str, Any]] | None = None
    exchange: ValueExchange | None = None
    trainer: Any = None

    def __setitem__(self, key: str, metric: Any) -> None:
        metric.__class__ = LoggedMetric
        super().__setitem__(key, metric)
        for name, state in (self.found or {}).get(key, {}).items():
            setattr(metric, name, state.to(metric.device))
        if self.exchange is not None and not metric.is_tensor:
            metric.location = self.exchange.find_location()
        elif self.exchange is not None and metric.is_synchronized:
            metric.location, metric.op = self.exchange.find_location(), metric.meta.sync.op
            metric.is_exchanged_after_hook = metric.meta.on_step and metric.hook in _STEP_HOOKS

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        # The overridden method stops compilation by torch, which `log` has stopped already: 10 microseconds per value.
        metric, exchange = self[key], self.exchange
        if (
            exchange is None
            or not metric.is_exchanged_after_hook
            or value.device.type != exchange.device_type
            or (exchange.is_shadowed is not None and exchange.is_shadowed(value))
        ):
            metric.forward(value, batch_size)
        else:
            if exchange.is_in_flight:  # another call of the hook for the same batch
                exchange.finish()
            sync = metric.meta.sync
            reduce, sync._fn = sync._fn, sync.no_op
            try:
                metric.forward(value, batch_size)
            finally:
                sync._fn = reduce
            exchange.pending[key] = metric
        metric.has_reset = False

    def metrics(self, on_step: bool) -> Any:
        if self.exchange is not None:
            if self.exchange.is_in_flight:
                self.exchange.finish()
            if not on_step:
                self.reduce_epoch(is_final=False)
                self.compute_metrics(is_final=False)
        return super().metrics(on_step)

    def missing(self) -> list[LoggedMetric]:
        """Returns the synchronized values of the current epoch that have not been reduced yet."""
        return [
            metric
            for _, metric in self.valid_items()
            if metric._computed is None
            and metric.meta.on_epoch
            and metric.is_synchronized
            and (self.exchange is None or metric.value.device.type == self.exchange.device_type)
        ]

    def reduce_epoch(self, *, is_final: bool) -> None:
        """Reduces the values of the current epoch that have not been reduced yet, so that ``compute`` is local.

        Args:
            is_final: Whether all ranks have logged all values and reduce them now; False if one rank may be reading.
        """
        if self.exchange is not None and (missing := self.missing()):
            self.exchange.reduce_epoch(missing, is_final=is_final)

    def compute_metrics(self, *, is_final: bool) -> None:
        """Computes the metrics of torchmetrics that Lightning reads at the end of the epoch, and has not computed yet.

        Args:
            is_final: As for :meth:`reduce_epoch`.
        """
        if self.exchange is not None and (metrics := self.missing_metrics()):
            self.exchange.compute_metrics(metrics, is_final=is_final)

    def missing_metrics(self) -> list[LoggedMetric]:
        """Returns the metrics of torchmetrics of the current epoch that have not been computed yet."""
        return [
            metric
            for _, metric in self.valid_items()
            if not metric.is_tensor
            and metric._computed is None
            and metric.meta.on_epoch
            and not metric.meta.sync.rank_zero_only
        ]

    def add_metric(self, settings: dict[str, Any]) -> None:
        """Adds a metric of torchmetrics that only other ranks have logged; the arguments are those of their call."""
        meta = _Metadata(**settings)
        meta.sync = _Sync()
        if meta.metric_attribute:
            self._add(meta, False).value = self.trainer.lightning_module.get_submodule(meta.metric_attribute)

    def add_reduced(self, settings: dict[str, Any], value: Tensor, reduce: Any) -> None:
        """Adds a value that only other ranks have logged.

        Args:
            settings: Arguments of the call of ``self.log``, from :attr:`LoggedMetric.settings` of another rank.
            value: Value of the epoch.
            reduce: Function that reduces values over ranks.
        """
        meta = _Metadata(**settings)
        meta.sync = _Sync(_should=True, fn=reduce)
        self._add(meta, True).set_epoch_value(value)

    def _add(self, meta: _Metadata, is_tensor: bool) -> Any:
        key = f"{meta.fx.partition('.')[0]}.{meta.name}"
        if meta.add_dataloader_idx and meta.dataloader_idx is not None:
            key += f".{meta.dataloader_idx}"
        if key not in self:
            self[key] = _ResultMetric(meta, is_tensor)
        self[key].has_reset = False
        return self[key]

    def reset(self, *args: Any, **kwargs: Any) -> None:
        self.found = None
        super().reset(*args, **kwargs)


def step_values(metrics: Iterable[LoggedMetric]) -> list[Tensor]:
    """Returns the values of the current step."""
    return [*map(_STEP_VALUE, metrics)]


def set_step_values(metrics: Iterable[LoggedMetric], values: Iterable[Tensor]) -> None:
    """Sets the values of the current step."""
    for metric, value in zip(metrics, values, strict=True):
        attributes = vars(metric)  # not through `__setattr__`, which is a Python function
        attributes["_forward_cache"] = value
        if not metric.meta.on_epoch:
            attributes["value"] = value


class _ExchangingLoggerConnector(_LoggerConnector):
    def epoch_end_reached(self) -> None:
        super().epoch_end_reached()
        results = self.trainer._results
        if not isinstance(results, ExchangedResults) or results.exchange is None:
            return
        results.exchange.finish(waits_for_gpu=True)
        if results.training:
            results.reduce_epoch(is_final=True)
        else:
            results.exchange.reduce_evaluation(results, self._update_epoch_metrics)

    def _update_epoch_metrics(self, dataloader_idx: int) -> None:
        results: Any = self.trainer._results
        current, results.dataloader_idx = results.dataloader_idx, dataloader_idx
        self.update_eval_epoch_metrics()
        results.dataloader_idx = current

    def on_epoch_end(self) -> None:
        results = self.trainer._results
        if isinstance(results, ExchangedResults):
            results.reduce_epoch(is_final=True)
            results.compute_metrics(is_final=True)
        super().on_epoch_end()


def prepare_logging(trainer: Any, exchange: ValueExchange | None) -> None:
    """Makes ``self.log`` exchange values together, and skips a needless move of each value.

    ``_ResultCollection.log`` calls ``to(value.device)`` on the stored metric every time (2.5 to 2.6). This takes 0.2 to
    0.4 ms of Python per logged value and step, longer than a small all-reduce. It then calls ``update_metrics``,
    which reduces a synchronized value at once; ``metrics`` computes the values of an epoch, one reduction after the
    other. All ranks call ``_LoggerConnector.epoch_end_reached`` before the ``on_*_epoch_end`` hooks, and in an
    evaluation with several DataLoaders once per DataLoader. Only this Trainer's objects change.

    Args:
        trainer: The Trainer.
        exchange: Exchange of the current stage; None if each value is reduced by itself.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    for loop in (epoch_loop, epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        loop._results.__class__ = ExchangedResults
        loop._results.exchange = exchange
        loop._results.trainer = trainer
    trainer._logger_connector.__class__ = _ExchangingLoggerConnector


def logger_step(trainer: Any) -> int:
    """Returns the step that ``self.log`` currently passes to loggers, ``_batches_that_stepped`` (2.5 to 2.6)."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def is_bound_to_stage(value: Any) -> bool:
    """Whether a loop keeps this object only for the current stage: the accumulated results (2.5 to 2.6)."""
    return isinstance(value, _ResultCollection)
