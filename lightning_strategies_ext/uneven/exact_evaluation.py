"""Exact evaluation: every sample counts once in ``validate``, ``test``, and the validation of ``fit``.

Lightning's ``DistributedSampler`` repeats samples, so that all ranks have the same number. With
``exact_evaluation=True``, shards have no repeated samples, and some ranks may have one batch less than others. All
ranks run the same number of steps: a rank that has run out of batches of a DataLoader *shadows* the steps of the other
ranks, as with ``uneven_inputs="join"``. It repeats its last batch, so that it takes part in all collectives of the
step, and what the step has changed is taken back. A rank without any batch of a DataLoader receives the first batch of
another rank, which it shadows only.

The ranks exchange their numbers of batches once, when the DataLoaders are created. Whether a rank has another batch of
an ``IterableDataset`` is known only when it is fetched, so ranks exchange this before each of its steps.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import inf
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from typing_extensions import override

from lightning_strategies_ext._lightning import trainer_data
from lightning_strategies_ext._lightning.trainer_data import EvaluationLoader
from lightning_strategies_ext.collectives import Collectives
from lightning_strategies_ext.exceptions import UnevenInputsError
from lightning_strategies_ext.failure.rank_status import format_ranks
from lightning_strategies_ext.uneven.control import GradientExchange
from lightning_strategies_ext.uneven.shadowing import ShadowedSteps
from lightning_strategies_ext.uneven.step_state import EvaluationStateSnapshot, MetricResults

#: Number of dimensions whose sizes ranks compare before they gather a tensor.
_MAX_DIMENSIONS = 15
#: Number of different shapes that an error lists.
_MAX_SHAPES_LISTED = 4


class Stage(Protocol):
    """Stage of which evaluations are a part, see :class:`.StageContext`.

    Attributes:
        rank: Rank of this process.
        size: Number of ranks.
        gradient_exchange: Gradient exchange of ``fit``, or None.
        shadowed_steps: Steps that ranks without another batch may shadow now.
    """

    rank: int
    size: int
    gradient_exchange: GradientExchange | None
    shadowed_steps: ShadowedSteps | None

    @property
    def collectives(self) -> Collectives: ...  # noqa: D102


class StepValues(Protocol):
    """Values that steps log, see :class:`.LoggedValues`.

    Attributes:
        is_shadowed: Function that returns whether ranks may shadow the current step, or None.
    """

    is_shadowed: Callable[[Tensor], bool] | None

    def count_evaluating(self, has_batches: list[bool]) -> list[int]:
        """Counts the ranks that have batches. Collective: all ranks call it."""


def evaluate_together(
    trainer: "pl.Trainer", stage: Stage, values: StepValues, device: torch.device, *, is_exact: bool
) -> ExitStack:
    """Makes all ranks run the hooks of the evaluations of a stage; with ``is_exact``, they evaluate every sample once.

    During ``fit``, DDP's first forward pass of an evaluation broadcasts buffers. A rank without batches joins the
    broadcast.

    Args:
        trainer: The Trainer.
        stage: The stage, on this rank.
        values: Logged values of the stage.
        device: Device of the few numbers that ranks exchange.
        is_exact: Whether every sample counts once; not for ``predict``, which always returns one result per sample.

    Returns:
        A stack that reverts the changes.
    """
    if stage.size == 1:
        return ExitStack()
    exact = ExactEvaluation(trainer, stage, values, device) if is_exact else None
    changes = trainer_data.evaluate_together(trainer, values.count_evaluating, exact)
    if trainer.state.fn == TrainerFn.FITTING:

        def join_first_forward(has_run_step: bool) -> None:
            if not has_run_step and stage.gradient_exchange is not None:
                stage.gradient_exchange.sync_buffers_of_forward()

        changes.callback(trainer_data.before_loader_results(trainer, join_first_forward))
    return changes


class ExactEvaluation(ShadowedSteps):
    """Evaluates every sample once, in all evaluations of one stage.

    Args:
        trainer: The Trainer.
        stage: The stage, on this rank.
        values: Logged values of the stage.
        device: Device of the few numbers that ranks exchange.

    Attributes:
        local: Largest numbers of batches of this rank, by DataLoader.

    Raises:
        UnevenInputsError: By any method, if DataLoaders cannot be evaluated exactly.
    """

    def __init__(self, trainer: "pl.Trainer", stage: Stage, values: StepValues, device: torch.device) -> None:
        super().__init__(stage.collectives, stage.rank, stage.size, device)
        self._trainer = trainer
        self._stage = stage
        self._values = values
        self._lengths: list[list[float]] = []  # of each rank, by DataLoader; infinity for an `IterableDataset`
        self.local: list[float] = []
        self._contributors: list[int] | None = None  # of the current step; None for all ranks, or outside a step
        self._next_contributors: list[int] | None = None
        self._is_first_step = False

    def agree(self, loaders: Sequence[EvaluationLoader], *, is_sequential: bool) -> list[float] | None:
        """Agrees on the number of steps of each DataLoader. Collective: all ranks call it.

        Args:
            loaders: The DataLoaders of the evaluation, on this rank.
            is_sequential: Whether the evaluation has one DataLoader, or runs them one after the other.

        Returns:
            Largest number of steps of each DataLoader; None if all ranks have the same number of batches, or if no
            DataLoader is sharded without repetition, or has an ``IterableDataset``.
        """
        self._lengths, self.local = [], []
        has_streams = is_sequential and any(loader.is_stream for loader in loaders)
        if not has_streams and not any(loader.is_shard for loader in loaders):
            return None
        numbers = [loader.num_batches for loader in loaders]
        known = [inf if loader.is_stream else loader.num_batches for loader in loaders]
        own = torch.tensor([known, numbers], dtype=torch.float64, device=self._device)
        of_ranks = self._collectives.all_gather(own).view(self._world_size, 2, -1)
        lengths = of_ranks[:, 0].tolist()
        if all(of_rank == lengths[0] for of_rank in lengths) and not has_streams:
            return None
        if not is_sequential:
            raise UnevenInputsError(
                "`exact_evaluation=True` cannot be combined with a CombinedLoader that takes a batch from each of"
                " several DataLoaders: their shards have different numbers of batches. Use `mode='sequential'`, or"
                " return a list of DataLoaders."
            )
        empty = [
            (rank, index)
            for rank, of_rank in enumerate(lengths)
            for index, length in enumerate(of_rank)
            if not length and not loaders[index].is_shard and any(each[index] for each in lengths)
        ]
        if empty:
            rank, index = empty[0]
            raise UnevenInputsError(
                f"Rank {rank} has no batch of DataLoader {index}, whose sampler is your own. Give each rank at least"
                " one batch."
            )
        self._lengths, self.local = lengths, numbers
        # Lightning skips an evaluation without steps, so a stream that is empty on this rank has those of other ranks.
        return [most if most == inf else int(most) for most in of_ranks[:, 1].amax(0).tolist()]

    def shadow(self, fetcher: Any, limit: float, *, draws_for_the_step: bool) -> Any:
        """Returns an object that replaces Lightning's fetcher in an evaluation.

        Args:
            fetcher: Lightning's fetcher of this rank's batches.
            limit: Largest number of batches of each DataLoader.
            draws_for_the_step: Whether the fetcher returns batches, instead of an iterator over them.

        Returns:
            The fetcher itself, if all ranks have the same number of batches.
        """
        self._is_first_step = True
        self._next_contributors = None
        has_streams = any(length == inf for length in self._lengths[0])
        lengths = [[length if length == inf else min(length, limit) for length in each] for each in self._lengths]
        if all(of_rank == lengths[0] for of_rank in lengths) and not (has_streams and draws_for_the_step):
            return fetcher
        if not draws_for_the_step:
            raise UnevenInputsError(
                "`exact_evaluation=True` cannot be combined with an evaluation step that takes `dataloader_iter`, if"
                " ranks have different numbers of batches: the step fetches the batches itself. Use"
                " `validation_step(self, batch, batch_idx)`."
            )
        collectives = self._collectives.broadcast, self._ranks_with
        return EvaluationFetcher(fetcher, lengths, self._rank, *collectives, self._on_batch)

    def _ranks_with(self, has_batch: bool) -> list[int]:
        """Returns the ranks that have another batch. Collective: all ranks call it."""
        flags = self._collectives.all_gather(torch.tensor([int(has_batch)], device=self._device))
        return flags.flatten().nonzero().flatten().tolist()

    def _on_batch(self, contributors: list[int]) -> None:
        self._next_contributors = None if len(contributors) == self._world_size else contributors

    # --- around an evaluation and its steps ---

    @contextmanager
    def wrap_evaluation(self) -> Generator[None, None, None]:
        """Makes collectives inside this context exclude ranks that shadow the current step."""
        before = self._stage.shadowed_steps, self._values.is_shadowed
        self._stage.shadowed_steps = self
        self._collectives = self._stage.collectives  # those of a rank that has joined the others
        self._values.is_shadowed = lambda value: self.handles_reduce(value, None)
        try:
            yield
        finally:
            self._stage.shadowed_steps, self._values.is_shadowed = before

    @contextmanager
    def wrap_step(self) -> Generator[None, None, None]:
        """Reverts the effects of the step and its hooks inside this context if this rank is shadowing."""
        contributors, is_first = self._next_contributors, self._is_first_step
        self._is_first_step = False
        if contributors is None:
            yield
            return
        if is_first and self._stage.gradient_exchange is not None:
            # Otherwise a rank that shadows the first step would take back what DDP broadcasts in it.
            self._stage.gradient_exchange.sync_buffers_of_forward()
        self._contributors, self._is_shadowing = contributors, self._rank not in contributors
        try:
            if not self._is_shadowing:
                results = MetricResults(self._trainer)
                yield
                results.drop_changed()
                return
            before = EvaluationStateSnapshot(self._trainer)
            try:
                with isolate_rng(include_cuda=self._device.type == "cuda"):
                    yield
            finally:
                before.restore()
        finally:
            self._contributors, self._is_shadowing = None, False

    @override
    def handles_reduce(self, tensor: Any, group: Any) -> bool:
        return self._contributors is not None and _is_of_all_ranks(group) and isinstance(tensor, Tensor)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers one tensor from each rank that does not shadow the current step.

        Raises:
            ValueError: On all ranks, if the tensors have different shapes, and the engine cannot gather them.
        """
        if not _is_of_all_ranks(group) or self._collectives.rank(group) is None:
            return self._collectives.all_gather(tensor, group, sync_grads)
        shapes = self._gather_shapes(tensor)
        is_ragged = len(set(shapes)) > 1
        if is_ragged and not (self._collectives.gathers_different_lengths and _differ_in_length(shapes)):
            ranks_of = {shape: [rank for rank, other in enumerate(shapes) if other == shape] for shape in shapes}
            shown = [f"{list(shape)} on {format_ranks(ranks)}" for shape, ranks in ranks_of.items()]
            listed = ", ".join(shown[:_MAX_SHAPES_LISTED])
            raise ValueError(
                f"`all_gather`: the ranks have tensors of different shapes ({listed}). With `exact_evaluation=True`,"
                " ranks may have different numbers of samples. Pad the tensors to the same shape, gather sums and"
                " counts, or use a metric of torchmetrics."
            )
        gathered: Tensor = self._collectives.all_gather(tensor, group, sync_grads)
        if self._contributors is None:
            return gathered
        if not is_ragged:
            return gathered[self._contributors]
        parts = gathered.split([shape[0] for shape in shapes])
        return torch.cat([parts[rank] for rank in self._contributors])

    def _gather_shapes(self, tensor: Tensor) -> list[tuple[int, ...]]:
        shape = [tensor.ndim, *tensor.shape[:_MAX_DIMENSIONS]]
        padded = [*shape, *[0] * (1 + _MAX_DIMENSIONS - len(shape))]
        rows = self._collectives.all_gather(torch.tensor(padded, device=self._device)).tolist()
        return [tuple(sizes[: min(ndim, _MAX_DIMENSIONS)]) for ndim, *sizes in rows]


class EvaluationFetcher:
    """Returns batches to an evaluation loop; a rank with fewer batches than others repeats its last batch.

    Replaces Lightning's fetcher, and forwards all other attributes to it.

    Args:
        inner: Lightning's fetcher.
        lengths: Numbers of batches of each rank, by DataLoader; infinity if unknown, then on all ranks.
        rank: Rank of this process.
        broadcast: Function that returns an object of a rank on every rank.
        ranks_with: Collective that receives whether this rank has another batch, and returns the ranks that have one.
        on_batch: Function that is called before each step with the ranks that have a batch for it.

    Attributes:
        fetched: Number of batches that this object has returned.
        done: Whether it has returned the last batch.
    """

    def __init__(
        self,
        inner: Any,
        lengths: Sequence[Sequence[float]],
        rank: int,
        broadcast: Callable[[Any, int], Any],
        ranks_with: Callable[[bool], list[int]],
        on_batch: Callable[[list[int]], None],
    ) -> None:
        self.inner = inner
        self.fetched = inner.fetched
        self.done = False
        self._lengths = [*zip(*lengths, strict=True)]
        self._rank, self._world_size = rank, len(lengths)
        self._ranks_with = ranks_with
        self._next: Any = None  # the next item of the inner fetcher, if it has been fetched to see whether there is one
        self._items = self._generate(broadcast, on_batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __iter__(self) -> "EvaluationFetcher":
        return self

    def __next__(self) -> Any:
        item = next(self._items)
        self.fetched += 1
        return item

    def _generate(self, broadcast: Callable[[Any, int], Any], on_batch: Callable[[list[int]], None]) -> Iterator[Any]:
        for index in range(len(self._lengths)):
            batch: Any = None
            number, contributors = 0, self._contributors(index, 0)
            while contributors:
                is_shadowing = self._rank not in contributors
                if not is_shadowing:
                    item, self._next = self._next or next(self.inner, None), None
                    if item is None:  # Lightning's fetcher continues an interrupted evaluation
                        return
                    batch = item[0]
                if not number and len(contributors) < self._world_size:
                    received = broadcast(batch, contributors[0])
                    batch = received if is_shadowing else batch
                following = self._contributors(index, number + 1)
                self.done = not following and not any(map(any, self._lengths[index + 1 :]))
                on_batch(contributors)
                # A step may change the containers of its batch, for example by `batch.pop`.
                yield batch if self._rank in following else _rebuilt(batch), number, index
                number, contributors = number + 1, following

    def _contributors(self, index: int, number: int) -> list[int]:
        """Returns the ranks with a batch of the number in a DataLoader."""
        lengths = self._lengths[index]
        if inf not in lengths:
            return [rank for rank, length in enumerate(lengths) if length > number]
        self._next = self._next or next(self.inner, None)
        return self._ranks_with(self._next is not None and self._next[2] == index)


def _rebuilt(batch: Any) -> Any:
    """Returns a batch whose lists, tuples, dicts, and dataclasses are new, with the same tensors."""
    return apply_to_collection(batch, Tensor, lambda tensor: tensor)


def _is_of_all_ranks(group: Any) -> bool:
    return group is None or (dist.is_available() and dist.is_initialized() and group is dist.group.WORLD)


def _differ_in_length(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether shapes differ only in their first dimension."""
    return all(shapes) and len({shape[1:] for shape in shapes}) == 1
