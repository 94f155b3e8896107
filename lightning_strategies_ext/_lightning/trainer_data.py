"""Private names with which the Trainer's loops get their batches."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper
from lightning.pytorch.trainer.states import TrainerFn

from lightning_strategies_ext._lightning._patching import replace_method


def data_sources(trainer: Any) -> list[Any]:
    """Returns the sources of the DataLoaders of the Trainer's loops: DataLoaders, LightningModule or datamodule.

    The Trainer attaches them to ``_data_source``, in the process that runs the stage (2.5 to 2.6).
    """
    loops = [trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop]
    loops += [trainer.validate_loop, trainer.test_loop, trainer.predict_loop]
    return [loop._data_source.instance for loop in loops]


def after_setup_data(trainer: Any, then: Callable[[], None]) -> Callable[[], None]:
    """Calls ``then`` whenever ``fit`` has created its training DataLoaders.

    ``FitLoop.setup_data`` creates them, before the first epoch and when they are reloaded (2.5 to 2.6).

    Returns:
        A function that reverts the change.
    """
    fit_loop = trainer.fit_loop
    setup_data = fit_loop.setup_data

    def setup_data_and_then() -> None:
        setup_data()
        then()

    return replace_method(fit_loop, "setup_data", setup_data_and_then)


def predict_with_few_samples(trainer: Any) -> Callable[[], None]:
    """Makes ``predict`` accept a DataLoader with fewer samples than ranks: ranks without samples get an empty shard.

    ``DataConnector._resolve_sampler`` creates the sampler of a DataLoader, for ``predict`` an
    ``UnrepeatedDistributedSamplerWrapper``, which asserts that it has a sample (2.5 to 2.6). The attributes ``rank``
    and ``num_samples`` turn the sampler of rank 0 into that of a rank without samples.

    Returns:
        A function that reverts the change.
    """
    connector = trainer._data_connector
    resolve_sampler = connector._resolve_sampler

    def resolve(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        rank, num_samples = trainer.global_rank, sized_len(dataloader.sampler)
        if not num_samples or num_samples > rank or not connector._requires_distributed_sampler(dataloader):
            return resolve_sampler(dataloader, *args, **kwargs)
        ranks = {**trainer.distributed_sampler_kwargs, "rank": 0}
        sampler = UnrepeatedDistributedSamplerWrapper(dataloader.sampler, **ranks, shuffle=False)
        sampler.rank, sampler.num_samples = rank, 0
        return sampler

    return replace_method(connector, "_resolve_sampler", resolve)


def evaluate_without_data(trainer: Any, does_any_rank: Callable[[bool], bool]) -> Callable[[], None]:
    """Makes a rank without batches run the hooks of an evaluation for which other ranks have batches.

    A loop runs no hook if the sum of its ``max_batches`` is 0. ``setup_data`` creates a new list of them, and rejects a
    rank without batches unless ``allow_zero_length_dataloader_with_multiple_devices`` is True (2.5 to 2.6). Here,
    ``predict`` accepts such a rank, because its ranks exchange nothing.

    Args:
        trainer: The Trainer.
        does_any_rank: Collective that returns whether its argument is True on any rank.

    Returns:
        A function that reverts the change.
    """
    is_predicting = trainer.state.fn == TrainerFn.PREDICTING
    loop = {
        TrainerFn.FITTING: trainer.fit_loop.epoch_loop.val_loop,
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }[trainer.state.fn]
    module, datamodule = trainer.lightning_module, trainer.datamodule
    setup_data, seen = loop.setup_data, None

    def setup_data_of_all_ranks() -> None:
        nonlocal seen
        users = module.allow_zero_length_dataloader_with_multiple_devices
        module.allow_zero_length_dataloader_with_multiple_devices = is_allowed = users or is_predicting
        try:
            setup_data()
        finally:
            module.allow_zero_length_dataloader_with_multiple_devices = users
        if datamodule is not None:
            is_allowed |= datamodule.allow_zero_length_dataloader_with_multiple_devices
        max_batches = loop.max_batches if is_predicting else loop._max_batches
        if max_batches is seen or not is_allowed:
            return
        seen = max_batches
        has_batches = sum(max_batches) > 0
        if does_any_rank(has_batches) and not has_batches:
            max_batches[:] = [1] * len(max_batches)

    return replace_method(loop, "setup_data", setup_data_of_all_ranks)


def evaluate_together(trainer: Any, does_any_rank: Callable[[bool], bool]) -> ExitStack:
    """Makes ranks without batches run the hooks of an evaluation, with the arguments of :func:`evaluate_without_data`.

    Returns:
        A stack that reverts the changes.
    """
    stack = ExitStack()
    stack.callback(evaluate_without_data(trainer, does_any_rank))
    if trainer.state.fn == TrainerFn.PREDICTING:
        stack.callback(predict_with_few_samples(trainer))
    return stack


def data_fetcher_of(trainer: Any) -> Any:
    """Returns the object from which ``fit`` gets batches, ``FitLoop._data_fetcher``; None before setup (2.5 to 2.6)."""
    return trainer.fit_loop._data_fetcher


def set_data_fetcher(trainer: Any, fetcher: Any, num_batches: float) -> None:
    """Replaces the object from which ``fit`` gets batches, and the number of batches per epoch.

    The loop iterates over ``FitLoop._data_fetcher``, and reads ``done``, ``fetched`` and other attributes of
    Lightning's fetcher. ``setup_data`` derives ``FitLoop.max_batches`` and ``Trainer.val_check_batch`` from its length
    (2.5 to 2.6).
    """
    fit_loop = trainer.fit_loop
    fit_loop._data_fetcher = fetcher
    fit_loop.max_batches = num_batches if num_batches == float("inf") else int(num_batches)
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch not in (None, float("inf")):
        is_counted = fit_loop.max_batches < float("inf")
        trainer.val_check_batch = (
            max(1, int(fit_loop.max_batches * trainer.val_check_interval)) if is_counted else float("inf")
        )


def pending_loader_states(trainer: Any) -> list[dict[str, Any]]:
    """Returns the states that ``fit`` is about to load into its new training DataLoaders.

    It takes them from ``_combined_loader_states_to_load``, after it has read the DataLoaders' length (2.5 to 2.6).
    """
    states: list[dict[str, Any]] = trainer.fit_loop._combined_loader_states_to_load
    return states if trainer.fit_loop.restarting else []


def current_loader_states(trainer: Any) -> list[dict[str, Any]]:
    """Returns the states of the training DataLoaders of ``fit`` that have states, as in a checkpoint.

    ``FitLoop.on_save_checkpoint`` gets them from ``_combined_loader``, in the process that ran the stage (2.5 to 2.6).
    """
    loader = trainer.fit_loop._combined_loader
    return [] if loader is None else list(loader._state_dicts())


def reset_training_loaders(trainer: Any) -> None:
    """Makes ``fit`` create new training DataLoaders: resets ``_combined_loader`` and ``_data_fetcher`` (2.5 to 2.6)."""
    _forget_loaders(trainer.fit_loop)


def reset_loaders(trainer: Any) -> None:
    """Makes ``fit`` create new DataLoaders for training and validation."""
    reset_training_loaders(trainer)
    _forget_loaders(trainer.fit_loop.epoch_loop.val_loop)


def _forget_loaders(loop: Any) -> None:
    if loop._data_fetcher is not None:
        loop._data_fetcher.teardown()
    loop._combined_loader = loop._data_fetcher = None
