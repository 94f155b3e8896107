"""Collections that hold tensors: what counts as one, its parts, and a collection of the same type with other parts.

A collection is a list, a tuple (also a named one), a mapping that can be written to, or an instance of a dataclass.

What it does not promise: that a dataclass's or mapping's ``__init__`` or ``__post_init__`` runs when one is rebuilt,
that a subclass of list stays one (it becomes a list), or that what a collection knows besides its parts is copied.
"""

import copy
import dataclasses
from collections.abc import Callable, Hashable, MutableMapping
from typing import Any

#: ``dict`` stands first since asking an abstract class takes several times as long.
MAPPINGS = (dict, MutableMapping)


def is_collection(value: Any) -> bool:
    """Whether ``parts_of``, ``labels_of`` and ``rebuilt`` can be asked about the value."""
    if isinstance(value, (list, tuple, *MAPPINGS)):
        return True
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def parts_of(collection: Any) -> list[Any]:
    """Returns the values that a collection holds, in its order."""
    if isinstance(collection, (list, tuple)):
        return list(collection)
    if isinstance(collection, MAPPINGS):
        return list(collection.values())
    return [getattr(collection, name) for name in names_of_fields(collection)]


def labels_of(collection: Any) -> list[str]:
    """Returns for each part what a user writes after the collection to get it: ``["image"]``, ``[0]``, ``.field``."""
    if isinstance(collection, MAPPINGS):
        return [f'["{key}"]' if isinstance(key, str) else f"[{key!r}]" for key in collection]
    if isinstance(collection, tuple) and hasattr(collection, "_fields"):
        return [f".{name}" for name in collection._fields]
    if isinstance(collection, (list, tuple)):
        return [f"[{i}]" for i in range(len(collection))]
    return [f".{name}" for name in names_of_fields(collection)]


def rebuilt(collection: Any, parts: list[Any]) -> Any:
    """Returns a collection of the same type, with the same keys or fields, that holds ``parts``."""
    if isinstance(collection, list):
        return parts
    if isinstance(collection, tuple):
        return type(collection)(*parts) if hasattr(collection, "_fields") else type(collection)(parts)
    result = copy.copy(collection)  # keeps what a subclass knows besides its items
    if isinstance(collection, MAPPINGS):
        if not isinstance(collection, dict):
            give_own_store(result)
        for key, part in zip(collection, parts, strict=True):
            result[key] = part
        return result
    for name, part in zip(names_of_fields(collection), parts, strict=True):
        object.__setattr__(result, name, part)  # also where the dataclass is frozen
    return result


def identity_of(cls: type) -> Hashable:
    """What classes have in common that are one, or that one statement has made: in each rank or replica another one."""
    return cls.__module__, cls.__qualname__, getattr(cls, "_fields", None)


def contains(value: Any, what: Callable[[Any], bool]) -> bool:
    """Whether the value, or something in it at any depth, is ``what`` asks for."""
    return what(value) or (is_collection(value) and any(contains(part, what) for part in parts_of(value)))


def names_of_fields(instance: Any) -> list[str]:
    """The names of a dataclass's fields that have a value: one with ``init=False`` may have none yet."""
    return [field.name for field in dataclasses.fields(instance) if hasattr(instance, field.name)]


def give_own_store(mapping: Any) -> None:
    """Copies the dicts in which a mapping keeps its items, which ``copy.copy`` leaves shared with the original."""
    attributes = getattr(mapping, "__dict__", {})
    for name, value in attributes.items():
        if isinstance(value, dict):
            attributes[name] = copy.copy(value)
