"""Forks without deadlocks on CPython 3.10 and 3.11, as CPython 3.12 makes them.

A C++ thread that frees a Python-visible tensor, such as a thread of gloo after a collective, becomes a Python thread
for a moment. It takes the lock on the list of threads without holding the GIL. If another thread forks in that
moment, the child waits for the lock indefinitely before it runs any code: a DataLoader worker that never sends a batch.
(Observed once in about 5,000 DataLoader workers under Horovod, on two busy cores. CPython 3.12 reinitializes the lock
in the child before it takes the lock.)

Here the forking thread holds the lock during the fork. The lock is private to CPython. It is found by the two pointers
that follow it, whose values the C API returns. If they occur in several places, nothing is changed.
"""

import ctypes
import logging
import os
import platform
import sys
from functools import cache

from lightning_strategies_ext.shm import native_build
from lightning_strategies_ext.shm.compiler import NativeLibraryError

log = logging.getLogger(__name__)

_VERSIONS = ((3, 10), (3, 11))
#: Number of pointers at the start of the runtime state that are searched; the state is longer.
_NUM_POINTERS = 128


@cache
def make_fork_safe() -> bool:
    """Makes forks of this process safe from the deadlock. A second call is a no-op.

    Returns:
        Whether forks are safe, by CPython itself or by this function.
    """
    is_affected = sys.version_info[:2] in _VERSIONS and platform.python_implementation() == "CPython"
    if not is_affected or not hasattr(os, "fork"):  # Windows has no fork
        return True
    try:
        lock, functions = _lock_of_threads(), native_build.library().functions
    except (LookupError, NativeLibraryError) as error:
        log.info(
            "A DataLoader worker may hang at startup, because %s. Use Python 3.12 or later, which does not"
            " have this bug.",
            error,
        )
        return False
    python = ctypes.pythonapi
    acquire, release = python.PyThread_acquire_lock_timed, python.PyThread_release_lock
    addresses = (ctypes.cast(function, ctypes.c_void_p) for function in (acquire, release))
    return bool(functions.at_fork_hold(lock, *addresses) == 0)


def _lock_of_threads() -> int:
    """Returns the address of the lock in ``_PyRuntime.interpreters``; the newest and the main interpreter follow it.

    Raises:
        LookupError: If the lock is not found.
    """
    python = ctypes.pythonapi
    for function in (python.PyInterpreterState_Head, python.PyInterpreterState_Main):
        function.restype = ctypes.c_void_p
    pair = python.PyInterpreterState_Head(), python.PyInterpreterState_Main()
    try:
        pointers = list((ctypes.c_void_p * _NUM_POINTERS).in_dll(python, "_PyRuntime"))
    except ValueError as error:
        raise LookupError(str(error)) from error
    found = [index for index in range(1, _NUM_POINTERS - 1) if (pointers[index], pointers[index + 1]) == pair]
    lock: int | None = pointers[found[0] - 1] if len(found) == 1 and pair[0] == pair[1] else None
    if lock is None:
        raise LookupError("the lock on the list of threads was not found in this interpreter")
    return lock
