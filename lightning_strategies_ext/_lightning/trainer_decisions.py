"""Private names of decisions in ``fit``: the values that callbacks and schedulers monitor, and the end of an epoch."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_strategies_ext._lightning._patching import replace_method

#: Metrics that ``ModelCheckpoint`` itself adds to the logged values; they are equal on all ranks.
_COUNTERS = ("epoch", "step")


class ShareValues(Protocol):
    """Function that returns the values of rank 0. Collective: all ranks call it."""

    def __call__(
        self, reader: str, monitor: str | None, others: Sequence[str], values: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns the logged values, with rank 0's values for some names.

        Args:
            reader: Class that reads the values.
            monitor: Name of the value that it monitors, if any.
            others: Names of other values that it reads.
            values: This rank's values.
        """


def share_monitored_values(trainer: Any, share: ShareValues) -> list[Callable[[], None]]:
    """Makes checkpoints, early stopping, and ``ReduceLROnPlateau`` read the values that ``share`` returns.

    Each method is replaced on the Trainer's own objects (2.5 to 2.6):

    * ``ModelCheckpoint._monitor_candidates`` returns a copy of the logged values, once per event. File names contain
      further values.
    * ``EarlyStopping._validate_condition_metric`` gets ``trainer.callback_metrics``, from which its caller
      ``_run_early_stopping_check`` then reads the value.
    * ``_TrainingEpochLoop._get_monitor_value`` returns the value for ``ReduceLROnPlateau``.

    ``trainer.callback_metrics`` keeps this rank's values.

    Returns:
        Functions that revert the change.
    """
    undos = [_share_with_schedulers(trainer.fit_loop.epoch_loop, share)]
    for callback in trainer.callbacks:
        if isinstance(callback, ModelCheckpoint):
            undos.append(_share_with_checkpoint(callback, share))
        elif isinstance(callback, EarlyStopping):
            undos += _share_with_early_stopping(callback, share)
    return undos


def _share_with_schedulers(epoch_loop: Any, share: ShareValues) -> Callable[[], None]:
    get_monitor_value = epoch_loop._get_monitor_value

    def get_shared_value(key: str) -> Any:
        value = get_monitor_value(key)
        return share("ReduceLROnPlateau", key, (), {} if value is None else {key: value}).get(key)

    return replace_method(epoch_loop, "_get_monitor_value", get_shared_value)


def _share_with_checkpoint(callback: Any, share: ShareValues) -> Callable[[], None]:
    monitor_candidates = callback._monitor_candidates

    def shared_candidates(trainer: Any) -> dict[str, Any]:
        names = _names_in(callback.filename) + _names_in(callback.CHECKPOINT_NAME_LAST)
        return share(type(callback).__name__, callback.monitor, names, monitor_candidates(trainer))

    return replace_method(callback, "_monitor_candidates", shared_candidates)


def _names_in(filename: str | None) -> list[str]:
    """Returns the names of the logged values that a template of file names contains."""
    names: list[str] = re.findall(r"\{(.*?)[:\}]", filename or "")  # as in `ModelCheckpoint._format_checkpoint_name`
    return [name for name in names if name not in _COUNTERS]


def _share_with_early_stopping(callback: Any, share: ShareValues) -> list[Callable[[], None]]:
    check, validate = callback._run_early_stopping_check, callback._validate_condition_metric
    replaced: list[tuple[dict[str, Any], Any]] = []

    def validate_shared(logs: dict[str, Any]) -> Any:
        own = logs.get(callback.monitor)
        value = share(type(callback).__name__, callback.monitor, (), logs).get(callback.monitor)
        if value is not own:
            replaced.append((logs, own))
            logs[callback.monitor] = value
        return validate(logs)

    def check_and_restore(trainer: Any) -> None:
        try:
            check(trainer)
        finally:
            while replaced:
                logs, own = replaced.pop()
                logs[callback.monitor] = own
                if own is None:
                    del logs[callback.monitor]

    return [
        replace_method(callback, "_validate_condition_metric", validate_shared),
        replace_method(callback, "_run_early_stopping_check", check_and_restore),
    ]


def call_after_epoch(trainer: Any, function: Callable[[], None]) -> Callable[[], None]:
    """Calls a function after each training epoch of ``fit``, when learning rate schedulers have stepped.

    ``FitLoop.on_advance_end`` calls the hooks ``on_train_epoch_end`` and steps the schedulers of an epoch (2.5 to 2.6).

    Returns:
        A function that reverts the change.
    """
    return replace_method(trainer.fit_loop, "on_advance_end", _followed(trainer.fit_loop.on_advance_end, function))


def call_at_points(trainer: Any, at_point: Callable[[], None]) -> list[Callable[[], None]]:
    """Calls a function where ``fit`` is about to read ``trainer.should_stop``, which hooks may have set.

    The loops read it before the first step, after an epoch, and after a validation, with which
    ``FitLoop.on_run_start``, ``FitLoop.on_advance_end``, and ``val_loop.run`` end (2.5 to 2.6). They also read it after
    a training step, see :func:`.intercept_sigterm`.

    Returns:
        Functions that revert the change.
    """
    fit_loop, val_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop
    return [
        replace_method(fit_loop, "on_run_start", _followed(fit_loop.on_run_start, at_point)),
        replace_method(fit_loop, "on_advance_end", _followed(fit_loop.on_advance_end, at_point)),
        replace_method(val_loop, "run", _followed(val_loop.run, at_point)),
    ]


def _followed(method: Callable[[], Any], function: Callable[[], None]) -> Callable[[], Any]:
    def method_and_then() -> Any:
        value = method()
        function()
        return value

    return method_and_then
