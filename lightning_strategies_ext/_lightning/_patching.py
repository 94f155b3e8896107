"""Replacement of a method on a single object, such as the Trainer or one of its loops."""

from collections.abc import Callable
from typing import Any


def replace_method(owner: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Replaces a method on an object by a function.

    Returns:
        A function that restores the method, unless it has been replaced again since. Repeated calls are no-ops.
    """
    setattr(owner, name, method)

    def undo() -> None:
        if vars(owner).get(name) is method:
            delattr(owner, name)

    return undo
