"""Checks of the arguments for elastic training, for all engines."""

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelPruning

from lightning_strategies_ext.checks import check_flag, check_int

#: Default number of optimizer steps between two commits.
COMMIT_EVERY_N_STEPS = 100


def check_commit_interval(commit_every_n_steps: Any) -> int:
    """Returns the number of optimizer steps between two commits.

    Args:
        commit_every_n_steps: Argument of the strategy; None for the default.

    Raises:
        TypeError: If the argument is not a whole number.
        ValueError: If the argument is less than 1.
    """
    if commit_every_n_steps is None:
        return COMMIT_EVERY_N_STEPS
    return check_int("commit_every_n_steps", commit_every_n_steps, 1)


def check_elastic_compatible(uneven_inputs: str, model_averaging: str | None) -> None:
    """Rejects arguments that elastic training does not support.

    Args:
        uneven_inputs: Mode for ranks with different numbers of batches.
        model_averaging: Argument that enables model averaging, with its value; None if there is none.

    Raises:
        ValueError: If an argument is not supported.
    """
    if uneven_inputs == "error":
        raise ValueError(
            "`uneven_inputs='error'` with `elastic=True`: ranks that change have different numbers of batches. Use"
            " 'join' or 'stop'."
        )
    if model_averaging is not None:
        raise ValueError(
            f"`{model_averaging}` with `elastic=True`: ranks go back to one state, and"
            " models that are averaged differ in between. Leave one of them out."
        )


def check_callbacks(callbacks: Iterable[pl.Callback]) -> None:
    """Rejects callbacks that replace parameters during training.

    Args:
        callbacks: Callbacks of the Trainer.

    Raises:
        ValueError: If there is such a callback.
    """
    if any(isinstance(callback, ModelPruning) for callback in callbacks):
        raise ValueError(
            "`ModelPruning` in elastic training: it replaces parameters, and a rank that joins creates a module that"
            " still has them. Prune with `strategy='ddp_spawn_ext'` or `'ddp_ext'`, or after `fit`."
        )


def check_is_not_elastic(kind: type, elastic: Any, base: str, **options: Any) -> None:
    """Rejects the arguments of elastic strategies in a strategy that is not elastic.

    Args:
        kind: Class of the strategy.
        elastic: Argument ``elastic``. With True, ``base`` creates an object of its elastic class, but a subclass of the
            user cannot.
        base: Name of the class with the argument ``elastic``.
        **options: Other arguments by name; None for those that are not set.

    Raises:
        TypeError: If ``elastic`` is True, or not a bool.
        ValueError: If another argument is set.
    """
    if check_flag("elastic", elastic):
        other = base.replace("Strategy", "ElasticStrategy")
        raise TypeError(
            f"`elastic=True` with {kind.__name__}: let it inherit from `{other}`, which `{base}(elastic=True)` is."
        )
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"`{name}={value!r}` is for `elastic=True`. Set that, or leave it out.")
