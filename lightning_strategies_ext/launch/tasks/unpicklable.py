"""Errors for tasks that cannot be pickled, with the name of the part in the user's code."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from torch.nn import Module

from lightning_strategies_ext.launch.tasks.object_changes import in_slots, named_attributes_of
from lightning_strategies_ext.launch.transport.pickling import MessagePickler, SharedObjects, dump
from lightning_strategies_ext.launch.transport.reducers import is_of_multiprocessing

Pickler = type[MessagePickler] | None


# Class of torch's settings, which the error of pickling a compiled function names (torch 2.5 to 2.13).
_COMPILED_MARKER = "ConfigModuleInstance"


def unpicklable_error(part: str, error: Exception) -> TypeError:
    """Returns the error for a task that cannot be pickled, because pickling of the named part has raised ``error``."""
    if _COMPILED_MARKER in str(error):
        return TypeError(
            f"{part} was made by `torch.compile`, and compiled code cannot be sent to the worker processes ({error})."
            " Compile in `configure_model`, which runs in the workers, or use `strategy='ddp_fork_ext'`, whose workers"
            " inherit all objects."
        )
    return TypeError(
        f"{part} cannot be sent to the worker processes: {error}. Do not store open files, locks, or similar objects in"
        " attributes (`setup` runs in the workers and can create them), or use `strategy='ddp_fork_ext'`, whose workers"
        " inherit all objects."
    )


def find_unpicklable(task: Any, error: Exception, pickler: Pickler) -> tuple[str, Exception]:
    """Returns name and error of the part of a :class:`.StageTask` that cannot be pickled; ``error`` is the task's."""
    shared: SharedObjects = task.shared

    def pickling_error(obj: Any) -> Exception | None:
        # Without the Trainer's other parts, which are checked separately. Data are checked within their object.
        others = [other for other in shared.objects if other is not obj and not isinstance(other, shared.never)]
        try:
            dump(obj, SharedObjects(others), pickler=pickler)
        except Exception as error:
            return error
        return None

    for name, root in _roots(task):
        for inner, part in root.named_modules() if isinstance(root, Module) else [("", root)]:
            reason = pickling_error(part)
            if reason is not None:
                path, reason = _innermost(part, inner, reason, pickling_error)
                return (f"`{path}` of {name}" if path else name[0].upper() + name[1:]), reason
    return "The Trainer, or an object that it refers to,", error


def _roots(task: Any) -> Iterator[tuple[str, Any]]:
    trainer, strategy = task.trainer, task.trainer.strategy
    roots = [("the LightningModule", trainer.lightning_module), ("the profiler", trainer.profiler)]
    roots += [("the callback", callback) for callback in trainer.callbacks]
    roots += [("the logger", logger) for logger in trainer.loggers]
    arguments = [arg for arg in [*task.args, *task.kwargs.values()] if arg is not trainer.lightning_module]
    roots += [("the argument", arg) for arg in arguments]
    roots += [("the accelerator", strategy.accelerator), ("the precision plugin", strategy.precision_plugin)]
    roots += [("the checkpoint plugin", strategy.checkpoint_io), ("the strategy", strategy)]
    for kind, root in roots:
        yield f"{kind} {type(root).__name__}", root
    yield "the Trainer", trainer


def _innermost(
    obj: Any, path: str, reason: Exception, pickling_error: Callable[[Any], Exception | None]
) -> tuple[str, Exception]:
    seen = set()
    while id(obj) not in seen and not is_of_multiprocessing(obj):  # whose attributes are not the user's
        seen.add(id(obj))
        for step, child in _children(obj):
            inner = None if id(child) in seen else pickling_error(child)
            if inner is not None:
                obj, path, reason = child, f"{path}{step}".removeprefix("."), inner
                break
    return path, reason


def _children(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, dict):
        yield from ((f"[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple)):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    elif not isinstance(obj, type):
        attributes: dict[str, Any] = in_slots(obj)
        if hasattr(obj, "__dict__"):
            with suppress(Exception):  # the class's ``__getstate__`` may be what fails
                attributes.update(named_attributes_of(obj))
        yield from ((f".{name}", value) for name, value in attributes.items())
