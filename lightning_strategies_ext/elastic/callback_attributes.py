"""Attributes of callbacks that a rank that joins receives from another rank, in addition to their states in the commit.

``setup`` hooks may have set them, such as the directory of checkpoints. The attributes are numbers, strings, or None,
and may not be specific to a rank.
"""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar

from lightning_strategies_ext.exceptions import JoinError


def plain_attributes_of(callbacks: Sequence[pl.Callback]) -> list[tuple[str, dict[str, Any]]]:
    """Returns the class and the attributes of each callback."""
    return [
        (
            type(callback).__qualname__,
            {name: value for name, value in vars(callback).items() if isinstance(value, (str, int, float, type(None)))},
        )
        for callback in callbacks
    ]


def set_plain_attributes(callbacks: Sequence[pl.Callback], attributes: list[tuple[str, dict[str, Any]]]) -> None:
    """Sets the attributes that :func:`plain_attributes_of` has returned on another rank.

    Raises:
        JoinError: If that rank has other callbacks.
    """
    own, others = [type(callback).__qualname__ for callback in callbacks], [name for name, _ in attributes]
    if own != others:
        raise JoinError(
            f"This rank cannot join the other ranks, because it has other callbacks: {own}, and the other ranks have"
            f" {others}. Create the same callbacks in the same order on every rank."
        )
    for callback, (_, found) in zip(callbacks, attributes, strict=True):
        if not isinstance(callback, ProgressBar):
            vars(callback).update(found)
