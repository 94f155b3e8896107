"""Objects as messages: a small pickle, and beside it the memory of tensors and arrays, which pickle never copies.

Three extras over plain pickle, all for objects that travel to another process and back:

* Tensors on the CPU and NumPy arrays become references to their memory (pickle protocol 5, PEP 574). The receiver
  rebuilds them as views of the memory it was given. Tensors that share memory share it afterwards too.
* Objects that both sides have (:class:`SharedObjects`) travel as a number, so that what comes back refers to the very
  objects that the user holds. Pickle itself numbers what it writes, and the reader numbers alike (its memo): whatever
  came in one message can be named in the answer.
* Classes and functions that the other process cannot import go along (:mod:`.by_value`).

What it does not promise: tensors on other devices keep their device only where the receiver has it too; ask for
``to_cpu`` to have them copied to the CPU.
"""

import copyreg
import gc
import io
import pickle
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, NoReturn, Protocol

import torch
from cloudpickle import CloudPickler
from torch import Tensor

from lightning_strategies_ext.launch.transport import by_value, parametrized, shared_objects
from lightning_strategies_ext.launch.transport.shared_objects import Handle, Memory

#: Of a class that goes along, pickle is told how to make it, its state, how to set that; of NoneType only the first.
_NUM_PARTS_OF_CLASS = 6


class SharedObjects:
    """The objects that two processes both have, in the same order on both sides.

    Args:
        objects: Any objects; the first of equal identity counts.
        never: Types of which an object that is not among ``objects`` must not travel.

    Attributes:
        in_message: See :meth:`with_message`.
    """

    def __init__(self, objects: Sequence[Any], never: tuple[type, ...] = ()) -> None:
        self.objects = list(objects)
        self.never = never
        self.in_message: Mapping[int, Any] = {}

    def number_of(self, obj: Any) -> int | None:
        """The number of an object, or None if it is not shared; below zero for one of :meth:`with_message`."""
        return self._numbers.get(id(obj))

    @cached_property
    def _numbers(self) -> dict[int, int]:  # made where it is asked for: the process that only reads needs none
        numbers = {id(obj): -1 - number for number, obj in self.in_message.items()}
        numbers.update((id(obj), number) for number, obj in reversed(list(enumerate(self.objects))))
        return numbers

    def object_of(self, number: int) -> Any:
        """The object with that number."""
        return self.objects[number] if number >= 0 else self.in_message[-1 - number]

    def with_message(self, in_message: Mapping[int, Any]) -> "SharedObjects":
        """The same, and what a message held, by the numbers that pickle gave it on either side."""
        more = SharedObjects(self.objects, self.never)
        more.in_message = in_message
        return more


@dataclass
class Pickled:
    """A pickled object.

    Attributes:
        data: The pickle.
        buffers: Memory it refers to, in order; read only once it was sent.
        handles: What the receiver on this host gets in place of some buffers, by number: the same shared memory.
    """

    data: bytes
    buffers: list[Any] = field(default_factory=list)
    handles: dict[int, Handle] = field(default_factory=dict)

    def load(self, shared: SharedObjects | None = None, received_objects: dict[int, Any] | None = None) -> Any:
        """Rebuilds the object; its tensors and arrays are views of :attr:`buffers`.

        Args:
            shared: What both sides have.
            received_objects: Gets all that was in it, see :meth:`SharedObjects.with_message`.

        Raises:
            Exception: Whatever the object's class raises, or is missing.
        """
        unpickler = _Unpickler(self, shared)
        loaded = unpickler.load()
        if received_objects is not None:
            received_objects.update(unpickler.memo.copy())
        return loaded


_is_main_elsewhere = False


def use_remote_main() -> None:
    """Called in a process whose ``__main__`` is not the user's: what was defined there comes by value.

    From here on it goes back by its name, so that the main process has its own.
    """
    global _is_main_elsewhere
    _is_main_elsewhere = True


class DumpFunction(Protocol):
    """A function as :func:`dump`."""

    def __call__(
        self,
        obj: Any,
        shared: SharedObjects | None = None,
        is_return: bool = False,
        received_objects: dict[int, Any] | None = None,
    ) -> Pickled:
        """Pickles an object."""


def dump(
    obj: Any,
    shared: SharedObjects | None = None,
    is_return: bool = False,
    received_objects: dict[int, Any] | None = None,
) -> Pickled:
    """Pickles an object.

    Args:
        obj: The object.
        shared: What the receiver has already.
        received_objects: Gets all that is in it, as :meth:`Pickled.load` gives it to the receiver.
        is_return: Whether it goes back to the process that the user sees: tensors go to the CPU and bring no more than
            they show, and a function that no other process could import arrives as one that raises when it is called.

    Raises:
        Exception: Whatever pickle raises for an object that it cannot take: PicklingError, TypeError, AttributeError.
    """
    with suppress(Exception):  # nearly always this is enough, and some results are hundreds of messages
        return dump_with(MessagePickler if shared is None else SharingPickler, obj, shared, is_return, received_objects)
    return dump_with(ByValuePickler, obj, shared, is_return, received_objects)


def dump_with(
    kind: "type[MessagePickler]",
    obj: Any,
    shared: SharedObjects | None = None,
    is_return: bool = False,
    received_objects: dict[int, Any] | None = None,
) -> Pickled:
    """:func:`dump` with a pickler of one's own."""
    stream = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    pickler = kind(stream, buffers, shared, is_return)
    pickler.dump(obj)
    if received_objects is not None:
        with _no_collections():
            received_objects.update(pickler.memo.copy().values())
    handles = pickler.handles and {n: pickler.handles[id(b)] for n, b in enumerate(buffers) if id(b) in pickler.handles}
    return Pickled(stream.getvalue(), buffers, handles)


def walk(obj: Any) -> tuple[dict[int, Any], list[Any]]:
    """All that an object holds, by number, and what of it cannot be pickled; for processes that share it by a fork."""
    pickler = _Walker(io.BytesIO(), [], None, is_return=False)
    with suppress(Exception):  # then it is what was found so far
        pickler.dump(obj)
    return dict(pickler.memo.copy().values()), pickler.unpicklable


@contextmanager
def _no_collections() -> Generator[None, None, None]:
    """Collects no garbage for a while: among a million objects that are only noted, it would look for it ten times."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class StaysError(pickle.PicklingError):
    """An object is of a type that must not travel, see :class:`SharedObjects`."""


class MessagePickler(pickle.Pickler):
    """What :func:`dump` writes with.

    Args:
        stream: Where the pickle goes.
        buffers: Gets the memory that it refers to.
        shared: See :func:`dump`.
        is_return: See :func:`dump`.

    Attributes:
        handles: See :class:`Pickled`, by the id of the buffer; none if it is returning.
    """

    def __init__(
        self, stream: io.BytesIO, buffers: list[pickle.PickleBuffer], shared: SharedObjects | None, is_return: bool
    ) -> None:
        super().__init__(stream, protocol=5, buffer_callback=buffers.append)
        self._shared = shared
        self._returning = is_return
        self.handles: dict[int, Handle] = {}
        self._memories: dict[int, Memory] = {}
        self._copies: list[Tensor] = []  # pickle's memo knows objects by their id: they must live until the end
        self._of_classes: set[types.FunctionType] = set()  # of classes that go along

    def reducer_override(self, obj: Any) -> Any:
        """How an object is written, if not as pickle does."""
        if type(obj) is Tensor:
            return self._reduce_tensor(obj)
        if _is_main_elsewhere and _is_at_top_of_main(obj):
            return _of_main, (obj.__qualname__,)
        if isinstance(obj, types.FunctionType):
            name = getattr(obj, "name_in_worker", None)
            if name is None and self._returning and obj not in self._of_classes and not _is_importable(obj):
                name = obj.__qualname__
            return NotImplemented if name is None else (_unavailable_function, (name,))
        if type(obj) is types.MethodType and _belongs_to_object(obj):
            return _method_from, (obj.__func__, obj.__self__)
        if self._shared is not None and isinstance(obj, self._shared.never):
            raise StaysError(f"{type(obj).__name__} stays in the process that made it")
        return parametrized.reduce_parametrized(obj)

    def _reduce_tensor(self, tensor: Tensor) -> Any:
        if self._returning and tensor.device.type not in ("cpu", "meta"):
            tensor = self._keep(tensor.detach().cpu().requires_grad_(tensor.requires_grad))
        is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_quantized
        if not is_plain or tensor.is_conj() or tensor.is_neg():
            return NotImplemented
        if self._returning and tensor.nbytes * 2 < tensor.untyped_storage().nbytes():
            tensor = self._keep(tensor.detach().clone().requires_grad_(tensor.requires_grad))
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            return _empty_tensor, (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        handles = None if self._returning else self.handles
        memory = self._memories.setdefault(storage.data_ptr(), Memory(storage, handles))
        view = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        return _tensor_from, (memory, tensor.dtype, *view, tensor.requires_grad)

    def _keep(self, tensor: Tensor) -> Tensor:
        self._copies.append(tensor)
        return tensor


class SharingPickler(MessagePickler):
    """The same, where the receiver has some of the objects."""

    # Apart, since this is asked about every single object of the messages that there are most of.
    def persistent_id(self, obj: Any) -> int | None:
        """The number of an object that the receiver has."""
        assert self._shared is not None
        return self._shared.number_of(obj)


_REDUCERS = ChainMap(by_value.REDUCERS, CloudPickler.dispatch_table)


class ByValuePickler(MessagePickler, CloudPickler):  # type: ignore[misc]  # cloudpickle has no types
    """The same, for classes and functions that the reader cannot import.

    Attributes:
        dispatch_table: How objects of some types are written.
        sends_main: Whether what is defined in ``__main__`` goes along.
        sends_descriptors: Whether the receiver runs on the same host and can receive file descriptors.
    """

    dispatch_table = _REDUCERS
    sends_main = False
    sends_descriptors = True

    def persistent_id(self, obj: Any) -> int | None:
        """The number of an object that the receiver has."""
        return None if self._shared is None else self._shared.number_of(obj)

    def reducer_override(self, obj: Any) -> Any:
        """How an object is written, if not as pickle does."""
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented and self.sends_descriptors and not self._returning:
            reduced = shared_objects.reduced(obj, self.handles)
        is_code = isinstance(obj, (type, types.FunctionType))
        if reduced is not NotImplemented or not is_code or (not self.sends_main and _is_found_in_main(obj)):
            return reduced
        reduced = CloudPickler.reducer_override(self, obj)
        if reduced is NotImplemented or not isinstance(obj, type) or len(reduced) < _NUM_PARTS_OF_CLASS:
            return reduced
        if not self._returning:
            return by_value.reduce_class(obj, reduced)
        self._of_classes.update(by_value.functions_of(obj))
        return by_value.reduce_returned_class(obj) or reduced


class MainByValuePickler(ByValuePickler):
    """The same, for a reader that has no ``__main__`` of the user's."""

    sends_main = True


class _Walker(MessagePickler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.unpicklable: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        reduced = NotImplemented if obj is dict else super().reducer_override(obj)
        if obj is dict or reduced is not NotImplemented:
            return reduced
        if isinstance(obj, (type, types.FunctionType, types.BuiltinFunctionType)):
            return dict, ()  # of no interest inside
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


def _is_at_top_of_main(obj: Any) -> bool:
    is_defined = isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__"
    return is_defined and "<" not in obj.__qualname__


def _is_found_in_main(obj: Any) -> bool:
    try:
        return _is_at_top_of_main(obj) and _of_main(obj.__qualname__) is obj
    except AttributeError:
        return False


def _of_main(name: str) -> Any:
    return attrgetter(name)(sys.modules["__main__"])


def _belongs_to_object(method: types.MethodType) -> bool:
    # LightningCLI gives `configure_optimizers` to the module itself. pickle would look the name up again, while the
    # object has no attributes yet, and find the method of the class.
    name = getattr(method.__func__, "__name__", None)
    return name is not None and getattr(method.__self__, "__dict__", {}).get(name) is method


def _method_from(function: Callable[..., Any], obj: Any) -> types.MethodType:
    return types.MethodType(function, obj)  # pickle does not find the type by its name


def _tensor_from(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> Tensor:
    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
    return tensor.requires_grad_(requires_grad)


def _empty_tensor(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=requires_grad)


def _is_importable(function: types.FunctionType) -> bool:
    try:
        pickle.dumps(function)
    except Exception:
        return False
    return True


def _unavailable_function(name: str) -> types.FunctionType:
    # A function and no object of a class of ours: `LambdaLR.state_dict` leaves functions out and keeps other callables.
    def left_behind(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"`{name}` was made in a worker process and could not be sent here, since it is no function of a module."
            " Define it at the top of a module to have it back."
        )

    left_behind.name_in_worker = name  # type: ignore[attr-defined]
    return left_behind  # type: ignore[return-value]
