"""Pickling of objects that processes share: tensors after ``share_memory_()``, and objects of multiprocessing.

Their file descriptors are sent with the message, so the receiver has the same memory, event, or queue, not a copy.
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

#: What the receiver gets as a descriptor: shared memory of torch, or an open file.
Handle = torch.UntypedStorage | int

_SHARED_KINDS = (SemLock, Condition, Event, Queue, SimpleQueue, sharedctypes.SynchronizedBase, Arena, Connection)


_reduce_ctype = sharedctypes.reduce_ctype  # type: ignore[attr-defined]


class Descriptor:
    """A received file descriptor, closed when this object is deleted.

    Args:
        fd: The descriptor, owned by this object.
    """

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
        if not self._storage.is_shared() or self._storage.filename is not None:  # memory of `torch.from_file` is copied
            return _rebuild_copy, (buffer,)
        if self._handles is None:
            return _rebuild_shared_copy, (buffer,)
        self._handles[id(buffer)] = self._storage
        return _rebuild_shared, (buffer, self._storage.nbytes())


def is_of_multiprocessing(obj: Any) -> bool:
    """Whether an object belongs to multiprocessing and is shared by the processes that have it."""
    return isinstance(obj, _SHARED_KINDS) or _reducer_of(obj) is _reduce_ctype


def reduced(obj: Any, handles: dict[int, Handle]) -> Any:
    """Returns the pickle reduction of a shared object of multiprocessing; NotImplemented for other objects.

    Args:
        obj: The object.
        handles: Filled with its descriptors, by the id of the buffer that represents each in the message.

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
    """Substitute for the process that multiprocessing starts, for use by its reducers."""

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


def _rebuild_copy(buffer: Any) -> Any:
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _rebuild_shared_copy(buffer: Any) -> Any:
    return _rebuild_copy(buffer).share_memory_()


def _rebuild_shared(buffer: Any, num_bytes: int) -> Any:
    kind: Any = torch.UntypedStorage
    if isinstance(buffer, Descriptor):
        return kind._new_shared_fd_cpu(buffer.fd, num_bytes)  # duplicates the descriptor
    if isinstance(buffer, tuple):
        return kind._new_shared_filename_cpu(*buffer, num_bytes)
    return _rebuild_copy(buffer)  # received over a network
