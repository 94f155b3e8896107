"""Kinds of values that arguments may have, whatever they are for."""

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
