"""Finds what in a message cannot be rebuilt, to report it by the names that the user gave."""

import io
import pickle
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from lightning_strategies_ext.launch.transport.pickling import Pickled

# The classes of Lightning's and torch's of which the user knows an object, by name: this package imports none of them.
_ROOTS = {
    "LightningModule": "the LightningModule",
    "LightningDataModule": "the datamodule",
    "Callback": "the callback",
    "Logger": "the logger",
    "Profiler": "the profiler",
    "DataLoader": "the loader",
    "Dataset": "the dataset",
    "Strategy": "the strategy",
    "Trainer": "the Trainer",
}
_OF_A_MODULE = ("_modules", "_parameters", "_buffers")


def explain_unreadable(pickled: Pickled, error: Exception) -> TypeError:
    """Returns the error for a job that a worker cannot rebuild. The attribute ``is_unreadable_job`` marks it.

    Args:
        pickled: The job.
        error: What its rebuilding has raised.
    """
    what = "What the workers need"
    with suppress(Exception):
        what = _culprit(pickled) or what
    explained: Any = TypeError(
        f"{what} cannot be rebuilt in the worker processes: {type(error).__name__}: {error}. Make sure that pickle can"
        " rebuild it in another process, and that importing its module defines or registers all that it needs (`setup`"
        " runs in the workers, too), or use `strategy='ddp_fork_ext'`, whose workers have what the main process has."
    )
    explained.is_unreadable_job = True
    return explained  # type: ignore[no-any-return]


def is_unreadable_job(error: BaseException | None) -> bool:
    """Whether an error of a worker, or its cause, is one of :func:`explained`."""
    return any(getattr(each, "is_unreadable_job", False) for each in (error, getattr(error, "__cause__", None)))


def _culprit(pickled: Pickled) -> str | None:
    # pickle's unpickler in Python, of CPython 3.10 to 3.14, keeps its stack when it fails: the objects and dictionaries
    # that are not complete yet, each dictionary with the items before the one that has failed.
    unpickler: Any = pickle._Unpickler(io.BytesIO(pickled.data), buffers=pickled.buffers)
    with suppress(Exception):
        unpickler.load()
        return None
    root, path = None, []
    levels = [*unpickler.metastack, unpickler.stack]
    for before, level in zip([[], *levels], levels, strict=False):
        for kind, part in _incomplete(before[-1] if before else None, level):
            if kind == "name":
                path.append(part)
            elif (name := _root_name(part)) is not None:
                root, path = name, []
    names = ".".join(name for name in path if name not in _OF_A_MODULE)
    if root is None:
        return None
    return f"`{names}` of {root}" if names else root[0].upper() + root[1:]


def _incomplete(container: Any, level: list[Any]) -> Iterator[tuple[str, Any]]:
    """The names and objects on one level of the stack that are not complete, outermost first."""
    rest = level
    if isinstance(container, dict):
        # A name and a value in turn; behind the last name, the value's parts.
        position = 0
        while position + 2 < len(level) and isinstance(level[position + 2], str):
            position += 2
        if position < len(level):
            yield "name", str(level[position])
        rest = level[position + 1 :]
    for before, part in zip([None, *rest], rest, strict=False):
        if isinstance(before, dict) and isinstance(part, str):
            yield "name", part
        else:
            yield "object", part


def _root_name(obj: Any) -> str | None:
    for kind in type(obj).__mro__:
        if kind.__name__ in _ROOTS:
            return f"{_ROOTS[kind.__name__]} {type(obj).__name__}".replace("the Trainer Trainer", "the Trainer")
    return None
