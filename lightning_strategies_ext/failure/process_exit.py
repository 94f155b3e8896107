"""Process exit: exit handlers, excepthook, forced exits, and exit codes that the script does not set itself."""

import atexit
import faulthandler
import gc
import io
import logging
import multiprocessing
import multiprocessing.process
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import Finalize
from types import CodeType, FrameType, TracebackType
from typing import Any, NoReturn

#: Exit code of a process that its failure monitor has terminated.
MONITOR_EXIT_CODE = 70
#: Priorities of exit handlers in processes of multiprocessing: before the usual handlers, usual, and after them.
RUN_FIRST, _DEFAULT, _LAST = 1, 0, -100
#: Types of files that buffer what is written.
_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)

#: Extension that reports objects which are not freed at the exit on standard error (Triton 3.9, of torch 2.15).
_LEAK_REPORTER = "triton._C.libtriton"

_must_fail = _is_quick = _has_unfreed = False
_previous_excepthook: Any = None
# Exception that has left the function of this process of multiprocessing; None before Python 3.13.
_left: BaseException | None = None
_excepthook_caller: "Finalize[None] | None" = None
_handle_uncaught: Callable[[BaseException], BaseException]


def register_exit_handler(function: Callable[[], None], priority: int = _DEFAULT) -> "Finalize[None]":
    """Registers a function that this process calls once at its exit; ``cancel`` of the returned handler removes it.

    Forked processes do not call it. Before Python 3.13, a process of multiprocessing exits without ``atexit`` handlers.
    It calls multiprocessing's finalizers instead, those with a high priority first, also while an uncaught exception
    propagates. Later versions call both, when they have handled the exception.
    """
    finalizer = _ExitHandler(None, function, exitpriority=priority)
    atexit.register(finalizer)
    return finalizer


class _ExitHandler(Finalize):
    def cancel(self) -> None:
        super().cancel()
        atexit.unregister(self)


def exit_now(exit_code: int = MONITOR_EXIT_CODE) -> NoReturn:
    """Exits this process at once, from any thread, and kills its multiprocessing children (DataLoader workers)."""
    _flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(exit_code)


def exit_within(seconds: float) -> None:
    """Forces an exit with code 1 if this process, which is exiting, has not exited after some seconds.

    The timer runs in C, because a library may block at exit and hold the GIL.
    """
    _terminate_dataloader_workers()
    faulthandler.dump_traceback_later(seconds, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115
    _exit_without_freeing()


def skip_freeing_at_exit() -> None:
    """Skips the freeing of objects at the exit of the interpreter, in a process that was asked to exit."""
    global _is_quick
    _is_quick = True


def fail_at_exit() -> None:
    """Makes this process exit with code 1, even if its script succeeds. Works in exit handlers too."""
    global _must_fail
    _must_fail = True
    Finalize(None, _exit_as_requested, exitpriority=_LAST)


def install_excepthook(handle: Callable[[BaseException], BaseException]) -> None:
    """Installs a function that receives an uncaught exception of the script, and returns the exception to show.

    The newest function counts. Worker processes run no script: their tasks report exceptions.
    """
    global _previous_excepthook, _handle_uncaught, _excepthook_caller
    _handle_uncaught = handle
    if _previous_excepthook is None:
        _previous_excepthook, sys.excepthook = sys.excepthook, _handle_and_show
    if _excepthook_caller is not None:
        _excepthook_caller.cancel()
    _excepthook_caller = register_exit_handler(_call_excepthook, RUN_FIRST)
    if sys.version_info >= (3, 13):
        _call_excepthook_during_propagation()


def _call_excepthook_during_propagation() -> None:
    """Makes a process of multiprocessing call the excepthook when an exception leaves its function.

    Python 3.13 and later call exit handlers only afterwards, when they have dropped the exception. A training step
    costs nothing more: no exception leaves a frame in it, so the interpreter does not call back.
    """
    code, pid = _process_function(), os.getpid()
    monitoring: Any = getattr(sys, "monitoring", None)
    tool = next((each for each in (4, 3) if monitoring.get_tool(each) in (None, __name__)), None)
    if code is None or tool is None:
        return

    def on_unwind(unwound: CodeType, _: int, exception: BaseException) -> None:
        if unwound is not code or os.getpid() != pid:  # a forked process inherits the callback
            return
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, monitoring.events.PY_UNWIND, None)
        monitoring.free_tool_id(tool)
        global _left
        _left = exception
        _call_excepthook()
        if _excepthook_caller is not None:
            _excepthook_caller.cancel()

    if monitoring.get_tool(tool) is None:
        monitoring.use_tool_id(tool, __name__)
    monitoring.register_callback(tool, monitoring.events.PY_UNWIND, on_unwind)
    monitoring.set_events(tool, monitoring.events.PY_UNWIND)


def _process_function() -> CodeType | None:
    """Returns the code of the function that a process of multiprocessing runs, if this thread runs it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_back is not None:
        if frame.f_back.f_code is multiprocessing.process.BaseProcess._bootstrap.__code__:  # type: ignore[attr-defined]
            return frame.f_code
        frame = frame.f_back
    return None


def _call_excepthook() -> None:
    """Calls the excepthook in a process of multiprocessing, which does not call it itself."""
    exception = _uncaught_exception()
    if isinstance(exception, SystemExit):  # torch.multiprocessing catches an exception and exits
        exception = exception.__context__ or exception
    if exception is not None and not isinstance(exception, KeyboardInterrupt):  # every rank receives it
        sys.excepthook(type(exception), exception, exception.__traceback__)


def _handle_and_show(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    global _previous_excepthook
    sys.excepthook, _previous_excepthook = _previous_excepthook, None
    shown = _handle_uncaught(value)
    sys.excepthook(type(shown), shown, shown.__traceback__ or trace)


def _uncaught_exception() -> BaseException | None:
    """Returns the uncaught exception that ends a process of multiprocessing; None for an exit with code 0."""
    exception = _left or sys.exc_info()[1]
    return None if isinstance(exception, SystemExit) and not exception.code else exception


@atexit.register  # registered early, and therefore called late
def _exit_as_requested() -> None:
    if _must_fail and _uncaught_exception() is None:
        _terminate_dataloader_workers()
        logging.shutdown()
        _flush()
        os._exit(1)
    if _is_quick:
        _exit_without_freeing()
    if _has_unfreed and _LEAK_REPORTER in sys.modules:  # its report would follow the failure report
        _flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _exit_without_freeing() -> None:
    """Prevents the interpreter from freeing all of torch's objects, which takes one to two seconds.

    Freeing would flush open files; this function flushes them instead.
    """
    for each in gc.get_objects():
        if issubclass(type(each), _WRITERS):
            with suppress(OSError, ValueError):
                each.flush()
    gc.freeze()
    global _has_unfreed
    _has_unfreed = True


def _terminate_dataloader_workers() -> None:
    """Terminates DataLoader workers, as Python does at its exit, which this process may not reach.

    torch treats a terminated worker as finished and raises no error.
    """
    for child in multiprocessing.active_children():
        if child.daemon:
            child.terminate()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
