"""Names of a package whose modules load when they are first asked for."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, modules: dict[str, str], further: tuple[str, ...] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: Its name.
        modules: The names that it offers, and the module where each stands.
        further: Names that it defines itself.
    """

    def getattr_(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return getattr_, lambda: sorted((*modules, *further))
