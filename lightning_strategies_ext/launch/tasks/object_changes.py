"""Changes of a stage to the objects that the main process sent: encoded by a worker, applied in the main process.

Objects that the user holds in the main process keep their identity: a list, a tensor, or an object of a user's class is
updated in place, wherever it is referenced, as if the stage had run in the main process. New objects are sent whole. An
object whose class customizes pickling is restored in place by its class. Exception: an object with ``__reduce__`` that
is no part of the Trainer or the LightningModule is replaced by a new object.
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
    """A value for the main process, and the new states of the main process's own objects in it.

    Attributes:
        value: The value, in which these objects are numbers.
        states: (number, state) of each of these objects, unless an earlier value has it.
    """

    value: Pickled
    states: list[Pickled]

    def load(self, shared: SharedObjects) -> Any:
        """Updates the objects and returns the value.

        Raises:
            Exception: If a class raises or cannot be imported. No object is updated if unpickling fails.
        """
        states = [states.load(shared) for states in self.states]
        value = self.value.load(shared)
        for number, state in chain.from_iterable(states):
            _update(shared.object_of(number), *state)
        return value


class ValueEncoder:
    """Encodes values for the main process.

    Args:
        shared: Objects of the main process, including those in its message.
        received: Memory files of the received message; None if it had none.
        places: Data address of each tensor and array before the stage, by id.
    """

    def __init__(self, shared: SharedObjects, received: ReceivedBuffers | None, places: Mapping[int, int]) -> None:
        self._shared = shared
        self._received = received
        self._places = places
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
            changed = [(number, obj) for number, obj in new.items() if not self._is_unchanged_memory(obj)]
            pickled_states, found = self._dump([(number, _state_of(obj)) for number, obj in changed])
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


def data_address(obj: Tensor | np.ndarray[Any, Any]) -> int:
    """Returns the address of an array's or strided CPU tensor's data, which ``tensor.data = ...`` changes; else 0."""
    if isinstance(obj, np.ndarray):
        return obj.ctypes.data
    return obj.data_ptr() if obj.device.type == "cpu" and obj.layout == torch.strided and not is_lazy(obj) else 0


def is_in_shared_memory(obj: Any) -> bool:
    """Whether an object is a CPU tensor in memory that other processes can map. A sent one has the sender's memory."""
    is_plain = isinstance(obj, Tensor) and obj.device.type == "cpu" and obj.layout == torch.strided and not is_lazy(obj)
    return is_plain and obj.is_shared()


def identity_preserved(objects: Mapping[int, Any], unpicklable: Iterable[Any] = ()) -> dict[int, Any]:
    """Returns the objects in whose place the main process receives its own.

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
    contents: Any = None
    if isinstance(obj, (list, deque)):
        contents = list(obj)
    elif isinstance(obj, dict):
        contents = dict(obj)
    elif isinstance(obj, set):
        contents = set(obj)
    elif isinstance(obj, tuple):  # a tuple is immutable, but objects in it may have changed
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
    """Fingerprints of objects' attributes, to find those that change.

    Args:
        holders: The objects.
        shared: Objects of the main process.
        received: Memory files of the received message; None if it had none.
    """

    def __init__(self, holders: Iterable[Any], shared: SharedObjects, received: ReceivedBuffers | None) -> None:
        self._shared = shared
        self._received = received
        self._before = {id(holder): (holder, dict(self._prints_of(holder))) for holder in holders}

    def changed(self, holder: Any) -> Iterator[str]:
        """Yields the names of the attributes that are new or have changed."""
        before = self._before[id(holder)][1]
        for name, (digest, buffers) in self._prints_of(holder):
            if digest is None or before.get(name) != (digest, buffers) or not all(map(self._is_unchanged, buffers)):
                yield name

    def removed(self, holder: Any) -> Iterator[str]:
        """Yields the names of the attributes that were removed."""
        yield from self._before[id(holder)][1].keys() - {WHOLE, *all_attributes(holder)}

    def _prints_of(self, holder: Any) -> Iterator[tuple[str, tuple[Any, list[Any]]]]:
        for name, value in attributes_of(holder).items():
            is_empty = isinstance(value, (dict, set)) and not value
            if is_empty or value is None or isinstance(value, (bool, int, float, str)):  # most attributes of a module
                yield name, ((type(value), None if is_empty else value), [])
                continue
            try:
                pickled = dump(value, self._shared, is_return=True)
            except Exception:  # for example, it holds an open file
                yield name, (None, [])
                continue
            arrays = [np.frombuffer(buffer, dtype=np.uint8) for buffer in pickled.buffers]
            buffers = [(array.ctypes.data, array.nbytes) if self._received else _digest(array) for array in arrays]
            yield name, (_digest(pickled.data), buffers)

    def _is_unchanged(self, buffer: Any) -> bool:
        return self._received is None or self._received.is_unchanged_memory(*buffer)


def _digest(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
