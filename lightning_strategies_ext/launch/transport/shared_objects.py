"""Messages with memory and objects that processes share: tensors after ``share_memory_()``, multiprocessing's objects.

Their file descriptors travel with the message, so the receiver gets the same memory, event or queue, and no copy.
multiprocessing itself passes descriptors only to a process that it starts.
"""

import os
import pickle
import weakref
from collections.abc import Callable
from multiprocessing import context, reduction, sharedctypes
from multiprocessing.connection import Connection
from multiprocessing.heap import Arena
from multiprocessing.queues import Queue, SimpleQueue
from multiprocessing.synchronize import Condition, Event, SemLock
from typing import Any

import torch
from torch.multiprocessing import get_sharing_strategy

#: What crosses to the receiver as a descriptor: shared memory of torch, or a file that is open.
Handle = torch.UntypedStorage | int

_SHARED_KINDS = (SemLock, Condition, Event, Queue, SimpleQueue, sharedctypes.SynchronizedBase, Arena, Connection)


_reduce_ctype = sharedctypes.reduce_ctype  # type: ignore[attr-defined]


class Descriptor:
    """A received file descriptor, closed with this object.

    Args:
        fd: The descriptor, owned by this object.

    Attributes:
        fd: The descriptor.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd)

    def detach(self) -> int:
        """Returns a descriptor that the caller owns, as multiprocessing's reducers want it."""
        return os.dup(self.fd)


def locate(handle: Handle) -> int | tuple[bytes, bytes]:
    """Returns the descriptor of what ``handle`` stands for, or its names where torch shares memory by name.

    Both are valid while ``handle`` exists.
    """
    if isinstance(handle, int):
        return handle
    # Private names of torch's, which its own reducers for multiprocessing call; read in 2.5 to 2.13.
    storage: Any = handle
    if get_sharing_strategy() == "file_system":
        manager, name, _ = storage._share_filename_cpu_()
        return manager, name
    fd, _ = storage._share_fd_cpu_()
    return int(fd)


class Memory:
    """A tensor's whole storage, to be pickled. One object per storage and message, so that pickle's memo keeps aliases.

    Args:
        storage: The storage, on the CPU.
        handles: See :func:`reduced`; None where the receiver gets a copy, in shared memory of its own.
    """

    def __init__(self, storage: torch.UntypedStorage, handles: dict[int, Handle] | None) -> None:
        self._storage = storage
        self._handles = handles

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        as_bytes: Any = torch.empty(0, dtype=torch.uint8).set_(self._storage).numpy()
        buffer = pickle.PickleBuffer(as_bytes)
        if not self._storage.is_shared() or self._storage.filename is not None:  # that of `torch.from_file` is copied
            return _copied, (buffer,)
        if self._handles is None:
            return _shared_again, (buffer,)
        self._handles[id(buffer)] = self._storage
        return _shared, (buffer, self._storage.nbytes())


def is_of_multiprocessing(obj: Any) -> bool:
    """Whether an object of multiprocessing's is shared by the processes that have it."""
    return isinstance(obj, _SHARED_KINDS) or _reducer_of(obj) is _reduce_ctype


def reduced(obj: Any, handles: dict[int, Handle]) -> Any:
    """How an object of multiprocessing's is pickled; NotImplemented for all else, as pickle wants it.

    Args:
        obj: The object.
        handles: Gets its descriptors, by the id of the buffer that stands for each in the message.

    Raises:
        TypeError: If only a forked process can have the object.
    """
    if not is_of_multiprocessing(obj):
        return NotImplemented
    if getattr(obj, "_is_fork_ctx", False):
        raise TypeError(
            f"a {type(obj).__name__} of multiprocessing's 'fork' context reaches forked processes only; create it, or"
            " what holds it, with `multiprocessing.get_context('spawn')`"
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
    """What multiprocessing's reducers take for the process that is being started."""

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
        return _received, (buffer,)


def _received(descriptor: Descriptor) -> Descriptor:
    return descriptor


def _copied(buffer: Any) -> Any:
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _shared_again(buffer: Any) -> Any:
    return _copied(buffer).share_memory_()


def _shared(buffer: Any, num_bytes: int) -> Any:
    kind: Any = torch.UntypedStorage
    if isinstance(buffer, Descriptor):
        return kind._new_shared_fd_cpu(buffer.fd, num_bytes)  # it duplicates the descriptor
    if isinstance(buffer, tuple):
        return kind._new_shared_filename_cpu(*buffer, num_bytes)
    return _copied(buffer)  # it came over a network
