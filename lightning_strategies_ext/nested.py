"""Nested collections of tensors: access to their parts, and reconstruction with other parts.

A collection is a list, a tuple or named tuple, a mutable mapping, or an instance of a dataclass.

Limitations: The reconstruction calls neither ``__init__`` nor ``__post_init__`` of a dataclass or mapping. A subclass
of list becomes a list. Attributes of a collection other than its parts are shared with the original, or lost.
"""

import copy
import dataclasses
from collections.abc import Callable, Hashable, MutableMapping
from operator import is_
from typing import Any

import numpy as np
import torch

#: Types of mappings; ``dict`` is first because a check for an abstract class takes several times as long.
MAPPINGS = (dict, MutableMapping)


def is_collection(value: Any) -> bool:
    """Returns whether a value is a collection, as ``parts_of``, ``labels_of``, and ``rebuild`` require."""
    if isinstance(value, (list, tuple, *MAPPINGS)):
        return True
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def parts_of(collection: Any) -> list[Any]:
    """Returns the values in a collection, in its order."""
    if isinstance(collection, (list, tuple)):
        return list(collection)
    if isinstance(collection, MAPPINGS):
        return list(collection.values())
    return [getattr(collection, name) for name in names_of_fields(collection)]


def labels_of(collection: Any) -> list[str]:
    """Returns the Python expression that accesses each part, without the collection: ``["image"]``, ``.field``."""
    if isinstance(collection, MAPPINGS):
        return [f'["{key}"]' if isinstance(key, str) else f"[{key!r}]" for key in collection]
    if isinstance(collection, tuple) and hasattr(collection, "_fields"):
        return [f".{name}" for name in collection._fields]
    if isinstance(collection, (list, tuple)):
        return [f"[{i}]" for i in range(len(collection))]
    return [f".{name}" for name in names_of_fields(collection)]


def rebuild(collection: Any, parts: list[Any]) -> Any:
    """Returns a collection of the same type, with the same keys or fields, and with the given parts."""
    if isinstance(collection, list):
        return parts
    if isinstance(collection, tuple):
        return type(collection)(*parts) if hasattr(collection, "_fields") else type(collection)(parts)
    result = copy.copy(collection)  # keeps the attributes of a subclass
    if isinstance(collection, MAPPINGS):
        if not isinstance(collection, dict):
            copy_item_store(result)
        for key, part in zip(collection, parts, strict=True):
            result[key] = part
        return result
    for name, part in zip(names_of_fields(collection), parts, strict=True):
        object.__setattr__(result, name, part)  # also for a frozen dataclass
    return result


def copy_data(value: Any) -> Any:
    """Returns a value with copies of its collections, tensors, and arrays. Tensors keep their autograd history."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    return rebuild(value, list(map(copy_data, parts_of(value)))) if is_collection(value) else value


def replace_tensors(value: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns a value with the result of a function for each tensor; the value itself if the results are the same."""
    if isinstance(value, torch.Tensor):
        return replace(value)
    if not is_collection(value):
        return value
    parts = parts_of(value)
    replaced = [replace_tensors(part, replace) for part in parts]
    return value if all(map(is_, parts, replaced)) else rebuild(value, replaced)


def class_identity(cls: type) -> Hashable:
    """Returns a key that is equal for copies of one class that the same statement has created on ranks or replicas."""
    return cls.__module__, cls.__qualname__, getattr(cls, "_fields", None)


def contains(value: Any, predicate: Callable[[Any], bool]) -> bool:
    """Returns whether a predicate holds for a value, or for a part of it at any depth."""
    return predicate(value) or (is_collection(value) and any(contains(part, predicate) for part in parts_of(value)))


def names_of_fields(instance: Any) -> list[str]:
    """Returns the names of a dataclass's fields that have a value; fields with ``init=False`` may have none."""
    return [field.name for field in dataclasses.fields(instance) if hasattr(instance, field.name)]


def copy_item_store(mapping: Any) -> None:
    """Copies the dicts in which a mapping stores its items; after ``copy.copy`` it shares them with the original."""
    attributes = getattr(mapping, "__dict__", {})
    for name, value in attributes.items():
        if isinstance(value, dict):
            attributes[name] = copy.copy(value)
