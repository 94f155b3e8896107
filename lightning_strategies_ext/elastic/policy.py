"""Policies for the batch size and the learning rate when the number of ranks changes, as callbacks.

Goyal et al. (2017, "Accurate, Large Minibatch SGD") scale the learning rate linearly with the global batch size;
Krizhevsky (2014, "One weird trick") with its square root. The right choice depends on the model, so nothing is scaled
by default.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim.lr_scheduler import OneCycleLR


class WorldSizePolicy(pl.Callback):
    """Keeps the batch size of each rank and the learning rate, and logs the change. Subclass it for other policies.

    Used by default, if the Trainer's callbacks contain no policy.

    Example::

        from lightning_strategies_ext import WorldSizePolicy, scale_learning_rates

        class HalvedLearningRate(WorldSizePolicy):
            def on_world_size_change(self, trainer, pl_module, old, new):
                scale_learning_rates(trainer, 1.0 if new > 8 else 0.5)
    """

    def per_rank_batch_size(self, batch_size: int, first_world_size: int, world_size: int) -> int:
        """Returns the number of samples per batch and rank of a training DataLoader; must be equal on all ranks.

        Args:
            batch_size: Batch size of the user's DataLoader.
            first_world_size: Number of ranks when ``fit`` began.
            world_size: Current number of ranks.
        """
        return batch_size

    def on_world_size_change(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", old: int, new: int) -> None:
        """Called on all ranks after the commit is restored and before DataLoaders are created.

        Args:
            trainer: The Trainer.
            pl_module: The module.
            old: Number of ranks at the commit.
            new: Current number of ranks.
        """
        rank_zero_info(
            f"{old} -> {new} ranks: each rank keeps its batch size, so the global batch has {new / old:g} times as"
            " many samples; learning rates are unchanged. To change this, add a `WorldSizePolicy` to the callbacks."
        )


class KeepGlobalBatch(WorldSizePolicy):
    """Divides the global batch by the current number of ranks, so that the learning rate need not change.

    If it is not divisible, the batch size of each rank is rounded up.
    """

    def per_rank_batch_size(self, batch_size: int, first_world_size: int, world_size: int) -> int:
        """Returns the number of samples of the global batch at the start of ``fit`` per current rank, rounded up."""
        return -(-batch_size * first_world_size // world_size)

    def on_world_size_change(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", old: int, new: int) -> None:
        """Logs the change."""
        rank_zero_info(f"{old} -> {new} ranks: the global batch size is unchanged, and is divided by {new}.")


class ScaleLearningRate(WorldSizePolicy):
    """Keeps the batch size of each rank, and scales learning rates with the number of ranks.

    Args:
        by: How learning rates depend on the number of ranks: "linear", or "sqrt" for the square root.

    Raises:
        ValueError: If ``by`` has another value.
    """

    def __init__(self, by: Literal["linear", "sqrt"] = "linear") -> None:
        if by not in ("linear", "sqrt"):
            raise ValueError(f"`by={by!r}` is unknown. Use 'linear' or 'sqrt'.")
        self._exponent = 1.0 if by == "linear" else 0.5

    def on_world_size_change(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", old: int, new: int) -> None:
        """Scales learning rates."""
        factor = (new / old) ** self._exponent
        scale_learning_rates(trainer, factor)
        rank_zero_info(
            f"{old} -> {new} ranks: each rank keeps its batch size, and learning rates are multiplied by {factor:g}."
        )


def find_policy(callbacks: Iterable[pl.Callback], default: WorldSizePolicy) -> WorldSizePolicy:
    """Returns the policy among a Trainer's callbacks, or the default."""
    return next((callback for callback in callbacks if isinstance(callback, WorldSizePolicy)), default)


def scale_learning_rates(trainer: "pl.Trainer", factor: float) -> None:
    """Multiplies the learning rates of all optimizers, and the base and largest learning rates of schedulers.

    Schedulers in a ``SequentialLR`` or ``ChainedScheduler`` are included. Smallest learning rates that a scheduler has
    as an argument (``eta_min``, ``min_lr``) are unchanged.
    """
    for optimizer in trainer.strategy.optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= factor
            if "initial_lr" in group:
                group["initial_lr"] *= factor
    scaled: set[int] = set()  # ids of the dicts with the limits of `OneCycleLR`
    for config in trainer.lr_scheduler_configs:
        for scheduler in _schedulers_in(config.scheduler):
            for name in ("base_lrs", "max_lrs"):  # `max_lrs` of `CyclicLR`
                if hasattr(scheduler, name):
                    setattr(scheduler, name, [lr * factor for lr in getattr(scheduler, name)])
            if isinstance(scheduler, OneCycleLR):
                for group in scheduler.optimizer.param_groups:
                    if id(group) not in scaled:
                        scaled.add(id(group))
                        group["max_lr"] *= factor
                        group["min_lr"] *= factor


def _schedulers_in(scheduler: Any) -> Iterator[Any]:
    """Yields a scheduler and those within it."""
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):  # of `SequentialLR` and `ChainedScheduler`
        yield from _schedulers_in(inner)
