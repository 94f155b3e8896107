"""Names of earlier versions: each raises an error that contains the present name. See ``docs/renamed.md``.

:func:`lightning_strategies_ext.discovery.lazy_names` does the same for names that packages export.
"""

from collections.abc import Callable
from functools import wraps
from typing import Final, NoReturn

from typing_extensions import ParamSpec

P = ParamSpec("P")

#: Old name of an argument → its new name.
_ARGUMENTS: Final = {
    "patience": "hang_timeout",
    "placement": "placement_strategy",
    "take_turns": "sequential",
    "directory": "dirpath",
    "picture": "plot",
}


def rejects_old_names(constructor: Callable[P, None]) -> Callable[P, None]:
    """Returns a constructor that rejects arguments by their names in earlier versions, with the same signature.

    It raises a TypeError that contains the present name. Constructors that pass ``**kwargs`` to such a constructor need
    no decorator.
    """

    @wraps(constructor)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        for name in kwargs.keys() & _ARGUMENTS.keys():
            kind = type(args[0]).__name__
            raise TypeError(f"`{kind}({name}=...)`: the argument was renamed. Use `{_ARGUMENTS[name]}=...`.")
        constructor(*args, **kwargs)

    return checked


class RenamedAttribute:
    """Method, property, or attribute of a class under its name in earlier versions: an access raises an AttributeError.

    Args:
        name: Its present name.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __set_name__(self, owner: type, old_name: str) -> None:
        self._old_name = old_name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(f"`{owner.__name__}.{self._old_name}` was renamed. Use `{self._name}`.")
