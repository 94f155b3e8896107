"""Helpers of several test modules of this package."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from tests.support.models import make_trainer
from tests.support.ranks import run_ranks


def single_process_trainer(**kwargs: Any) -> pl.Trainer:
    return make_trainer("auto", devices=1, max_epochs=1, **kwargs)


def in_own_process(function: Callable[..., Any], *args: Any) -> Any:
    """Returns the value of ``function(*args)`` in a separate process, which may receive signals and exit."""
    return run_ranks(function, *args, world_size=1)[0]


class Record:
    """A callable that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> None:
        self.calls.append(args)
