"""What a stage has changed of the objects that the main process sent: told by the worker, applied in the main process.

What the user holds in the main process keeps its identity: a list, a tensor, an object of a class of the user's is
updated in place, wherever it hangs, as if the stage had run there. What is new comes as it is. An object of a class
that pickles itself in its own way is restored by that way: in place, except that an object with ``__reduce__`` that is
no part of the Trainer or the LightningModule is replaced by what it has become.
"""

import copyreg
import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from lightning_strategies_ext.launch.tasks.attributes import (
    WHOLE,
    OwnState,
    all_attributes,
    attributes_of,
    delete,
    has_custom_pickling,
    in_slots,
    left_out_of,
    put,
    slots_of,
)
from lightning_strategies_ext.launch.transport.memory_files import ReceivedBuffers
from lightning_strategies_ext.launch.transport.parametrized import get_state
from lightning_strategies_ext.launch.transport.pickling import Pickled, SharedObjects, dump
from lightning_strategies_ext.launch.transport.shared_objects import is_of_multiprocessing

_NOT_OBJECTS = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)


@dataclass
class EncodedValue:
    """A value for the main process, and what its own objects in it have become.

    Attributes:
        value: The value, in which these objects are numbers.
        states: (number, state) of each, where nobody has told it before.
    """

    value: Pickled
    states: list[Pickled]

    def load(self, shared: SharedObjects) -> Any:
        """Updates the objects and returns the value.

        Raises:
            Exception: Whatever a class raises, or is missing; nothing has been updated then.
        """
        states = [states.load(shared) for states in self.states]
        value = self.value.load(shared)
        for number, state in chain.from_iterable(states):
            _update(shared.object_of(number), *state)
        return value


class ValueEncoder:
    """Writes values for the main process.

    Args:
        shared: What it has, with what it sent.
        received: Where the memory of tensors came in; None if nothing was sent.
        places: Where each tensor and array was then, by id.
    """

    def __init__(self, shared: SharedObjects, received: ReceivedBuffers | None, places: Mapping[int, int]) -> None:
        self._shared = shared
        self._received = received
        self._places = places
        self._encoded: set[int] = set()

    def encode(self, value: Any) -> EncodedValue:
        """Writes a value.

        Raises:
            Exception: Whatever pickle raises for an object that it cannot take; nothing counts as told then.
        """
        encoded: set[int] = set()
        pickled, met = self._dump(value)
        states = []
        while new := {number: obj for number, obj in met.items() if number not in self._encoded | encoded}:
            encoded.update(new)
            changed = [(number, obj) for number, obj in new.items() if not self._is_unchanged_memory(obj)]
            pickled_states, met = self._dump([(number, _state_of(obj)) for number, obj in changed])
            states.append(pickled_states)
        self._encoded |= encoded
        return EncodedValue(pickled, states)

    def _is_unchanged_memory(self, obj: Any) -> bool:
        if not isinstance(obj, (Tensor, np.ndarray)) or self._places.get(id(obj)) != data_address(obj):
            return False
        if is_in_shared_memory(obj):
            return True
        if self._received is None:
            return False
        if isinstance(obj, Tensor):
            return self._received.is_unchanged(obj)
        is_plain = obj.flags.c_contiguous and not obj.dtype.hasobject
        return is_plain and self._received.is_unchanged_memory(obj.ctypes.data, obj.nbytes)

    def _dump(self, value: Any) -> tuple[Pickled, dict[int, Any]]:
        met: dict[int, Any] = {}
        return dump(value, _TrackedObjects(self._shared, met), is_return=True), met


class _TrackedObjects(SharedObjects):
    """Notes which of the objects that a message held are met."""

    def __init__(self, shared: SharedObjects, met: dict[int, Any]) -> None:
        self.never = shared.never
        self._number_of = shared.number_of
        self._met = met

    def number_of(self, obj: Any) -> int | None:
        number = self._number_of(obj)
        if number is not None and number < 0 and _is_updatable(obj):
            self._met[number] = obj
        return number


def data_address(obj: Tensor | np.ndarray[Any, Any]) -> int:
    """Where the memory of a tensor or an array is; ``one.data = other.data`` gives a tensor that of another."""
    if isinstance(obj, np.ndarray):
        return obj.ctypes.data
    return obj.data_ptr() if obj.device.type == "cpu" and obj.layout == torch.strided and not is_lazy(obj) else 0


def is_in_shared_memory(obj: Any) -> bool:
    """Whether an object is a tensor in CPU memory that other processes can map. A sent one has the sender's memory."""
    is_plain = isinstance(obj, Tensor) and obj.device.type == "cpu" and obj.layout == torch.strided and not is_lazy(obj)
    return is_plain and obj.is_shared()


def identity_preserved(objects: Mapping[int, Any], unpicklable: Iterable[Any] = ()) -> dict[int, Any]:
    """Those of which the user's own come back: what is updated in place, functions, objects that cannot be pickled.

    And classes that were defined in a function, which only a worker on Ray can have got.
    """
    kept = {id(obj) for obj in unpicklable}
    return {
        number: obj
        for number, obj in objects.items()
        if id(obj) in kept
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
    """What an object holds, in objects of its own that are not shared, and its attributes as pickle has them."""
    if isinstance(obj, Tensor):
        return obj.detach(), None
    if isinstance(obj, np.ndarray):
        return obj[...], None
    contents: Any = None
    if isinstance(obj, (list, deque)):
        contents = list(obj)
    elif isinstance(obj, dict):
        contents = dict(obj)
    elif isinstance(obj, set):
        contents = set(obj)
    elif isinstance(obj, tuple):  # it stays what it is, and what is in it may have changed
        contents = tuple(obj)
    if has_custom_pickling(obj):
        state = get_state(obj)
        return contents, OwnState(state, left_out_of(obj, state))
    attributes, slots = dict(getattr(obj, "__dict__", {})), in_slots(obj)
    return contents, (attributes or None, slots) if slots else attributes


def _update(obj: Any, contents: Any, attributes: Any) -> None:
    if isinstance(obj, Tensor):
        _write(obj, contents)
    elif isinstance(obj, np.ndarray):
        obj[...] = contents
    elif isinstance(obj, list):
        obj[:] = contents
    elif isinstance(obj, (dict, set)):
        obj.clear()
        obj.update(contents)
    elif isinstance(obj, deque):
        obj.clear()
        obj.extend(contents)
    if isinstance(attributes, OwnState):
        attributes.restore(obj)
    elif hasattr(type(obj), "__setstate__") and attributes:
        OwnState(attributes, []).restore(obj)
    elif isinstance(attributes, dict):
        _set_attributes(obj, attributes, {})
    elif isinstance(attributes, tuple):
        _set_attributes(obj, *(part or {} for part in attributes))


def _set_attributes(obj: Any, attributes: dict[str, Any], slots: dict[str, Any]) -> None:
    for name in all_attributes(obj).keys() - {*attributes, *slots}:
        delete(obj, name)
    put(obj, {**attributes, **slots})


def _write(target: Tensor, value: Tensor) -> None:
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        if target.shape == value.shape and target.dtype == value.dtype:
            target.copy_(value)
        else:
            target.data = value.clone()


class Fingerprints:
    """What some objects' attributes were, to find those that have changed.

    Args:
        holders: The objects.
        shared: What the main process has.
        received: Where the memory of their tensors came in; None if nothing was sent.
    """

    def __init__(self, holders: Iterable[Any], shared: SharedObjects, received: ReceivedBuffers | None) -> None:
        self._shared = shared
        self._received = received
        self._before = {id(holder): (holder, dict(self._prints_of(holder))) for holder in holders}

    def changed(self, holder: Any) -> Iterator[str]:
        """The names of the attributes that are new or have changed."""
        before = self._before[id(holder)][1]
        for name, (digest, buffers) in self._prints_of(holder):
            if digest is None or before.get(name) != (digest, buffers) or not all(map(self._is_unchanged, buffers)):
                yield name

    def removed(self, holder: Any) -> Iterator[str]:
        """The names of the attributes that are not there any more."""
        yield from self._before[id(holder)][1].keys() - {WHOLE, *all_attributes(holder)}

    def _prints_of(self, holder: Any) -> Iterator[tuple[str, tuple[Any, list[Any]]]]:
        for name, value in attributes_of(holder).items():
            is_empty = isinstance(value, (dict, set)) and not value
            if is_empty or value is None or isinstance(value, (bool, int, float, str)):  # as most are, of a module
                yield name, ((type(value), None if is_empty else value), [])
                continue
            try:
                pickled = dump(value, self._shared, is_return=True)
            except Exception:  # there is an open file in it, say
                yield name, (None, [])
                continue
            arrays = [np.frombuffer(buffer, dtype=np.uint8) for buffer in pickled.buffers]
            buffers = [(array.ctypes.data, array.nbytes) if self._received else _digest(array) for array in arrays]
            yield name, (_digest(pickled.data), buffers)

    def _is_unchanged(self, buffer: Any) -> bool:
        return self._received is None or self._received.is_unchanged_memory(*buffer)


def _digest(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
