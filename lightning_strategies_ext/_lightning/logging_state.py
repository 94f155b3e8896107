"""Private names of logging: position and values of ``self.log``, which the package reads, takes back, and restores.

Steps without effect take back what they have logged. Elastic training restores what another process has logged.
"""

from typing import Any

from lightning_strategies_ext._lightning.trainer_logging import LoggedMetric


def logged_per_epoch(trainer: Any) -> list[Any]:
    """Returns the metrics in which ``fit`` accumulates values for ``on_epoch=True``, ``_results`` (2.5 to 2.6)."""
    return [metric for metric in trainer.fit_loop.epoch_loop._results.values() if metric.meta.on_epoch]


def retain_key(metric: Any) -> None:
    """Keeps a synchronized key of ``self.log`` after a reset, for which only other ranks have values.

    ``valid_items`` skips a metric whose ``has_reset`` is True (2.5 to 2.6).
    """
    if isinstance(metric, LoggedMetric) and metric.is_synchronized:
        metric.has_reset = False


def current_results(trainer: Any) -> list[Any]:
    """Returns the metrics of the keys of ``self.log`` of the current loop, ``Trainer._results`` (2.5 to 2.6)."""
    return list((trainer._results or {}).values())


def drop_values(metric: Any) -> None:
    """Drops what this rank has logged under a key that other ranks have, too; ``reset`` would reset a user's metric."""
    metric._forward_cache, metric._computed, metric.has_reset = None, None, False
    if metric.is_tensor:
        metric.reset()
        retain_key(metric)


def logger_connector(trainer: Any) -> Any:
    """Returns the object with the position and the values of ``self.log``, ``_logger_connector`` (2.5 to 2.6)."""
    return trainer._logger_connector


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
