"""Finds every method of this package that overrides a method of Lightning."""

import functools
import importlib
import inspect
import pkgutil
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import lightning.pytorch as pl

import lightning_strategies_ext
from tests.overrides.sources import Release, installed, renamed

_PACKAGE = lightning_strategies_ext.__name__
#: Package of the classes for the installed name of Lightning.
_MIRROR = f"{_PACKAGE}.pytorch_" + "lightning"
_ROOT = _PACKAGE if pl.__name__.startswith("lightning.") else _MIRROR
_METHODS = (property, classmethod, staticmethod, functools.cached_property)


@dataclass
class Found:
    """The overrides in the installed package.

    Attributes:
        overrides: Name of a method of this package → names of the methods of Lightning that it overrides, see
            :func:`targets_in`, each with the names of the methods that would be overridden instead, in the order of the
                classes.
        not_imported: Modules that could not be imported, because an optional package is missing.
        sources: Name of a method of this package → its source.
    """

    overrides: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    not_imported: list[str] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)


@functools.cache
def find() -> Found:
    """Imports all modules of the package, and inspects all of its classes."""
    found = Found()
    classes = [each for module in _modules(found) for each in _classes_of(module)]
    for concrete in classes:
        mro = concrete.__mro__
        for number, own_class in enumerate(mro):
            if not _is_of_package(own_class):
                continue
            for name, value in vars(own_class).items():
                if not _is_method(value):
                    continue
                overridden = [
                    f"{renamed(each.__module__)}:{each.__qualname__}.{name}"
                    for each in mro[number + 1 :]
                    if _is_lightning(each) and _is_method(vars(each).get(name))
                ]
                if overridden:
                    key = f"{_short(own_class)}.{name}"
                    found.sources[key] = _source_of(value)
                    found.overrides.setdefault(key, {}).update(
                        {
                            each: overridden[overridden.index(each) :]
                            for each in targets_in(overridden, found.sources[key])
                        }
                    )
    return found


def targets_in(chain: list[str], own_source: str, release: Release | None = None) -> list[str]:
    """Returns the methods of Lightning that a method of this package replaces.

    These methods are the first method that the release defines, and further methods that ``super()`` calls.

    Args:
        chain: The methods with this name in all classes after the class of this package, in order.
        own_source: Source of this package's method. If it calls ``super()``, only the first method counts.
        release: The release; the installed one if None.
    """
    release = release or installed()
    existing = [(each, source) for each in chain if (source := release.source_of(each)) is not None]
    targets = []
    for overridden, source in existing:
        targets.append(overridden)
        call = f"super().{overridden.rpartition('.')[2]}"
        if call in own_source or call not in source:
            break
    return targets


def _modules(found: Found) -> list[ModuleType]:
    root = importlib.import_module(_ROOT)
    modules = [root]
    for info in pkgutil.walk_packages(root.__path__, f"{_ROOT}.", onerror=lambda name: None):
        if (_ROOT == _PACKAGE and info.name.startswith(_MIRROR)) or info.name.endswith("__main__"):
            continue
        try:
            modules.append(importlib.import_module(info.name))
        except ImportError:
            found.not_imported.append(short_name(info.name))
    return modules


def _classes_of(module: ModuleType) -> list[type]:
    own = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__]
    return [each for each in own if any(map(_is_lightning, each.__mro__))]


def _is_of_package(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == _PACKAGE


def _is_lightning(kind: type) -> bool:
    return renamed(kind.__module__).startswith("lightning.")


def _is_method(value: Any) -> bool:
    return inspect.isfunction(value) or isinstance(value, _METHODS)


def _source_of(value: Any) -> str:
    if isinstance(value, property):
        return "".join(inspect.getsource(each) for each in (value.fget, value.fset) if each is not None)
    return inspect.getsource(getattr(value, "__func__", value))


def _short(kind: type) -> str:
    return f"{short_name(kind.__module__)}.{kind.__qualname__}"


def short_name(module: str) -> str:
    """Returns the name of a module within the package, the same for both names of Lightning."""
    return module.removeprefix(f"{_PACKAGE}.").removeprefix(_MIRROR.removeprefix(f"{_PACKAGE}.") + ".")
