"""The end of a process whose training thread does not end it, or not with the exit code that it should have."""

import atexit
import faulthandler
import gc
import io
import logging
import multiprocessing
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import NoReturn

#: The exit code of a process that its watch has ended.
MONITOR_EXIT_CODE = 70

#: How long the end of a process may be held up for a thread that waits for a store, in seconds.
STORE_THREAD_EXIT_TIMEOUT_S = 2.0

#: Of what multiprocessing's processes call at their end, what is called before the rest, and after it.
RUN_FIRST, _USUAL, _LAST = 1, 0, -100

#: Of files, what keeps words back.
_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)

_must_fail = _is_quick = False
_abandoned_threads: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


def register_exit_handler(function: Callable[[], None], priority: int = _USUAL) -> "Finalize[None]":
    """Calls a function at this process's end, once, and not in processes that are forked from it.

    A process that multiprocessing has started ends without what is registered with ``atexit`` before Python 3.14, but
    with its own finalizers, which it calls while an exception that nobody catches passes through.

    Args:
        function: To call.
        priority: Of several, in a process of multiprocessing's: a higher one is called first, of the same the last.

    Returns:
        What takes it back: its ``cancel``.
    """
    finalizer = _ExitHandler(None, function, exitpriority=priority)
    atexit.register(finalizer)
    return finalizer


class _ExitHandler(Finalize):
    def cancel(self) -> None:
        super().cancel()
        atexit.unregister(self)


def exit_now(exit_code: int = MONITOR_EXIT_CODE) -> NoReturn:
    """Ends this process from any of its threads, with what multiprocessing has started in it: workers of loaders, say.

    Args:
        exit_code: Of the process.
    """
    _flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(exit_code)


def exit_within(seconds: float) -> None:
    """Lets this process, which ends, end with exit code 1 after some seconds at the latest.

    A library may wait at its end for what never comes, and hold Python's lock: the clock is one of C's.
    """
    _terminate_dataloader_workers()
    faulthandler.dump_traceback_later(seconds, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115
    _exit_without_freeing()


def skip_freeing_at_exit() -> None:
    """Lets this process, which was asked to end, not free what it has made when the interpreter ends."""
    global _is_quick
    _is_quick = True


def abandon_thread(thread: threading.Thread) -> None:
    """Leaves a thread to itself that may wait for a store which is gone; this process's end waits a moment for it.

    Args:
        thread: It; a second call for the same does nothing.
    """
    if thread not in _abandoned_threads:
        _abandoned_threads.add(thread)
        atexit.register(thread.join, STORE_THREAD_EXIT_TIMEOUT_S)


def fail_at_exit() -> None:
    """Lets this process end with exit code 1, whatever the script ends with; called at its exit, or before."""
    global _must_fail
    _must_fail = True
    Finalize(None, _exit_as_requested, exitpriority=_LAST)


def uncaught_exception() -> BaseException | None:
    """What nobody has caught, while it ends a process of multiprocessing's; None for an exit with code 0."""
    exception = sys.exc_info()[1]
    return None if isinstance(exception, SystemExit) and not exception.code else exception


@atexit.register  # early, and so it is called late
def _exit_as_requested() -> None:
    if _must_fail and uncaught_exception() is None:
        _terminate_dataloader_workers()
        logging.shutdown()
        _flush()
        os._exit(1)
    if _is_quick:
        _exit_without_freeing()


def _exit_without_freeing() -> None:
    """Keeps the interpreter from going twice through all that torch has made, to free it: a second or two.

    What was written to files that nobody has closed would have been written to the disk then; it is now.
    """
    for each in gc.get_objects():
        if issubclass(type(each), _WRITERS):
            with suppress(OSError, ValueError):
                each.flush()
    gc.freeze()


def _terminate_dataloader_workers() -> None:
    """Ends the workers of loaders as Python does at its end, to which this process may not come.

    Each takes it for success when its parent asks for it, and torch raises nothing here.
    """
    for child in multiprocessing.active_children():
        if child.daemon:
            child.terminate()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
