"""Checks of the types of arguments."""

import sys
from typing import Any


def check_int(name: str, value: Any, minimum: int) -> int:
    """Returns an integer argument if it is valid.

    Args:
        name: Name of the argument.
        value: Value that the user passed.
        minimum: Minimum.

    Raises:
        TypeError: If the value is not an integer.
        ValueError: If the value is less than the minimum.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be a whole number, got {value!r}.")
    if value < minimum:
        raise ValueError(f"`{name}={value}` must be at least {minimum}.")
    return value


def check_flag(name: str, value: Any) -> bool:
    """Returns a boolean argument if it is valid.

    Args:
        name: Name of the argument.
        value: Value that the user passed.

    Raises:
        TypeError: If the value is neither True nor False.
    """
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, got {value!r}.")
    return value


def is_compiled(module: Any) -> bool:
    """Returns whether a module is compiled: by ``torch.compile(module)``, or in place by ``module.compile()``."""
    # The import of `torch._dynamo` takes a second; before it, no module is compiled. `module.compile()` stores the
    # compiled call in a private attribute (torch 2.5 to 2.13).
    dynamo = sys.modules.get("torch._dynamo")
    is_wrapped = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return is_wrapped or getattr(module, "_compiled_call_impl", None) is not None
