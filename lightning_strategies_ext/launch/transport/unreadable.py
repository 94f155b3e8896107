"""Search for the part of a message that cannot be rebuilt, to report it by the names that the user knows."""

import io
import pickle
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from lightning_strategies_ext.launch.transport.pickling import Pickled

# Classes of objects that the user knows, by name, because this package does not import Lightning.
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
    """Returns the error for a task that a worker cannot rebuild, marked by the attribute ``is_unreadable_job``.

    Args:
        pickled: The task.
        error: The exception that was raised when the task was unpickled.
    """
    name = "An object that the workers need"
    with suppress(Exception):
        name = _find_unreadable(pickled) or name
    explained: Any = TypeError(
        f"{name} cannot be rebuilt in the worker processes: {type(error).__name__}: {error}. Make sure that pickle can"
        " rebuild it in another process, and that importing its module defines or registers all that it needs (`setup`"
        " runs in the workers too), or use `strategy='ddp_fork_ext'`, whose workers inherit the main process's objects."
    )
    explained.is_unreadable_job = True
    return explained  # type: ignore[no-any-return]


def is_unreadable_job(error: BaseException | None) -> bool:
    """Whether an error of a worker, or its cause, was created by :func:`explain_unreadable`."""
    return any(getattr(each, "is_unreadable_job", False) for each in (error, getattr(error, "__cause__", None)))


def _find_unreadable(pickled: Pickled) -> str | None:
    # pickle's unpickler in Python (CPython 3.10 to 3.14) keeps its stack when it fails: the objects and dictionaries
    # that are not complete yet, each dictionary with the items before the one that failed.
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
    """Yields the incomplete names and objects on one level of the stack, outermost first."""
    rest = level
    if isinstance(container, dict):
        # Names and values alternate; the parts of the incomplete value follow the last name.
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
