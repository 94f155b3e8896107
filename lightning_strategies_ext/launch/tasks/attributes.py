"""Attributes of objects, collected to be sent to another process and set there as pickle sets them, but in place."""

import copyreg
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch.nn import Module

from lightning_strategies_ext.launch.transport import parametrized
from lightning_strategies_ext.launch.transport.parametrized import get_state, original_class

_TREE_ATTRIBUTES = ("_parameters", "_buffers", "_modules", "training")
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
        left_out: Names of the attributes that ``state`` lacks or has as None.
        make: Callable with which pickle creates the object, and its arguments; None creates an empty object.
        items: Items of a list.
        pairs: Keys and values of a dictionary.
        set_state: Callable that sets the state in place of ``__setstate__``.
    """

    state: Any
    left_out: list[str]
    make: tuple[Any, tuple[Any, ...]] | None = None
    items: list[Any] | None = None
    pairs: list[tuple[Any, Any]] | None = None
    set_state: Any = None

    @classmethod
    def of(cls, obj: Any) -> "OwnState | None":
        """Returns the state of an object; None if pickle stores the object by name.

        Raises:
            Exception: Any exception of the object's class.
        """
        reduced = parametrized.reduce_parametrized(obj)
        if reduced is NotImplemented:
            reduce = copyreg.dispatch_table.get(type(obj))
            reduced = obj.__reduce_ex__(5) if reduce is None else reduce(obj)
        if isinstance(reduced, str):
            return None
        function, args, state, items, pairs, set_state = (*reduced, None, None, None, None)[:6]
        is_empty = function in _MAKERS and len(args) == 1
        return cls(
            state,
            left_out_of(obj, state),
            None if is_empty else (function, args),
            None if items is None else list(items),
            None if pairs is None else list(pairs),
            set_state,
        )

    def restore(self, obj: Any, kept: Iterable[str] = ()) -> None:
        """Restores an object in place to what unpickling would create.

        The object keeps its values of the attributes in ``left_out``, unless its class sets them.

        Args:
            obj: The object.
            kept: Names of further attributes that the object keeps.

        Raises:
            Exception: Any exception of the object's class; the object is unchanged then.
        """
        before = all_attributes(obj)
        elements = obj.copy() if isinstance(obj, (list, dict)) else None
        kept = set(kept)
        try:
            self._make(obj, kept)
            if self.state is not None:
                self._set_state(obj)
            if self.items is not None:
                obj[:] = self.items
            if self.pairs is not None:
                obj.clear()
                obj.update(self.pairs)
        except BaseException:
            _clear(obj, set())
            put(obj, before)
            if isinstance(obj, list):
                obj[:] = elements or ()
            elif isinstance(obj, dict):
                obj.clear()
                obj.update(elements or {})
            raise
        after = all_attributes(obj)
        kept.update(name for name in self.left_out if after.get(name) is None)
        put(obj, {name: before[name] for name in kept & before.keys()})

    def _make(self, obj: Any, kept: set[str]) -> None:
        function, args = self.make or (None, ())
        if function is None:
            _clear(obj, kept)
        elif function is type(obj):
            _clear(obj, kept)
            obj.__init__(*args)
        else:
            made = function(*args)
            if type(made) is not type(obj):
                raise TypeError(f"unpickling creates a {type(made).__name__} instead of a {type(obj).__name__}")
            if made is not obj:
                _clear(obj, kept)
                put(obj, {name: obj if part is made else part for name, part in all_attributes(made).items()})

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


def left_out_of(obj: Any, state: Any) -> list[str]:
    """Returns the names of the attributes that an object has and its pickled state lacks or has as None."""
    if isinstance(state, tuple) and all(part is None or isinstance(part, dict) for part in state):
        state = dict(chain.from_iterable((part or {}).items() for part in state))
    if not isinstance(state, dict):
        return []
    return [name for name, value in all_attributes(obj).items() if value is not None and state.get(name) is None]


def all_attributes(obj: Any) -> dict[str, Any]:
    """Returns the attributes in an object's dictionary and in its slots."""
    return {**getattr(obj, "__dict__", {}), **in_slots(obj)}


def _clear(obj: Any, kept: set[str]) -> None:
    for name in all_attributes(obj).keys() - kept:
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
            own = OwnState.of(holder)
            return {} if own is None else {WHOLE: own}
    return named_attributes_of(holder)


def named_attributes_of(holder: Any) -> dict[str, Any]:
    """Returns an object's attributes as :func:`attributes_of` does, but always by name."""
    state = all_attributes(holder)
    if isinstance(holder, Module):
        state = {name: value for name, value in state.items() if name not in _TREE_ATTRIBUTES}
    if has_custom_pickling(holder):
        own: Any = None
        with suppress(Exception):
            own = get_state(holder)
        if isinstance(own, dict):  # the main process has its own values of emptied attributes
            return {name: value for name, value in own.items() if value is not None or state.get(name) is None}
    return state


def set_attribute(holder: Any, name: str, value: Any) -> None:
    """Sets an attribute that :func:`attributes_of` returned.

    Raises:
        Exception: Any exception of a class that customizes pickling; the object is unchanged then.
    """
    if name == WHOLE:
        value.restore(holder, _TREE_ATTRIBUTES if isinstance(holder, Module) else ())
    else:
        put(holder, {name: value})


def delete_attribute(holder: Any, name: str) -> None:
    """Deletes an attribute if the object has it."""
    if name in all_attributes(holder):
        delete(holder, name)


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
