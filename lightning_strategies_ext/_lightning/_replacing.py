"""How a method of one of the Trainer's objects is replaced, on that object alone."""

from collections.abc import Callable
from typing import Any


def replace_method(owner: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Puts a function in the place of a method of an object.

    Returns:
        A function that undoes it, unless another one has taken the place since. A second call does no harm.
    """
    setattr(owner, name, method)

    def undo() -> None:
        if vars(owner).get(name) is method:
            delattr(owner, name)

    return undo
