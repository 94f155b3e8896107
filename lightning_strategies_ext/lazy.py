"""Names of a package whose modules load when they are first asked for."""

import sys
from collections.abc import Callable
from typing import Any


def lazy_names(
    package: str, modules: dict[str, str], further: tuple[str, ...] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions ``__getattr__`` and ``__dir__`` of a package; they give what is for the Lightning in use.

    Args:
        package: Its name.
        modules: The names that it offers, and the module where each stands.
        further: Names that it defines itself.
    """

    def getattr_(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from lightning_strategies_ext import names

        is_twin = package.startswith(names.TWIN)
        if not is_twin and (other := names.in_use(sys._getframe(1))) is not names.LIGHTNING:
            return getattr(other.load(package), name)
        return getattr(names.LIGHTNING.load(modules[name]), name)

    return getattr_, lambda: sorted((*modules, *further))
