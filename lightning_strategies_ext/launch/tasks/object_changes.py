"""Changes of a stage to the objects that the main process sent: encoded by a worker, applied in the main process.

Objects that the user holds in the main process keep their identity: a list, a tensor, or an object of a user's class is
updated in place, wherever it is referenced, as if the stage had run in the main process. New objects are sent whole. An
object whose class customizes pickling is restored in place by its class. Exception: an object with ``__reduce__`` that
is not part of the Trainer or the LightningModule is replaced by a new object.
"""

import copyreg
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_strategies_ext.launch.protocol import EncodedValue
from lightning_strategies_ext.launch.tasks.module_tree import KINDS
from lightning_strategies_ext.launch.transport.pickling import Pickled, SharedObjects, dump
from lightning_strategies_ext.launch.transport.reducers import (
    get_state,
    is_of_multiprocessing,
    original_class,
    reduce_parametrized,
)

_NOT_OBJECTS = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)


def decode(encoded: EncodedValue, shared: SharedObjects) -> Any:
    """Updates the main process's objects in an encoded value, and returns the value.

    Raises:
        Exception: If a class raises or cannot be imported. No object is updated if unpickling fails.
    """
    states = [states.load(shared) for states in encoded.states]
    value = encoded.value.load(shared)
    for number, state in chain.from_iterable(states):
        _update(shared.object_of(number), *state)
    return value


class ValueEncoder:
    """Encodes values for the main process.

    Args:
        shared: Objects of the main process, including those in its message.
        is_unchanged: Returns whether an object is a tensor or array with the values that the main process has.
    """

    def __init__(self, shared: SharedObjects, is_unchanged: Callable[[Any], bool]) -> None:
        self._shared = shared
        self._is_unchanged = is_unchanged
        self._encoded: set[int] = set()

    def encode(self, value: Any) -> EncodedValue:
        """Encodes a value.

        Raises:
            Exception: If pickle raises; no state counts as sent then.
        """
        encoded: set[int] = set()
        pickled, found = self._dump(value)
        states = []
        while new := {number: obj for number, obj in found.items() if number not in self._encoded | encoded}:
            encoded.update(new)
            changed = [(number, obj) for number, obj in new.items() if not self._is_unchanged(obj)]
            pickled_states, found = self._dump([(number, _state_of(obj)) for number, obj in changed])
            states.append(pickled_states)
        self._encoded |= encoded
        return EncodedValue(pickled, states)

    def _dump(self, value: Any) -> tuple[Pickled, dict[int, Any]]:
        found: dict[int, Any] = {}
        return dump(value, _TrackedObjects(self._shared, found), is_return=True), found


class _TrackedObjects(SharedObjects):
    """Records the updatable objects of the received message that are pickled."""

    def __init__(self, shared: SharedObjects, found: dict[int, Any]) -> None:
        self.never = shared.never
        self._number_of = shared.number_of
        self._found = found

    def number_of(self, obj: Any) -> int | None:
        number = self._number_of(obj)
        if number is not None and number < 0 and _is_updatable(obj):
            self._found[number] = obj
        return number


def identity_preserved(objects: Mapping[int, Any], unpicklable: Iterable[Any] = ()) -> dict[int, Any]:
    """Returns the objects that the main process receives as its own objects, not as copies.

    These are updatable objects, functions, multiprocessing's objects, and objects that cannot be pickled; also classes
    that were defined in a function, which only a worker on Ray can have received.
    """
    unpicklable_ids = {id(obj) for obj in unpicklable}
    return {
        number: obj
        for number, obj in objects.items()
        if id(obj) in unpicklable_ids
        or isinstance(obj, FunctionType)
        or is_of_multiprocessing(obj)
        or (isinstance(obj, type) and "<locals>" in obj.__qualname__)
        or _is_updatable(obj)
    }


def _is_updatable(obj: Any) -> bool:
    kind: Any = type(obj)
    if kind in (Tensor, Parameter, np.ndarray) or isinstance(obj, (list, dict, set, deque)):
        return True
    if isinstance(obj, _NOT_OBJECTS) or kind in copyreg.dispatch_table or is_of_multiprocessing(obj):
        return False
    if not hasattr(obj, "__dict__") and not slots_of(kind):  # a number, a string, a tuple
        return False
    return kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__


def _state_of(obj: Any) -> tuple[Any, Any]:
    """Returns an object's contents, in a new object that is not shared, and its attributes as pickle has them."""
    if isinstance(obj, Tensor):
        return obj.detach(), None
    if isinstance(obj, np.ndarray):
        return obj[...], None
    contents = _contents_of(obj)  # in a tuple, which is immutable, objects may have changed
    if has_custom_pickling(obj):
        state = get_state(obj)
        return contents, OwnState(state, omitted_attributes(obj, state))
    if hasattr(type(obj), "__setstate__"):
        attributes, slots = dict(getattr(obj, "__dict__", {})) or None, in_slots(obj)
        return contents, OwnState((attributes, slots) if slots else attributes, [])
    return contents, all_attributes(obj)


def _contents_of(obj: Any) -> Any:
    """Returns a copy of the elements of a container, or None for other objects."""
    kinds = {list: list, deque: list, dict: dict, set: set, tuple: tuple}
    return next((copy(obj) for kind, copy in kinds.items() if isinstance(obj, kind)), None)


def _update(obj: Any, contents: Any, attributes: Any) -> None:
    if isinstance(obj, Tensor):
        write(obj, contents)
    elif isinstance(obj, np.ndarray):
        obj[...] = contents
    else:
        refill(obj, contents)
    if isinstance(attributes, OwnState):
        attributes.restore(obj)
    elif attributes is not None:
        _clear(obj, attributes.keys())
        put(obj, attributes)


def refill(container: Any, contents: Any) -> bool:
    """Replaces the elements of a list, dictionary, set, or deque. Returns False, without effect, for other objects."""
    if isinstance(container, list):
        container[:] = contents
    elif isinstance(container, (dict, set)):
        container.clear()
        container.update(contents)
    elif isinstance(container, deque):
        container.clear()
        container.extend(contents)
    else:
        return False
    return True


def write(target: Tensor, value: Tensor) -> None:
    """Copies values into the memory of a tensor, or replaces its memory if the shape or dtype has changed."""
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        if target.shape == value.shape and target.dtype == value.dtype:
            target.copy_(value)
        else:
            target.data = value.clone()


# --- attributes of an object, as pickle takes and sets them ---

#: Attributes of a module that are not compared, because :mod:`.module_tree` finds their changes.
TREE_ATTRIBUTES = (*KINDS, "training")
#: Name that stands for the whole state of an object whose class customizes pickling.
WHOLE = ""
# Classes of these libraries may omit attributes from their pickled state, but change none.
_PLAIN_LIBRARIES = ("torch", "lightning", "pytorch_lightning")
# Functions with which pickle creates an empty object; their first argument is its class.
_MAKERS = tuple(getattr(copyreg, name) for name in ("__newobj__", "__newobj_ex__", "_reconstructor"))


def has_custom_pickling(obj: Any) -> bool:
    """Whether an object's class defines ``__getstate__``."""
    # Every object has the method from Python 3.11 on.
    return getattr(original_class(obj), "__getstate__", None) is not getattr(object, "__getstate__", None)


def slots_of(kind: type) -> list[str]:
    """Returns the attribute names of the ``__slots__`` of a class."""
    names: list[str] = copyreg._slotnames(kind)  # type: ignore[attr-defined]  # as pickle does
    return names


def in_slots(obj: Any) -> dict[str, Any]:
    """Returns the attributes of an object that are in slots."""
    return {name: getattr(obj, name) for name in slots_of(type(obj)) if hasattr(obj, name)}


@dataclass
class OwnState:
    """State of an object as its class pickles it.

    Attributes:
        state: State that pickle sets.
        omitted: Names of the attributes that ``state`` lacks or has as None.
        make: Callable with which pickle creates the object, and its arguments; None creates an empty object.
        items: Items of a list.
        pairs: Keys and values of a dictionary.
        set_state: Callable that sets the state in place of ``__setstate__``.
    """

    state: Any
    omitted: list[str]
    make: tuple[Any, tuple[Any, ...]] | None = None
    items: list[Any] | None = None
    pairs: list[tuple[Any, Any]] | None = None
    set_state: Any = None

    @classmethod
    def from_object(cls, obj: Any) -> "OwnState | None":
        """Returns the state of an object; None if pickle stores the object by name.

        Raises:
            Exception: Any exception of the object's class.
        """
        reduced = reduce_parametrized(obj)
        if reduced is NotImplemented:
            reduce = copyreg.dispatch_table.get(type(obj))
            reduced = obj.__reduce_ex__(5) if reduce is None else reduce(obj)
        if isinstance(reduced, str):
            return None
        function, args, state, items, pairs, set_state = (*reduced, None, None, None, None)[:6]
        is_empty = function in _MAKERS and len(args) == 1
        return cls(
            state,
            omitted_attributes(obj, state),
            None if is_empty else (function, args),
            None if items is None else list(items),
            None if pairs is None else list(pairs),
            set_state,
        )

    def restore(self, obj: Any, retained: Iterable[str] = ()) -> None:
        """Restores an object in place to what unpickling would create.

        The object keeps its values of the attributes in ``omitted``, unless its class sets them.

        Args:
            obj: The object.
            retained: Names of further attributes that the object keeps.

        Raises:
            Exception: Any exception of the object's class; the object is unchanged then.
        """
        before = all_attributes(obj)
        elements = _contents_of(obj)
        retained = set(retained)
        try:
            self._make(obj, retained)
            if self.state is not None:
                self._set_state(obj)
            if self.items is not None:
                obj[:] = self.items
            if self.pairs is not None:
                obj.clear()
                obj.update(self.pairs)
        except BaseException:
            _clear(obj, ())
            put(obj, before)
            refill(obj, elements)
            raise
        after = all_attributes(obj)
        retained.update(name for name in self.omitted if after.get(name) is None)
        put(obj, {name: before[name] for name in retained & before.keys()})

    def _make(self, obj: Any, retained: set[str]) -> None:
        function, args = self.make or (None, ())
        if function is None:
            _clear(obj, retained)
        elif function is type(obj):
            _clear(obj, retained)
            obj.__init__(*args)
        else:
            created = function(*args)
            if type(created) is not type(obj):
                raise TypeError(f"unpickling creates a {type(created).__name__} instead of a {type(obj).__name__}")
            if created is not obj:
                _clear(obj, retained)
                put(obj, {name: obj if part is created else part for name, part in all_attributes(created).items()})

    def _set_state(self, obj: Any) -> None:
        state = self.state
        if self.set_state is not None:
            self.set_state(obj, state)
        elif hasattr(type(obj), "__setstate__"):
            obj.__setstate__(state)
        else:
            parts = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
            if parts[0]:
                vars(obj).update(parts[0])
            for name, value in (parts[1] or {}).items():
                setattr(obj, name, value)


def omitted_attributes(obj: Any, state: Any) -> list[str]:
    """Returns the names of the attributes that an object has and its pickled state lacks or has as None."""
    if isinstance(state, tuple) and all(part is None or isinstance(part, dict) for part in state):
        state = dict(chain.from_iterable((part or {}).items() for part in state))
    if not isinstance(state, dict):
        return []
    return [name for name, value in all_attributes(obj).items() if value is not None and state.get(name) is None]


def all_attributes(obj: Any) -> dict[str, Any]:
    """Returns the attributes in an object's dictionary and in its slots."""
    return {**getattr(obj, "__dict__", {}), **in_slots(obj)}


def _clear(obj: Any, retained: Iterable[str]) -> None:
    for name in all_attributes(obj).keys() - retained:
        delete(obj, name)


def delete(obj: Any, name: str) -> None:
    """Deletes an attribute from the object's dictionary or a slot."""
    if name in getattr(obj, "__dict__", {}):
        del vars(obj)[name]
    else:
        object.__delattr__(obj, name)


def put(obj: Any, attributes: dict[str, Any]) -> None:
    """Sets attributes directly, without ``__setattr__`` and properties."""
    slots = slots_of(type(obj))
    for name, value in attributes.items():
        if name in slots:
            object.__setattr__(obj, name, value)
        else:
            vars(obj)[name] = value


def attributes_of(holder: Any) -> dict[str, Any]:
    """Returns an object's attributes, without those that it empties for pickling, and without a module's parts.

    An object whose class customizes pickling has only its :class:`OwnState`, under :data:`WHOLE`.
    """
    with suppress(Exception):  # forked workers may have objects that cannot be pickled
        if _customizes_pickling(holder):
            own = OwnState.from_object(holder)
            return {} if own is None else {WHOLE: own}
    return named_attributes_of(holder)


def named_attributes_of(holder: Any) -> dict[str, Any]:
    """Returns an object's attributes as :func:`attributes_of` does, but always by name."""
    state = all_attributes(holder)
    if isinstance(holder, Module):
        state = {name: value for name, value in state.items() if name not in TREE_ATTRIBUTES}
    if has_custom_pickling(holder):
        own: Any = None
        with suppress(Exception):
            own = get_state(holder)
        if isinstance(own, dict):  # the main process has its own values of emptied attributes
            return {name: value for name, value in own.items() if value is not None or state.get(name) is None}
    return state


def _customizes_pickling(obj: Any) -> bool:
    """Whether pickle does more for an object than read some of its attributes and set them again."""
    kind = original_class(obj)
    if kind in copyreg.dispatch_table or isinstance(obj, (list, dict)):
        return True
    methods = (getattr(kind, name, None) for name in ("__reduce__", "__reduce_ex__", "__setstate__"))
    libraries = {(getattr(method, "__module__", None) or "").partition(".")[0] for method in methods}
    if not libraries <= {"", *_PLAIN_LIBRARIES}:
        return True
    if not has_custom_pickling(obj):
        return False
    state, attributes = get_state(obj), all_attributes(obj)
    if not isinstance(state, dict):
        return True
    return any(value is not None and value is not attributes.get(name) for name, value in state.items())
