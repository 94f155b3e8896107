"""What is private in where the Trainer's loops get their batches."""

from collections.abc import Callable
from typing import Any

from lightning_strategies_ext._lightning._replacing import replace_method


def data_of(trainer: Any) -> list[Any]:
    """What the Trainer's loops take their loaders from: the user's loaders, LightningModule and datamodule.

    ``_data_source`` is where the Trainer attaches them, in the process that runs the stage (2.5 to 2.6).
    """
    loops = [trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop]
    loops += [trainer.validate_loop, trainer.test_loop, trainer.predict_loop]
    return [loop._data_source.instance for loop in loops]


def after_setup_data(trainer: Any, then: Callable[[], None]) -> Callable[[], None]:
    """Calls ``then`` whenever ``fit`` has made its training loaders.

    ``FitLoop.setup_data`` makes them, before the first epoch and where they are to be reloaded (2.5 to 2.6).

    Returns:
        A function that undoes it.
    """
    fit_loop = trainer.fit_loop
    setup_data = fit_loop.setup_data

    def setup_data_and_then() -> None:
        setup_data()
        then()

    return replace_method(fit_loop, "setup_data", setup_data_and_then)


def data_fetcher_of(trainer: Any) -> Any:
    """What ``fit`` takes its batches from, ``FitLoop._data_fetcher``; None before there is one (2.5 to 2.6)."""
    return trainer.fit_loop._data_fetcher


def set_data_fetcher(trainer: Any, fetcher: Any, num_batches: float) -> None:
    """Lets ``fit`` take its batches from something else, so many per epoch.

    ``FitLoop._data_fetcher`` is iterated over, and asked for ``done``, ``fetched`` and what Lightning's own has.
    ``FitLoop.max_batches`` and ``Trainer.val_check_batch`` are what ``setup_data`` makes of its length (2.5 to 2.6).
    """
    fit_loop = trainer.fit_loop
    fit_loop._data_fetcher = fetcher
    fit_loop.max_batches = num_batches if num_batches == float("inf") else int(num_batches)
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch not in (None, float("inf")):
        is_counted = fit_loop.max_batches < float("inf")
        trainer.val_check_batch = (
            max(1, int(fit_loop.max_batches * trainer.val_check_interval)) if is_counted else float("inf")
        )


def loader_states(trainer: Any) -> list[dict[str, Any]]:
    """The states that ``fit`` is about to give to the training loaders that it makes.

    It does so, from ``_combined_loader_states_to_load``, when it has asked them for their length (2.5 to 2.6).
    """
    states: list[dict[str, Any]] = trainer.fit_loop._combined_loader_states_to_load
    return states if trainer.fit_loop.restarting else []


def states_of_loaders(trainer: Any) -> list[dict[str, Any]]:
    """Where the training loaders of ``fit`` are, of those that say it, as a checkpoint has it.

    ``FitLoop.on_save_checkpoint`` asks ``_combined_loader`` for it, which is where the stage ran (2.5 to 2.6).
    """
    loader = trainer.fit_loop._combined_loader
    return [] if loader is None else list(loader._state_dicts())


def forget_training_data(trainer: Any) -> None:
    """Lets ``fit`` make its training loaders anew, of ``_combined_loader`` and ``_data_fetcher`` (2.5 to 2.6)."""
    _forget_loaders(trainer.fit_loop)


def forget_data(trainer: Any) -> None:
    """Lets ``fit`` make its loaders anew, those of validation too, as :func:`forget_training_data`."""
    forget_training_data(trainer)
    _forget_loaders(trainer.fit_loop.epoch_loop.val_loop)


def _forget_loaders(loop: Any) -> None:
    if loop._data_fetcher is not None:
        loop._data_fetcher.teardown()
    loop._combined_loader = loop._data_fetcher = None
