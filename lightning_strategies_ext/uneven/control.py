"""Uneven inputs: behavior when a rank runs out of training batches before other ranks.

All ranks must take part in every collective; without further measures, a rank that has finished would leave the other
ranks waiting indefinitely. The modes are:

- "error": all ranks raise an error that states the number of batches of each rank;
- "stop": all ranks end the epoch when the first rank runs out;
- "join": a rank that has run out *shadows* the steps of the other ranks. It repeats its last batch, so that it takes
  part in all collectives (metrics, validation, checkpoints, callbacks, synchronized layers), and its results have no
  effect: its gradients, logged values, and states of metrics and buffers. Gradients are averaged over the ranks that
  have data.

If all ranks know their numbers of batches, they exchange them once, when the DataLoaders are created. If a rank does
not (an ``IterableDataset``), each rank fetches one batch ahead, and the ranks exchange a few bytes with the gradients
of each optimizer step: whether each has another batch. This transfer starts before that of the gradients, so it adds no
round trip. With "stop" and "join", the end of an epoch is then known at optimizer steps only: a rank that runs out
within an accumulation window shadows the rest of the window. With "error", the transfer starts after each batch and is
awaited when the next batch begins.
"""

import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from math import inf
from typing import Any, Literal, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DistributedSampler, IterableDataset
from typing_extensions import override

from lightning_strategies_ext._lightning import trainer_data
from lightning_strategies_ext.collectives import Collectives
from lightning_strategies_ext.exceptions import UnevenInputsError
from lightning_strategies_ext.uneven.even_fetcher import ADVICE, CurrentBatch, EvenFetcher
from lightning_strategies_ext.uneven.shadowing import ShadowedSteps
from lightning_strategies_ext.uneven.step_state import StepStateSnapshot

UnevenInputs = Literal["error", "stop", "join"]
MODES = ("error", "stop", "join")


class GradientExchange(Protocol):
    """Gradient exchange in which ranks may have no contribution.

    Attributes:
        contributors: Ranks that contribute gradients to the next exchange, in order; None for all ranks.
        is_in_no_sync: Whether backward passes currently exchange nothing, because gradients are accumulated locally.
    """

    contributors: Sequence[int] | None

    @property
    def is_in_no_sync(self) -> bool: ...  # noqa: D102

    def exclude_next_backward(self) -> None:
        """Makes the next backward pass leave this rank's gradients unchanged."""

    def finish(self) -> None:
        """Waits until this rank has the gradients of all ranks."""

    def close(self) -> None:
        """Closes the exchange at the end of the stage."""

    def sync_buffers(self) -> None:
        """Broadcasts a contributor's buffers, if ranks use the buffers of rank 0 and rank 0 does not contribute."""

    def sync_buffers_of_forward(self) -> None:
        """Broadcasts rank 0's buffers, if the next forward pass would, in its place.

        Collective: all ranks call it, or run the forward pass.
        """


class UnevenInputsController(ShadowedSteps):
    """Synchronizes the training loops of all ranks during one ``fit``.

    Args:
        mode: Mode for ranks that run out of batches.
        trainer: The Trainer, before its training DataLoaders are created.
        collectives: Collectives of all ranks.
        exchange: Gradient exchange; None with Adasum.
        rank: Rank of this process.
        world_size: Number of ranks.
        device: Device of the few numbers that ranks exchange.

    Attributes:
        ends_epochs_together: Whether all ranks end each epoch together, or raise; False if that is not checked.

    Raises:
        UnevenInputsError: By any method, if ranks run out at different batches in mode "error", or if the mode cannot
            be applied.
    """

    def __init__(
        self,
        mode: UnevenInputs,
        trainer: "pl.Trainer",
        collectives: Collectives,
        exchange: GradientExchange | None,
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        super().__init__(collectives, rank, world_size, device)
        self._mode = mode
        self._trainer = trainer
        self._exchange = exchange
        self._with_next: list[int] | None = None  # ranks with another batch, as of the last transfer; None for all
        self._last_exchanged = 0  # number of the batch
        self._lengths: list[float] = []
        self._fetcher: EvenFetcher | None = None
        self._arranged: Any = None  # the fetcher that was last examined, or its replacement
        self._batch = CurrentBatch()
        self._finish_transfer: Callable[[], Tensor] | None = None
        self._is_in_step = self.ends_epochs_together = False
        self._leaving = ExitStack()
        self._leaving.callback(trainer_data.after_setup_data(trainer, self._arrange))

    def close(self) -> None:
        """Restores the Trainer and the exchange. Repeated calls are no-ops."""
        self._leaving.close()
        if self._exchange is not None:
            self._exchange.contributors = None
        # The Trainer keeps its fetcher, which references this object and thereby the model in DDP.
        self._exchange = None

    @property
    def is_needed(self) -> bool:
        """Whether the steps of this epoch need this object; False if all ranks have the same number of batches."""
        return self._fetcher is not None

    # --- around a training step ---

    @contextmanager
    def wrap_training_step(self) -> Generator[None, None, None]:
        """Reverts the effects of the training step inside this context if this rank is shadowing."""
        before = StepStateSnapshot(self._trainer) if self._batch.is_shadow else None
        self._is_in_step = True
        try:
            yield
        finally:
            self._is_in_step = False
            if before is not None:
                before.restore()
        if self._exchange is not None and not self._exchange.is_in_no_sync:
            self._exchange.sync_buffers()

    def before_backward(self) -> None:
        """Starts the transfer of whether this rank has another batch; disables the gradients of a shadowing rank."""
        batch = self._batch
        if batch.has_next is not None and (self._is_exchanged or self._mode == "error"):
            self._finish_transfer = self._start_sending_has_next(batch)
            if self._mode == "error" and not batch.has_next:
                self._receive_has_next()  # other ranks, which continue, may not exchange gradients now
            batch.has_next = None  # sent once, also if the batch has several losses
        if batch.is_shadow and self._exchange is not None:
            self._exchange.exclude_next_backward()

    def after_backward(self) -> None:
        """Waits for the gradients of all ranks and, if a transfer was started, for the ranks with another batch."""
        if self._exchange is not None:
            self._exchange.finish()
        if self._is_exchanged:
            self._receive_has_next()
            self._last_exchanged = self._batch.number

    @property
    def _is_exchanged(self) -> bool:
        return self._exchange is None or not self._exchange.is_in_no_sync

    @override
    def handles_reduce(self, tensor: Any, group: Any) -> bool:
        if self._mode != "join" or not self._is_in_step or group is not None or not isinstance(tensor, Tensor):
            return False
        return inf in self._lengths or self._batch.number > min(self._lengths, default=inf)

    # --- how many batches there are ---

    def on_batch(self, batch: CurrentBatch) -> None:
        """Called by the fetcher for each batch of this rank."""
        self._receive_has_next()
        self._batch, self._is_shadowing = batch, batch.is_shadow
        if batch.number == 1:
            self._with_next, self._last_exchanged = None, 0
        if self._exchange is None:
            return
        if batch.has_next is not None:
            self._exchange.contributors = self._with_next
        else:
            last = self._last_exchanged
            self._exchange.contributors = [rank for rank, length in enumerate(self._lengths) if length > last]

    def _arrange(self) -> None:
        fetcher = trainer_data.data_fetcher_of(self._trainer)
        if fetcher is None or fetcher is self._arranged:
            return  # examined in an earlier epoch
        self._arranged, self._fetcher = fetcher, None
        self._batch, self._is_shadowing, self._with_next = CurrentBatch(), False, None
        if self._exchange is not None:
            self._exchange.contributors = None
        fit_loop = self._trainer.fit_loop
        loaders = fetcher.combined_loader.flattened
        is_counted = fit_loop.max_batches < inf and not any(
            isinstance(getattr(loader, "dataset", None), IterableDataset) for loader in loaders
        )
        seeds = [seed for loader in loaders for seed in self._seeds_of_order(loader)]
        checksum = zlib.crc32(repr(seeds).encode())
        own = torch.tensor(
            [fit_loop.max_batches, float(is_counted), checksum], dtype=torch.float64, device=self._device
        )
        gathered = self._collectives.all_gather(own).view(self._world_size, 3)
        if len(gathered[:, 2].unique()) > 1:
            raise ValueError(
                f"Ranks shuffle their training data with different seeds (rank {self._rank}: {seeds}), so that several"
                " ranks use some samples and no rank uses others. Call `seed_everything` with the same seed on all"
                " ranks, or pass samplers with the same seed."
            )
        self._lengths = gathered[:, 0].tolist()
        if gathered[:, 1].all():
            if len(set(self._lengths)) > 1:
                self._equalize(fetcher)
        else:
            self._lengths = [inf] * self._world_size
            self._look_ahead(fetcher, gathered[:, 0])
        self.ends_epochs_together = bool(gathered[:, 1].all()) or self._fetcher is not None

    def _seeds_of_order(self, loader: Any) -> list[int]:
        """Returns the seed of a DataLoader's sampler, if the sampler shuffles and shards samples; otherwise nothing."""
        sampler = getattr(loader, "sampler", None)
        if not isinstance(sampler, DistributedSampler) or sampler.num_replicas != self._world_size:
            return []
        return [sampler.seed] if sampler.shuffle else []

    def _equalize(self, fetcher: Any) -> None:
        if self._mode == "error":
            if self._max_steps_ends_before(min(self._lengths)):
                return
            raise UnevenInputsError(f"Ranks have different numbers of training batches: {self._listed()}. {ADVICE}")
        self._check_batches_are_drawn_for_the_step(fetcher)
        if self._mode == "join" and not min(self._lengths):
            raise UnevenInputsError(
                f"`uneven_inputs='join'`: a rank has no training batch to repeat: {self._listed()}. Give each rank at"
                " least one batch."
            )
        num_agreed = min(self._lengths) if self._mode == "stop" else max(self._lengths)
        rank_zero_info(
            f"`uneven_inputs={self._mode!r}`: ranks have different numbers of training batches ({self._listed()});"
            f" each epoch has {num_agreed:.0f}."
        )
        self._install_fetcher(
            EvenFetcher(fetcher, self.on_batch, int(self._lengths[self._rank]), num_agreed), num_agreed
        )

    def _look_ahead(self, fetcher: Any, lengths: Tensor) -> None:
        if self._mode == "error":
            if not _draws_for_the_step(fetcher) or self._device.type != "cpu":
                # Not checked: the step fetches the batches itself, or each step would have to wait for the GPU.
                return
            num_agreed = self._trainer.fit_loop.max_batches
        else:
            self._check_batches_are_drawn_for_the_step(fetcher)
            num_agreed = float(lengths.min() if self._mode == "stop" else lengths.max())
        even_fetcher = EvenFetcher(fetcher, self.on_batch, None, num_agreed, ends_with_local=self._mode == "error")
        self._install_fetcher(even_fetcher, num_agreed)

    def _check_batches_are_drawn_for_the_step(self, fetcher: Any) -> None:
        if not _draws_for_the_step(fetcher):
            raise UnevenInputsError(
                f"`uneven_inputs={self._mode!r}` cannot be combined with `training_step(self, dataloader_iter)`: the"
                " step fetches the batches itself, so the strategy cannot detect where they end. Use"
                " `training_step(self, batch, batch_idx)`."
            )

    def _install_fetcher(self, fetcher: EvenFetcher, num_agreed: float) -> None:
        self._fetcher = self._arranged = fetcher
        trainer_data.set_data_fetcher(self._trainer, fetcher, num_agreed)

    def _max_steps_ends_before(self, num_batches: float) -> bool:
        """Whether ``max_steps`` ends the training before an epoch has had the given number of batches."""
        trainer = self._trainer
        num_steps = inf if trainer.max_steps == -1 else trainer.max_steps - trainer.global_step
        return trainer.fit_loop.batch_idx + num_steps * trainer.accumulate_grad_batches < num_batches

    def _listed(self) -> str:
        return ", ".join(f"rank {rank}: {length:.0f}" for rank, length in enumerate(self._lengths))

    # --- exchange between ranks ---

    def _start_sending_has_next(self, batch: CurrentBatch) -> Callable[[], Tensor]:
        gathered = torch.zeros(self._world_size, 2, dtype=torch.int64)
        gathered[self._rank, 0], gathered[self._rank, 1] = batch.number, int(bool(batch.has_next))
        flags = gathered.to(self._device)
        finish = self._collectives.start_sum(flags, "uneven_inputs")

        def receive() -> Tensor:
            finish()
            return flags

        return receive

    def _receive_has_next(self) -> None:
        """Waits for the last transfer, if there is one: which ranks have another batch. Acts on the result."""
        if self._finish_transfer is None:
            return
        assert self._fetcher is not None
        flags, self._finish_transfer = self._finish_transfer(), None
        numbers, has_next = flags[:, 0].tolist(), flags[:, 1].tolist()
        short = [rank for rank in range(self._world_size) if not has_next[rank]]
        if self._mode == "error":
            if len(set(numbers)) > 1 or 0 < len(short) < self._world_size:
                ended = ", ".join(f"rank {rank} after {numbers[rank]}" for rank in short)
                raise UnevenInputsError(
                    f"Ranks have run out of training batches while other ranks have more: {ended}. {ADVICE}"
                )
            return
        self._fetcher.record_exhausted(short, numbers[0])
        if (short and self._mode == "stop") or len(short) == self._world_size:
            self._fetcher.end()
            self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True
            self._log_exhausted_ranks(numbers[0])
        self._with_next = [rank for rank in range(self._world_size) if has_next[rank]]

    def _log_exhausted_ranks(self, number: int) -> None:
        assert self._fetcher is not None
        first_missing = self._fetcher.first_missing
        missed = {rank: number - last for rank, last in first_missing.items() if number > last}
        if self._mode == "join" and missed:
            listed = ", ".join(f"rank {rank} ran out {count} batches earlier" for rank, count in missed.items())
            rank_zero_info(
                f"`uneven_inputs='join'`: epoch {self._trainer.current_epoch} had {number} batches; {listed}."
            )
        elif self._mode == "stop" and len(first_missing) < self._world_size:
            listed = ", ".join(str(rank) for rank in first_missing)
            rank_zero_info(
                f"`uneven_inputs='stop'`: epoch {self._trainer.current_epoch} ended after {number} batches, when rank"
                f" {listed} ran out."
            )


def check_mode(uneven_inputs: Any) -> None:
    """Checks that a value is one of :data:`MODES`.

    Raises:
        ValueError: If it is not.
    """
    if uneven_inputs not in MODES:
        raise ValueError(f"`uneven_inputs={uneven_inputs!r}` is unknown. Use one of {', '.join(MODES)}.")


def _draws_for_the_step(fetcher: Any) -> bool:
    """Whether a fetcher returns batches, instead of an iterator over them (``dataloader_iter``)."""
    return hasattr(fetcher, "batches")
