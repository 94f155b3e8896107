"""Reductions of objects that pickle refuses or copies, for messages to another process and back.

* Memory that processes share already, as tensors after ``share_memory_()``, and objects of multiprocessing: their file
  descriptors are sent with the message, so the receiver has the same memory, event, or queue, not a copy.
  multiprocessing itself passes descriptors only to a process that it starts.
* Classes and functions that the other process cannot import, such as lambdas, local classes, and cells of a notebook:
  cloudpickle sends them by value. A class that the main process has sent returns as that class, not as a copy. A class
  that a worker has created returns with all its methods.
* Parametrized modules (:mod:`torch.nn.utils.parametrize`), such as those of ``weight_norm``. Torch creates a class for
  each such module, with a property for each computed tensor, and forbids pickling of the module. All its parts except
  this class can be pickled; the receiver creates the class again.
"""

import copyreg
import io
import os
import pickle
import types
import uuid
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from multiprocessing import context, reduction, sharedctypes
from multiprocessing.connection import Connection
from multiprocessing.heap import Arena
from multiprocessing.queues import Queue, SimpleQueue
from multiprocessing.synchronize import Condition, Event, SemLock
from typing import Any, NoReturn

import torch
from cloudpickle import CloudPickler
from torch.multiprocessing import get_sharing_strategy
from torch.nn import Module
from torch.nn.utils import parametrize

# --- memory and objects that processes share ---

#: What the receiver gets as a descriptor: shared memory of torch, or an open file.
Handle = torch.UntypedStorage | int

_SHARED_KINDS = (SemLock, Condition, Event, Queue, SimpleQueue, sharedctypes.SynchronizedBase, Arena, Connection)
_reduce_ctype = sharedctypes.reduce_ctype  # type: ignore[attr-defined]


class Descriptor:
    """Owns a received file descriptor, which is closed when this object is deleted."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd)

    def detach(self) -> int:
        """Returns a duplicate that the caller owns. The reducers of multiprocessing call this method."""
        return os.dup(self.fd)


def locate(handle: Handle) -> int | tuple[bytes, bytes]:
    """Returns the descriptor of a handle, or its names if torch shares memory by name; valid as long as the handle."""
    if isinstance(handle, int):
        return handle
    # Private methods of torch, which its own reducers for multiprocessing call; checked in 2.5 to 2.13.
    storage: Any = handle
    if get_sharing_strategy() == "file_system":
        manager, name, _ = storage._share_filename_cpu_()
        return manager, name
    fd, _ = storage._share_fd_cpu_()
    return int(fd)


class Memory:
    """A tensor's whole storage, for pickling. One object per storage and message: pickle's memo preserves aliases.

    Args:
        storage: The storage, on the CPU.
        handles: Filled with a shared storage, by the id of its buffer; None if the receiver gets a copy in shared
            memory of its own.
    """

    def __init__(self, storage: torch.UntypedStorage, handles: dict[int, Handle] | None) -> None:
        self._storage = storage
        self._handles = handles

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        as_bytes: Any = torch.empty(0, dtype=torch.uint8).set_(self._storage).numpy()
        buffer = pickle.PickleBuffer(as_bytes)
        is_shared = self._storage.is_shared() and self._storage.filename is None  # `torch.from_file` has a file name
        if is_shared and self._handles is not None:
            self._handles[id(buffer)] = self._storage
        return _rebuild_memory, (buffer, self._storage.nbytes(), is_shared and self._handles is None)


def _rebuild_memory(buffer: Any, num_bytes: int, is_shared_copy: bool) -> Any:
    kind: Any = torch.UntypedStorage
    if isinstance(buffer, Descriptor):
        return kind._new_shared_fd_cpu(buffer.fd, num_bytes)  # duplicates the descriptor
    if isinstance(buffer, tuple):
        return kind._new_shared_filename_cpu(*buffer, num_bytes)
    copy = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    return copy.share_memory_() if is_shared_copy else copy


def is_of_multiprocessing(obj: Any) -> bool:
    """Whether an object belongs to multiprocessing and is shared by the processes that have it."""
    return isinstance(obj, _SHARED_KINDS) or _reducer_of(obj) is _reduce_ctype


def reduce_shared(obj: Any, handles: dict[int, Handle]) -> Any:
    """Returns the pickle reduction of a shared object of multiprocessing; NotImplemented for other objects.

    Adds its descriptors to ``handles``, by the id of the buffer that represents each in the message.

    Raises:
        TypeError: If only a forked process can use the object.
    """
    if not is_of_multiprocessing(obj):
        return NotImplemented
    if getattr(obj, "_is_fork_ctx", False):
        raise TypeError(
            f"only forked processes can use a {type(obj).__name__} of multiprocessing's 'fork' context. Create it, or"
            " the object that holds it, with `multiprocessing.get_context('spawn')`"
        )
    before = context.get_spawning_popen()
    context.set_spawning_popen(_StartedProcess(handles))  # type: ignore[arg-type]
    try:
        reducer = _reducer_of(obj)
        return obj.__reduce_ex__(5) if reducer is None else reducer(obj)
    finally:
        context.set_spawning_popen(before)


def _reducer_of(obj: Any) -> Callable[[Any], Any] | None:
    pickler: Any = reduction.ForkingPickler
    reducer: Callable[[Any], Any] | None = pickler._extra_reducers.get(type(obj))  # CPython 3.10 to 3.14
    return reducer


class _StartedProcess:
    """Substitute for a process that multiprocessing is starting; the reducers of multiprocessing use it."""

    def __init__(self, handles: dict[int, Handle]) -> None:
        self._handles = handles

    def duplicate_for_child(self, fd: int) -> int:
        return fd

    def DupFd(self, fd: int) -> "_SentDescriptor":  # noqa: N802  # multiprocessing's name
        return _SentDescriptor(fd, self._handles)


class _SentDescriptor:
    def __init__(self, fd: int, handles: dict[int, Handle]) -> None:
        self._fd = fd
        self._handles = handles

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        buffer = pickle.PickleBuffer(bytearray(1))
        self._handles[id(buffer)] = self._fd
        return _rebuild_descriptor, (buffer,)


def _rebuild_descriptor(descriptor: Descriptor) -> Descriptor:
    return descriptor


class RaisedException:
    """Pickles as the given exception, even if its ``__init__`` has other arguments than it passes to ``Exception``."""

    def __init__(self, exception: BaseException) -> None:
        self._exception = exception

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_exception, self._exception.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _rebuild_exception(make: Any, arguments: tuple[Any, ...], state: Any = None) -> Any:
    try:
        exception = make(*arguments)
    except TypeError:
        exception = make.__new__(make, *arguments)
    if state is not None:
        exception.__setstate__(state)
    return exception


# --- classes and functions by value ---

#: Classes that this process has sent, by key.
_sent: "weakref.WeakValueDictionary[str, type]" = weakref.WeakValueDictionary()
_keys: "weakref.WeakKeyDictionary[type, str]" = weakref.WeakKeyDictionary()
#: Keys of the classes that this process has received from the main process.
_received: "weakref.WeakKeyDictionary[type, str]" = weakref.WeakKeyDictionary()


def reduce_class(cls: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns cloudpickle's reduction of a class that the main process sends, with a key by which it returns."""
    make, arguments, state, *items, set_state = reduced
    key = _keys.setdefault(cls, uuid.uuid4().hex)
    _sent[key] = cls
    return make, arguments, (set_state, state, key), *items, _restore_class


def reduce_returned_class(cls: type) -> tuple[Any, ...] | None:
    """Returns the reduction of a class that a worker returns; None if the main process has not sent it."""
    key = _received.get(cls)
    return None if key is None else (_find_sent_class, (key, cls.__qualname__))


def functions_of(cls: type) -> Iterator[types.FunctionType]:
    """Yields the functions of a class, and those in their closures, such as the ones that decorators wrap."""
    pending = list(vars(cls).values())
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            yield value
            pending += [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        elif isinstance(value, (staticmethod, classmethod)):
            pending.append(value.__func__)
        elif isinstance(value, property):
            pending += [value.fget, value.fset, value.fdel]
        elif isinstance(value, (cached_property, partial)):
            pending.append(value.func)


def _restore_class(cls: type, state: tuple[Callable[[type, Any], None], Any, str]) -> None:
    set_state, class_state, key = state
    set_state(cls, class_state)
    _received[cls] = key


def _find_sent_class(key: str, name: str) -> type:
    try:
        return _sent[key]
    except KeyError:
        raise LookupError(
            f"An object of the class `{name}` cannot be returned from a worker: the main process has deleted the class."
            " Keep a reference to it until all results have been received."
        ) from None


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    make, arguments = CloudPickler.dispatch_table[types.CodeType](code)  # it may drop the file name
    return _restore_code, (make, arguments, code.co_filename)


def _restore_code(make: Callable[..., types.CodeType], arguments: Any, filename: str) -> types.CodeType:
    return make(*arguments).replace(co_filename=filename)


def _reject(obj: Any) -> NoReturn:
    raise TypeError(f"cannot pickle {type(obj).__name__!r} object")


# Reducers that replace cloudpickle's, by type: code keeps its file name, and the other types are reduced as by pickle.
_BY_VALUE_REDUCERS: dict[Any, Callable[[Any], Any]] = {
    types.CodeType: _reduce_code,
    types.MethodType: types.MethodType.__reduce__,
    io.TextIOWrapper: _reject,  # cloudpickle would send the contents of the file, as a file in memory
    memoryview: _reject,
}


def by_value_table(pickler: Any) -> Any:
    """Returns the dispatch table of a pickler that extends ``pickler``, the CloudPickler of cloudpickle or of Ray."""
    return ChainMap(_BY_VALUE_REDUCERS, pickler.dispatch_table)


# --- parametrized modules ---


def reduce_parametrized(obj: Any) -> Any:
    """Returns the pickle reduction of a parametrized module or its class; NotImplemented for other objects."""
    if isinstance(obj, type) and _is_created_by_torch(obj):
        return _create_class, (obj.__bases__[0], names_of_computed(obj))
    if isinstance(obj, Module) and _is_created_by_torch(type(obj)):
        return copyreg.__newobj__, (type(obj),), get_state(obj)  # type: ignore[attr-defined]  # as pickle does
    return NotImplemented


def original_class(obj: Any) -> type:
    """Returns the class of an object; for a parametrized module, the class before the parametrization."""
    kind = type(obj)
    return kind.__bases__[0] if _is_created_by_torch(kind) else kind


def names_of_computed(kind: type) -> list[str]:
    """Returns the names of the tensors that a class computes, if torch has created it for a parametrized module."""
    if not _is_created_by_torch(kind):
        return []
    return [name for name, value in vars(kind).items() if isinstance(value, property)]


def get_state(obj: Any) -> Any:
    """Returns an object's state by the ``__getstate__`` of its original class; that of a parametrized class raises."""
    getstate = getattr(original_class(obj), "__getstate__", None)  # since Python 3.11, every object has this method
    return dict(vars(obj)) if getstate is None else getstate(obj)


def _is_created_by_torch(kind: type) -> bool:
    getstate = vars(kind).get("__getstate__")
    return getattr(getstate, "__module__", None) == parametrize.__name__


def _create_class(kind: type[Module], names: Sequence[str]) -> type:
    # Private functions of torch, checked in 2.5 to 2.13: the public ones compute the tensors again, to different bits.
    module = kind.__new__(kind)
    Module.__init__(module)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return type(module)
