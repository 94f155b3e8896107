"""What a user can say of elastic training, whatever engine carries it."""

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelPruning

from lightning_strategies_ext.checks import check_flag, check_whole_number

#: Optimizer steps between two commits, by default.
COMMIT_EVERY_N_STEPS = 100


def check_commit_interval(commit_every_n_steps: Any) -> int:
    """Optimizer steps between two commits.

    Args:
        commit_every_n_steps: As the user said, or None.

    Raises:
        TypeError: If it is no whole number.
        ValueError: If it is less than one.
    """
    if commit_every_n_steps is None:
        return COMMIT_EVERY_N_STEPS
    return check_whole_number("commit_every_n_steps", commit_every_n_steps, 1)


def check_can_change(uneven_inputs: str, averages_models: str | None) -> None:
    """Refuses what ranks that change cannot have.

    Args:
        uneven_inputs: What happens when ranks have different numbers of batches.
        averages_models: The argument that has models averaged, with its value, if there is one.

    Raises:
        ValueError: If it cannot work.
    """
    if uneven_inputs == "error":
        raise ValueError(
            "`uneven_inputs='error'` with `elastic=True`: ranks that change have different numbers of batches. Use"
            " 'join' or 'stop'."
        )
    if averages_models is not None:
        raise ValueError(
            f"`{averages_models}` with `elastic=True`: ranks go back to one state, and"
            " models that are averaged differ in between. Leave one of them out."
        )


def check_callbacks(callbacks: Iterable[pl.Callback]) -> None:
    """Refuses callbacks that replace parameters during training.

    Args:
        callbacks: Those of the Trainer.

    Raises:
        ValueError: If there is one.
    """
    if any(isinstance(callback, ModelPruning) for callback in callbacks):
        raise ValueError(
            "`ModelPruning` in elastic training: it replaces parameters, and a rank that joins creates a module that"
            " still has them. Prune with `strategy='ddp_spawn_ext'` or `'ddp_ext'`, or after `fit`."
        )


def check_is_not_elastic(kind: type, elastic: Any, base: str, **options: Any) -> None:
    """Refuses, in a strategy that is not elastic, what only elastic ones take.

    Args:
        kind: The strategy's class.
        elastic: As the user said. True makes an object of another class, unless it is a subclass of the user's.
        base: The name of the class that, with ``elastic=True``, makes the other one.
        **options: Other arguments by name; None where the user said nothing.

    Raises:
        TypeError: If ``elastic`` is True, or no flag.
        ValueError: If another is given.
    """
    if check_flag("elastic", elastic):
        other = base.replace("Strategy", "ElasticStrategy")
        raise TypeError(
            f"`elastic=True` with {kind.__name__}: let it inherit from `{other}`, which `{base}(elastic=True)` is."
        )
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"`{name}={value!r}` is for `elastic=True`. Set that, or leave it out.")
