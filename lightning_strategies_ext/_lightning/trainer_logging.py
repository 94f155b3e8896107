"""Private names of the values that ``self.log`` accumulates."""

from typing import Any

from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric


class _NonMovingResultMetric(_ResultMetric):
    def to(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_tensor and not kwargs and args == (self.value.device,):
            return self
        return super().to(*args, **kwargs)


class _NonMovingResultCollection(_ResultCollection):
    #: Values accumulated by an earlier process, for metrics that this process has not created yet.
    found: dict[str, dict[str, Any]] | None = None

    def __setitem__(self, key: str, metric: Any) -> None:
        metric.__class__ = _NonMovingResultMetric
        super().__setitem__(key, metric)
        for name, state in (self.found or {}).get(key, {}).items():
            setattr(metric, name, state)

    def reset(self, *args: Any, **kwargs: Any) -> None:
        self.found = None
        super().reset(*args, **kwargs)


def skip_needless_moves(trainer: Any) -> None:
    """Skips a needless move of the logged value in each ``self.log`` call, which visits all attributes of the value.

    ``_ResultCollection.log`` calls ``to(value.device)`` on the stored metric every time (2.5 to 2.6), which takes 0.2
    to 0.4 ms of Python per logged value and step, longer than a small all-reduce. Only this Trainer's collections
    change; their content and results do not.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    for loop in (epoch_loop, epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        loop._results.__class__ = _NonMovingResultCollection


def logger_step(trainer: Any) -> int:
    """Returns the step that ``self.log`` currently passes to loggers, ``_batches_that_stepped`` (2.5 to 2.6)."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def logged_per_epoch(trainer: Any) -> list[Any]:
    """Returns the metrics in which ``fit`` accumulates values for ``on_epoch=True``, ``_results`` (2.5 to 2.6)."""
    return [metric for metric in trainer.fit_loop.epoch_loop._results.values() if metric.meta.on_epoch]


def logged_sums(trainer: Any) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Returns the position of ``self.log`` and its sums of this epoch, by the keys of ``_results`` (2.5 to 2.6)."""
    results = trainer.fit_loop.epoch_loop._results
    return logging_position(trainer), {
        key: dict(metric.metric_state)
        for key, metric in results.items()
        if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset
    }


def set_logged_sums(trainer: Any, sums: tuple[Any, dict[str, dict[str, Any]]]) -> None:
    """Makes ``self.log`` continue from the position and sums that another process has had."""
    position, found = sums
    trainer.fit_loop.epoch_loop._results.found = found
    set_logging_position(trainer, position)


def add_logged_sums(trainer: Any, sums: tuple[Any, dict[str, dict[str, Any]]]) -> None:
    """Like :func:`set_logged_sums`, but also for metrics that exist already; keeps the sums of other metrics."""
    position, found = sums
    results = trainer.fit_loop.epoch_loop._results
    for key in found.keys() & results.keys():
        for name, state in found[key].items():
            setattr(results[key], name, state.to(results[key].device))
    set_logged_sums(trainer, (position, {**(getattr(results, "found", None) or {}), **found}))


def logged_reductions(trainer: Any) -> dict[str, str]:
    """Returns how ``self.log`` reduces values over ranks, by the keys of ``_results``, if it does (2.5 to 2.6).

    Values are "sum" (also for means), "max" or "min", according to ``meta``.
    """
    return {
        key: "max" if metric.meta.is_max_reduction else "min" if metric.meta.is_min_reduction else "sum"
        for key, metric in trainer.fit_loop.epoch_loop._results.items()
        if metric.meta.sync.should and not metric.meta.sync.rank_zero_only
    }


def logging_position(trainer: Any) -> tuple[Any, Any]:
    """Returns the position of ``self.log`` in the epoch; at the first batch it resets its sums (2.5 to 2.6)."""
    connector = trainer._logger_connector
    return connector._first_loop_iter, connector._current_fx


def set_logging_position(trainer: Any, position: tuple[Any, Any]) -> None:
    """Sets the position of ``self.log`` in the epoch."""
    connector = trainer._logger_connector
    connector._first_loop_iter, connector._current_fx = position


def is_bound_to_stage(value: Any) -> bool:
    """Whether a loop keeps this object only for the current stage: the accumulated results (2.5 to 2.6)."""
    return isinstance(value, _ResultCollection)
