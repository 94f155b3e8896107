"""Checks of the arguments for elastic training, for all engines."""

from collections.abc import Iterable
from importlib import import_module
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
            "`uneven_inputs='error'` cannot be combined with `elastic=True`: when ranks are lost or added, ranks have"
            " different numbers of batches. Use 'join' or 'stop'."
        )
    if model_averaging is not None:
        raise ValueError(
            f"`{model_averaging}` cannot be combined with `elastic=True`: a commit has the state of one rank, and"
            " between two averagings the ranks have different models. Omit one of the two."
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
            "`ModelPruning` cannot be combined with elastic training: it replaces parameters, and a rank that joins"
            " creates a module with the original ones. Use `strategy='ddp_spawn_ext'` or `'ddp_ext'`, or prune after"
            " `fit`."
        )


def elastic_class_of(strategy_class: type) -> type:
    """Returns the class of ``strategy_class(elastic=True)``: its elastic class, or else the class itself."""
    target = vars(strategy_class).get("elastic_class")
    if target is None:
        return strategy_class
    module, _, name = target.partition(":")
    found: type = getattr(import_module(f"{strategy_class.__module__.rpartition('.')[0]}.{module}"), name)
    return found


def check_is_not_elastic(strategy_class: type, elastic: Any, elastic_class: str, **options: Any) -> None:
    """Rejects the arguments of elastic strategies in a strategy that is not elastic.

    Args:
        strategy_class: Class of the strategy.
        elastic: Argument ``elastic``. With True, a strategy creates an object of its elastic class, but a subclass that
            the user has derived from the strategy cannot.
        elastic_class: Elastic class of the strategy, as ``"module:Class"``.
        **options: Other arguments by name; None for those that are not set.

    Raises:
        TypeError: If ``elastic`` is True, or not a bool.
        ValueError: If another argument is set.
    """
    if check_flag("elastic", elastic):
        elastic_name = elastic_class.rpartition(":")[2]
        base = elastic_name.replace("Elastic", "")
        raise TypeError(
            f"`elastic=True` cannot be combined with {strategy_class.__name__}, which does not inherit from"
            f" `{elastic_name}`. Derive the class from `{elastic_name}`, which is `{base}(elastic=True)`."
        )
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"`{name}={value!r}` requires `elastic=True`. Set `elastic=True`, or omit the argument.")
