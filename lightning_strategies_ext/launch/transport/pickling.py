"""Pickling of messages: a small pickle, and references to the memory of tensors and arrays, which pickle never copies.

Three additions to pickle, for objects that are sent to another process and return:

* Tensors on the CPU and NumPy arrays become references to their memory (pickle protocol 5, PEP 574). The receiver
  rebuilds them as views of the memory that it has received. Tensors that share memory share it there too.
* Objects that both processes have (:class:`SharedObjects`) are sent as a number, so that results refer to the objects
  that the user holds. pickle numbers the objects that it writes, and its reader assigns the same numbers (its
  memo). A reply can therefore refer to any object of the message.
* Objects that pickle refuses or copies are reduced by :mod:`.reducers`.

Limitations: a tensor on another device keeps its device only if the receiver has that device, too. Tensors of results
(``is_return``) are copied to the CPU.
"""

import copyreg
import gc
import io
import pickle
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, NoReturn

import torch
from cloudpickle import CloudPickler
from torch import Tensor
from typing_extensions import override

from lightning_strategies_ext.launch.transport import reducers
from lightning_strategies_ext.launch.transport.reducers import Handle, Memory

#: Number of items in the reduction of a class by value, the last of which sets its state; NoneType's has no state.
_NUM_CLASS_REDUCTION_ITEMS = 6


@dataclass(eq=False)
class SharedObjects:
    """Objects that two processes both have, in the same order.

    Attributes:
        objects: The objects. If an object occurs twice, its first number counts.
        never: Types whose objects must not be sent, except those in ``objects``.
        in_message: Objects of a message, by the numbers that pickle gives them in both processes.
    """

    objects: Sequence[Any]
    never: tuple[type, ...] = ()
    in_message: Mapping[int, Any] = field(default_factory=dict)

    def number_of(self, obj: Any) -> int | None:
        """Returns the number of an object, negative for one of :attr:`in_message`, or None if it is not shared."""
        return self._numbers.get(id(obj))

    @cached_property
    def _numbers(self) -> dict[int, int]:  # computed at first use; a process that only reads does not need it
        numbers = {id(obj): -1 - number for number, obj in self.in_message.items()}
        numbers.update((id(obj), number) for number, obj in reversed(list(enumerate(self.objects))))
        return numbers

    def object_of(self, number: int) -> Any:
        """Returns the object with the given number."""
        return self.objects[number] if number >= 0 else self.in_message[-1 - number]


@dataclass
class Pickled:
    """A pickled object.

    Attributes:
        data: The pickle.
        buffers: Memory to which the pickle refers, in order; its contents are read when the message is sent.
        handles: Shared memory that a receiver on this host gets in place of some buffers, by their numbers, in order.
    """

    data: bytes
    buffers: list[Any] = field(default_factory=list)
    handles: dict[int, Handle] = field(default_factory=dict)

    def load(self, shared: SharedObjects | None = None, received_objects: dict[int, Any] | None = None) -> Any:
        """Rebuilds the object; its tensors and arrays are views of :attr:`buffers`.

        Args:
            shared: Objects that both processes have.
            received_objects: Filled with all objects of the message, see :attr:`SharedObjects.in_message`.

        Raises:
            Exception: If the object's class raises, or is missing.
        """
        unpickler = _Unpickler(self, shared)
        loaded = unpickler.load()
        if received_objects is not None:
            received_objects.update(unpickler.memo.copy())
        return loaded


_has_remote_main = False


def use_remote_main() -> None:
    """Makes :func:`dump` send definitions of the user's ``__main__`` by name, so that the main process finds its own.

    Called in a process whose ``__main__`` is not the user's, and which receives these definitions by value.
    """
    global _has_remote_main
    _has_remote_main = True


def dump(
    obj: Any,
    shared: SharedObjects | None = None,
    *,
    is_return: bool = False,
    received_objects: dict[int, Any] | None = None,
    pickler: "type[MessagePickler] | None" = None,
) -> Pickled:
    """Pickles an object.

    Args:
        obj: The object.
        shared: Objects that the receiver has already.
        is_return: Whether the object returns to the main process. Tensors are then moved to the CPU, without the unused
            part of their storages. A function that no other process can import arrives as one that raises when called.
        received_objects: Filled with all objects of the message, as by :meth:`Pickled.load` in the receiver.
        pickler: Class of the pickler, for a receiver without the user's ``__main__``.

    Raises:
        Exception: If pickle cannot pickle the object: PicklingError, TypeError, or AttributeError.
    """
    if pickler is None:
        kind = MessagePickler if shared is None else SharingPickler
        with suppress(Exception):  # the fast method, which almost always succeeds
            return kind(shared, is_return).pickled(obj, received_objects)
    return (pickler or ByValuePickler)(shared, is_return).pickled(obj, received_objects)


def walk(obj: Any) -> tuple[dict[int, Any], list[Any]]:
    """Returns the objects in an object that forked processes share, by number, and those that cannot be pickled."""
    pickler = _Walker(None, is_return=False)
    with suppress(Exception):  # the objects that were found before are returned
        pickler.dump(obj)
    return dict(pickler.memo.copy().values()), pickler.unpicklable


class MessagePickler(pickle.Pickler):
    """Pickler of :func:`dump` for messages without shared objects, and base class of its other picklers."""

    def __init__(self, shared: SharedObjects | None, is_return: bool) -> None:
        self._stream = io.BytesIO()
        self._buffers: list[pickle.PickleBuffer] = []
        super().__init__(self._stream, protocol=5, buffer_callback=self._buffers.append)
        self._shared = shared
        self._is_return = is_return
        self._handles: dict[int, Handle] = {}  # handles by the id of their buffer
        self._memories: dict[int, Memory] = {}
        self._copies: list[Tensor] = []  # must live until the end: pickle's memo identifies objects by id
        self._class_functions: set[types.FunctionType] = set()  # functions of classes that are sent by value

    def pickled(self, obj: Any, received_objects: dict[int, Any] | None) -> Pickled:
        """Pickles an object, see :func:`dump`. Called once."""
        self.dump(obj)
        if received_objects is not None:
            was_enabled = gc.isenabled()
            gc.disable()  # it would collect ten times while a million objects are recorded
            try:
                received_objects.update(self.memo.copy().values())
            finally:
                if was_enabled:
                    gc.enable()
        found = self._handles
        handles = found and {number: found[id(b)] for number, b in enumerate(self._buffers) if id(b) in found}
        return Pickled(self._stream.getvalue(), self._buffers, handles)

    @override
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor:
            return self._reduce_tensor(obj)
        if _has_remote_main and _is_top_level_of_main(obj):
            return _load_from_main, (obj.__qualname__,)
        if isinstance(obj, types.FunctionType):
            name = getattr(obj, "name_in_worker", None)
            if name is None and self._is_return and obj not in self._class_functions and not _is_importable(obj):
                name = obj.__qualname__
            return NotImplemented if name is None else (_unavailable_function, (name,))
        if type(obj) is types.MethodType and _is_instance_attribute(obj):
            return _create_method, (obj.__func__, obj.__self__)
        if self._shared is not None and isinstance(obj, self._shared.never):
            raise pickle.PicklingError(f"{type(obj).__name__} stays in the process that created it")
        return reducers.reduce_parametrized(obj)

    def _reduce_tensor(self, tensor: Tensor) -> Any:
        if self._is_return and tensor.device.type not in ("cpu", "meta"):
            tensor = self._retain(tensor.detach().cpu().requires_grad_(tensor.requires_grad))
        is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_quantized
        if not is_plain or tensor.is_conj() or tensor.is_neg():
            return NotImplemented
        if self._is_return and tensor.nbytes * 2 < tensor.untyped_storage().nbytes():
            tensor = self._retain(tensor.detach().clone().requires_grad_(tensor.requires_grad))
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            return _rebuild_empty_tensor, (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        handles = None if self._is_return else self._handles
        memory = self._memories.setdefault(storage.data_ptr(), Memory(storage, handles))
        view = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        return _rebuild_tensor, (memory, tensor.dtype, view, tensor.requires_grad)

    def _retain(self, tensor: Tensor) -> Tensor:
        self._copies.append(tensor)
        return tensor


class SharingPickler(MessagePickler):
    """Pickler of messages with shared objects."""

    # In a class of its own, because pickle calls it for each object, and most messages have no shared objects.
    @override
    def persistent_id(self, obj: Any) -> int | None:
        return None if self._shared is None else self._shared.number_of(obj)


class ByValuePickler(SharingPickler, CloudPickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickler of messages with classes and functions that the receiver cannot import.

    Attributes:
        dispatch_table: Reducers by type.
        sends_main: Whether definitions of ``__main__`` are sent by value.
        sends_descriptors: Whether the receiver runs on the same host and can receive file descriptors.
    """

    dispatch_table = reducers.by_value_table(CloudPickler)
    sends_main = False
    sends_descriptors = True

    @override
    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented and self.sends_descriptors and not self._is_return:
            reduced = reducers.reduce_shared(obj, self._handles)
        is_code = isinstance(obj, (type, types.FunctionType))
        if reduced is not NotImplemented or not is_code or (not self.sends_main and _is_found_in_main(obj)):
            return reduced
        reduced = CloudPickler.reducer_override(self, obj)
        if reduced is NotImplemented or not isinstance(obj, type) or len(reduced) < _NUM_CLASS_REDUCTION_ITEMS:
            return reduced
        if not self._is_return:
            return reducers.reduce_class(obj, reduced)
        self._class_functions.update(reducers.functions_of(obj))
        return reducers.reduce_returned_class(obj) or reduced


class MainByValuePickler(ByValuePickler):
    """By-value pickler for a receiver without the user's ``__main__``."""

    sends_main = True


class _Walker(MessagePickler):
    def __init__(self, shared: SharedObjects | None, is_return: bool) -> None:
        super().__init__(shared, is_return)
        self.unpicklable: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        reduced = NotImplemented if obj is dict else super().reducer_override(obj)
        if obj is dict or reduced is not NotImplemented:
            return reduced
        if isinstance(obj, (type, types.FunctionType, types.BuiltinFunctionType)):
            return dict, ()  # its contents are irrelevant
        reduce = copyreg.dispatch_table.get(type(obj))
        try:
            reduced = obj.__reduce_ex__(5) if reduce is None else reduce(obj)
        except Exception:
            self.unpicklable.append(obj)
            return dict, ()
        return NotImplemented if isinstance(reduced, str) else reduced


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: Pickled, shared: SharedObjects | None) -> None:
        super().__init__(io.BytesIO(pickled.data), buffers=pickled.buffers)
        self._shared = shared

    def persistent_load(self, number: int) -> Any:
        assert self._shared is not None
        return self._shared.object_of(number)


def _is_top_level_of_main(obj: Any) -> bool:
    is_defined = isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__"
    return is_defined and "<" not in obj.__qualname__


def _is_found_in_main(obj: Any) -> bool:
    try:
        return _is_top_level_of_main(obj) and _load_from_main(obj.__qualname__) is obj
    except AttributeError:
        return False


def _load_from_main(name: str) -> Any:
    return attrgetter(name)(sys.modules["__main__"])


def _is_instance_attribute(method: types.MethodType) -> bool:
    # LightningCLI sets `configure_optimizers` on the module itself. pickle would look up the name before the rebuilt
    # object has attributes, and find the method of the class.
    name = getattr(method.__func__, "__name__", None)
    return name is not None and getattr(method.__self__, "__dict__", {}).get(name) is method


def _create_method(function: Callable[..., Any], obj: Any) -> types.MethodType:
    return types.MethodType(function, obj)  # pickle cannot find the type by its name


def _rebuild_tensor(storage: Any, dtype: torch.dtype, view: tuple[Any, Any, Any], requires_grad: bool) -> Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, *view).requires_grad_(requires_grad)


def _rebuild_empty_tensor(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=requires_grad)


def _is_importable(function: types.FunctionType) -> bool:
    try:
        pickle.dumps(function)
    except Exception:
        return False
    return True


def _unavailable_function(name: str) -> types.FunctionType:
    # A function, not another callable object: `LambdaLR.state_dict` omits functions and saves other callables.
    def unavailable(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"`{name}` was created in a worker process and could not be returned, because it is not defined at the top"
            " level of a module. Move its definition there."
        )

    unavailable.name_in_worker = name  # type: ignore[attr-defined]
    return unavailable  # type: ignore[return-value]
