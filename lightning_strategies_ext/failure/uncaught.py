"""Excepthook: announces an uncaught exception of the script, for which the other ranks would wait."""

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from lightning_strategies_ext.failure import failure_monitor
from lightning_strategies_ext.failure.process_exit import RUN_FIRST, register_exit_handler, uncaught_exception

_usual: Any = None
_at_end: Any = None
_handle: Callable[[BaseException], BaseException]


def install_excepthook(handle: Callable[[BaseException], BaseException]) -> None:
    """Installs a function that handles an uncaught exception of the script before it is shown; the newest one counts.

    Worker processes run no script: their tasks report exceptions.

    Args:
        handle: Callable that receives the exception and returns the exception to show.
    """
    global _usual, _handle, _at_end
    _handle = handle
    if _usual is None:
        _usual, sys.excepthook = sys.excepthook, _pass_through
    if _at_end is not None:
        _at_end.cancel()
    _at_end = register_exit_handler(_call_hook, RUN_FIRST)


def announce_uncaught(exception: BaseException) -> BaseException:
    """Announces an exception of the script between two stages; within a stage, the strategy announces exceptions."""
    own = failure_monitor.current_monitor()
    if own is not None and not isinstance(exception, KeyboardInterrupt):  # it reaches all
        own.announce_uncaught(exception)
    return exception


def _call_hook() -> None:
    """Calls the excepthook in a process of multiprocessing, which does not call it itself."""
    exception = uncaught_exception()
    if isinstance(exception, SystemExit):  # torch.multiprocessing catches an exception and exits
        exception = exception.__context__ or exception
    if exception is not None and not isinstance(exception, KeyboardInterrupt):  # it reaches all
        sys.excepthook(type(exception), exception, exception.__traceback__)


def _pass_through(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    global _usual
    sys.excepthook, _usual = _usual, None
    shown = _handle(value)
    sys.excepthook(type(shown), shown, shown.__traceback__ or trace)
