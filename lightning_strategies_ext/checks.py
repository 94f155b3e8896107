"""Kinds of values that arguments may have, whatever they are for."""

import sys
from typing import Any


def check_whole_number(name: str, value: Any, least: int) -> int:
    """Refuses what is no whole number, or less than there must be.

    Args:
        name: Of the argument.
        value: As the user said.
        least: The least that is allowed.

    Raises:
        TypeError: If it is no whole number.
        ValueError: If it is less.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be a whole number, got {value!r}.")
    if value < least:
        raise ValueError(f"`{name}={value}` must be {least} or more.")
    return value


def check_flag(name: str, value: Any) -> bool:
    """Refuses what is neither True nor False.

    Raises:
        TypeError: If it is not.
    """
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, got {value!r}.")
    return value


def is_compiled(module: Any) -> bool:
    """Whether a module is compiled: by ``torch.compile(module)``, or in place by ``module.compile()``."""
    # `torch._dynamo` takes a second to import, and nothing is compiled before. `module.compile()` keeps the compiled
    # call in a private attribute (torch 2.5 to 2.13).
    dynamo = sys.modules.get("torch._dynamo")
    is_wrapped = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return is_wrapped or getattr(module, "_compiled_call_impl", None) is not None
