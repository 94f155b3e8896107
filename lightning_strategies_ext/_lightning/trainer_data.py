"""Private names with which the Trainer's loops get their batches."""

from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, ExitStack
from math import inf
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper
from lightning.pytorch.trainer.connectors.data_connector import _get_distributed_sampler
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch.utils.data import IterableDataset

from lightning_strategies_ext._lightning._patching import replace_method
from lightning_strategies_ext._lightning.samplers import repeat_no_samples


class EvaluationLoader(NamedTuple):
    """A DataLoader of an evaluation, on this rank.

    Attributes:
        num_batches: Largest number of batches; infinity if there is no limit.
        is_shard: Whether its samples are sharded without repetition.
        is_stream: Whether it has an ``IterableDataset``, or no length.
    """

    num_batches: float
    is_shard: bool
    is_stream: bool


class ExactSteps(Protocol):
    """Evaluation steps that ranks with fewer batches shadow, see :mod:`.uneven.exact_evaluation`.

    Attributes:
        local: Largest numbers of batches of this rank, by DataLoader.
    """

    local: list[float]

    def agree(self, loaders: Sequence[EvaluationLoader], *, is_sequential: bool) -> list[float] | None:
        """Returns the largest number of steps of each DataLoader. Collective: all ranks call it."""

    def shadow(self, fetcher: Any, limit: float, *, draws_for_the_step: bool) -> Any:
        """Returns an object that replaces Lightning's fetcher in an evaluation."""

    def wrap_step(self) -> AbstractContextManager[None]:
        """Returns a context manager for a step and its hooks."""

    def wrap_evaluation(self) -> AbstractContextManager[None]:
        """Returns a context manager for a whole evaluation."""


def data_sources(trainer: Any) -> list[Any]:
    """Returns the sources of the DataLoaders of the Trainer's loops: DataLoaders, LightningModule or datamodule.

    The Trainer attaches them to ``_data_source``, in the process that runs the stage (2.5 to 2.6).
    """
    loops = [trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop]
    loops += [trainer.validate_loop, trainer.test_loop, trainer.predict_loop]
    return [loop._data_source.instance for loop in loops]


def after_setup_data(trainer: Any, function: Callable[[], None]) -> Callable[[], None]:
    """Calls ``function`` whenever ``fit`` has created its training DataLoaders.

    ``FitLoop.setup_data`` creates them, before the first epoch and when they are reloaded (2.5 to 2.6).

    Returns:
        A function that reverts the change.
    """
    fit_loop = trainer.fit_loop
    setup_data = fit_loop.setup_data

    def setup_data_and_then() -> None:
        setup_data()
        function()

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


def shard_without_repeats(trainer: Any, shards: WeakSet[Any]) -> Callable[[], None]:
    """Makes the DataLoaders of an evaluation have shards without repeated samples, some of which may be empty.

    ``DataConnector._resolve_sampler`` creates the sampler of a DataLoader, and warns of repeated samples. A rank
    without samples is accepted because ``setup_data`` reads ``allow_zero_length_dataloader_with_multiple_devices``
    after the samplers exist (2.5 to 2.6).

    Args:
        trainer: The Trainer.
        shards: Set to which the samplers are added.

    Returns:
        A function that reverts the change.
    """
    connector = trainer._data_connector
    resolve_sampler = connector._resolve_sampler

    def resolve(dataloader: Any, shuffle: bool, mode: Any = None) -> Any:
        is_evaluating = mode in (RunningStage.VALIDATING, RunningStage.TESTING)
        if not is_evaluating or not connector._requires_distributed_sampler(dataloader):
            return resolve_sampler(dataloader, shuffle, mode)
        settings = {"mode": mode, "overfit_batches": trainer.overfit_batches}
        sampler: Any = _get_distributed_sampler(dataloader, shuffle, **settings, **trainer.distributed_sampler_kwargs)
        repeat_no_samples(sampler)
        shards.add(sampler)
        trainer.lightning_module.allow_zero_length_dataloader_with_multiple_devices = True
        return sampler

    return replace_method(connector, "_resolve_sampler", resolve)


def _accept_empty_streams(trainer: Any) -> Callable[[], None]:
    """Makes an evaluation accept a rank without samples of an ``IterableDataset`` that has a length.

    ``setup_data`` reads ``allow_zero_length_dataloader_with_multiple_devices`` after the strategy has received the
    DataLoaders in ``process_dataloader`` (2.5 to 2.6).

    Returns:
        A function that reverts the change.
    """
    process_dataloader = trainer.strategy.process_dataloader

    def process(dataloader: Any) -> Any:
        if _has_stream(dataloader):
            trainer.lightning_module.allow_zero_length_dataloader_with_multiple_devices = True
        return process_dataloader(dataloader)

    return replace_method(trainer.strategy, "process_dataloader", process)


def _has_stream(dataloader: Any) -> bool:
    return isinstance(getattr(dataloader, "dataset", None), IterableDataset)


def shadow_evaluation_steps(trainer: Any, steps: ExactSteps) -> ExitStack:
    """Makes ranks with fewer batches shadow the steps of an evaluation, and the hooks of these steps.

    ``reset`` creates the fetcher and limits it to ``max_batches`` batches, ``_evaluation_step`` runs a step with its
    hooks, and ``run`` a whole evaluation (2.5 to 2.6).

    Returns:
        A stack that reverts the changes.
    """
    loop = _evaluation_loop_of(trainer)
    reset, run_step, run = loop.reset, loop._evaluation_step, loop.run

    def reset_and_shadow() -> None:
        if not steps.local:
            reset()
            return
        num_steps, loop._max_batches = loop._max_batches, [*steps.local]
        try:
            reset()
        finally:
            loop._max_batches = num_steps
        limit = trainer.num_sanity_val_steps if trainer.sanity_checking else inf
        draws_for_the_step = not isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher)
        loop._data_fetcher = steps.shadow(loop._data_fetcher, limit, draws_for_the_step=draws_for_the_step)

    def run_step_in_context(*args: Any) -> None:
        with steps.wrap_step():
            run_step(*args)

    def run_in_context() -> Any:
        with steps.wrap_evaluation():
            return run()

    stack = ExitStack()
    stack.callback(replace_method(loop, "reset", reset_and_shadow))
    stack.callback(replace_method(loop, "_evaluation_step", run_step_in_context))
    stack.callback(replace_method(loop, "run", run_in_context))
    return stack


def before_loader_results(trainer: Any, function: Callable[[bool], None]) -> Callable[[], None]:
    """Calls ``function`` after the last step of each DataLoader of an evaluation, before its results are reduced.

    ``run`` then calls ``_store_dataloader_outputs``, which also follows a DataLoader without batches. The progress
    ``batch_progress.current`` counts the steps of one evaluation (2.5 to 2.6).

    Args:
        trainer: The Trainer.
        function: Function that receives whether this rank has run a step of the evaluation.

    Returns:
        A function that reverts the change.
    """
    loop = _evaluation_loop_of(trainer)
    store = loop._store_dataloader_outputs

    def store_after_function() -> None:
        function(loop.batch_progress.current.ready > 0)
        store()

    return replace_method(loop, "_store_dataloader_outputs", store_after_function)


def _evaluation_loop_of(trainer: Any) -> Any:
    return {
        TrainerFn.FITTING: trainer.fit_loop.epoch_loop.val_loop,
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }[trainer.state.fn]


def evaluate_without_data(
    trainer: Any,
    count_ranks: Callable[[list[bool]], list[int]],
    exact: ExactSteps | None = None,
    shards: Container[Any] = (),
) -> Callable[[], None]:
    """Makes a rank without batches run the hooks of an evaluation for which other ranks have batches.

    A loop runs no hook if the sum of its ``max_batches`` is 0. ``setup_data`` creates a new list of them, and rejects a
    rank without batches unless ``allow_zero_length_dataloader_with_multiple_devices`` is True (2.5 to 2.6). Here,
    ``predict`` accepts such a rank, because its ranks exchange nothing.

    Args:
        trainer: The Trainer.
        count_ranks: Collective that returns, for each flag, on how many ranks it is True. It receives whether this rank
            has batches: one flag per DataLoader if the loop runs them one after the other, otherwise one.
        exact: Steps that make all ranks run equally many, if the samples are sharded without repetition.
        shards: Samplers of the shards.

    Returns:
        A function that reverts the change.
    """
    is_predicting = trainer.state.fn == TrainerFn.PREDICTING
    loop = _evaluation_loop_of(trainer)
    module, datamodule = trainer.lightning_module, trainer.datamodule
    setup_data, previous = loop.setup_data, None

    def setup_data_of_all_ranks() -> None:
        nonlocal previous
        users = module.allow_zero_length_dataloader_with_multiple_devices
        module.allow_zero_length_dataloader_with_multiple_devices = is_allowed = users or is_predicting
        with ExitStack() as changes:
            if exact is not None:
                changes.callback(_accept_empty_streams(trainer))
            try:
                setup_data()
            finally:
                module.allow_zero_length_dataloader_with_multiple_devices = users
        if datamodule is not None:
            is_allowed |= datamodule.allow_zero_length_dataloader_with_multiple_devices
        max_batches = loop.max_batches if is_predicting else loop._max_batches
        if max_batches is previous or not (is_allowed or exact):
            return
        previous = max_batches
        loader = loop._combined_loader
        is_sequential = loader is not None and loader._mode == "sequential"
        if exact is not None and loader is not None:
            loaders = [
                EvaluationLoader(number, _sampler_of(each) in shards, sized_len(each) is None or _has_stream(each))
                for number, each in zip(max_batches, loader.flattened, strict=True)
            ]
            steps = exact.agree(loaders, is_sequential=is_sequential or len(loaders) == 1)
            if steps is not None:
                max_batches[:] = steps
                return
        has_batches = [num > 0 for num in max_batches] if is_sequential else [sum(max_batches) > 0]
        if any(count_ranks(has_batches)) and not any(has_batches):
            max_batches[:] = [1] * len(max_batches)

    return replace_method(loop, "setup_data", setup_data_of_all_ranks)


def _sampler_of(loader: Any) -> Any:
    batch_sampler = getattr(loader, "batch_sampler", None)
    return getattr(loader if batch_sampler is None else batch_sampler, "sampler", None)


def evaluate_together(
    trainer: Any, count_ranks: Callable[[list[bool]], list[int]], exact: ExactSteps | None = None
) -> ExitStack:
    """Makes ranks without batches run the hooks of an evaluation, with the arguments of :func:`evaluate_without_data`.

    Returns:
        A stack that reverts the changes.
    """
    stack = ExitStack()
    if trainer.state.fn == TrainerFn.PREDICTING:
        stack.callback(evaluate_without_data(trainer, count_ranks))
        stack.callback(predict_with_few_samples(trainer))
    elif exact is None:
        stack.callback(evaluate_without_data(trainer, count_ranks))
    else:
        shards: WeakSet[Any] = WeakSet()
        stack.callback(evaluate_without_data(trainer, count_ranks, exact, shards))
        stack.callback(shard_without_repeats(trainer, shards))
        stack.callback(shadow_evaluation_steps(trainer, exact).close)
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
    _clear_loaders(trainer.fit_loop)


def reset_validation_loaders(trainer: Any) -> None:
    """Makes ``fit`` create new validation DataLoaders."""
    _clear_loaders(trainer.fit_loop.epoch_loop.val_loop)


def reset_loaders(trainer: Any) -> None:
    """Makes ``fit`` create new DataLoaders for training and validation."""
    reset_training_loaders(trainer)
    reset_validation_loaders(trainer)


def _clear_loaders(loop: Any) -> None:
    if loop._data_fetcher is not None:
        loop._data_fetcher.teardown()
    loop._combined_loader = loop._data_fetcher = None
