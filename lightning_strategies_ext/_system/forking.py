"""Forks that do not hang: what CPython 3.12 does by itself, for 3.10 and 3.11.

A library's thread that lets go of a tensor which Python knows, such as Horovod's or gloo's once a collective is over,
becomes one of Python's for a moment, and takes the lock on the list of those, without the GIL. Where another thread
forks in that moment, the child waits for the lock for ever, before it has run any code: a worker of a data loader that
never sends a batch. (Seen once in some 5,000 workers of loaders under Horovod, on two busy cores. CPython 3.12 makes
the lock anew in the child before it takes it.)

So whoever forks holds the lock meanwhile. It is a private one; it is found by the two pointers that follow it, which
CPython gives, and left alone where they are not found just once.
"""

import ctypes
import logging
import os
import platform
import sys
from functools import cache

from lightning_strategies_ext.shm import native_build
from lightning_strategies_ext.shm.compiler import NotCompiledError

log = logging.getLogger(__name__)

_VERSIONS = ((3, 10), (3, 11))
#: Of the interpreter's state, how many pointers are looked through; it begins with what is looked for, and is longer.
_NUM_POINTERS = 128


@cache
def make_fork_safe() -> bool:
    """Lets processes be forked from here on without that danger. A second call does nothing.

    Returns:
        Whether that is so: by CPython itself, or by this.
    """
    is_affected = sys.version_info[:2] in _VERSIONS and platform.python_implementation() == "CPython"
    if not is_affected or not hasattr(os, "fork"):  # Windows forks nothing
        return True
    try:
        lock, functions = _lock_of_threads(), native_build.library().functions
    except (LookupError, NotCompiledError) as error:
        log.info("A worker of a data loader may hang, since %s. Python 3.12 needs nothing for that.", error)
        return False
    python = ctypes.pythonapi
    acquire, release = python.PyThread_acquire_lock_timed, python.PyThread_release_lock
    addresses = (ctypes.cast(function, ctypes.c_void_p) for function in (acquire, release))
    return bool(functions.at_fork_hold(lock, *addresses) == 0)


def _lock_of_threads() -> int:
    """The address of the lock in ``_PyRuntime.interpreters``, followed by the newest interpreter and the main one.

    Raises:
        LookupError: If it is not there.
    """
    python = ctypes.pythonapi
    for function in (python.PyInterpreterState_Head, python.PyInterpreterState_Main):
        function.restype = ctypes.c_void_p
    pair = python.PyInterpreterState_Head(), python.PyInterpreterState_Main()
    try:
        pointers = list((ctypes.c_void_p * _NUM_POINTERS).in_dll(python, "_PyRuntime"))
    except ValueError as error:
        raise LookupError(str(error)) from error
    found = [place for place in range(1, _NUM_POINTERS - 1) if (pointers[place], pointers[place + 1]) == pair]
    lock: int | None = pointers[found[0] - 1] if len(found) == 1 and pair[0] == pair[1] else None
    if lock is None:
        raise LookupError("this interpreter has its lock on threads elsewhere")
    return lock
