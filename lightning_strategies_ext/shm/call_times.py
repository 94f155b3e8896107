"""Records how long calls block the threads that start operations, while recording is on.

A short operation ends within the call that starts it; a longer one is executed there for up to a millisecond (see
:mod:`.execution`). To the caller of an asynchronous operation, this time looks like computation.
"""

import threading
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A call that has started an operation. Times are those of ``time.time_ns()``.

    Attributes:
        thread: Identifier of the calling thread, from ``threading.get_ident()``.
        begin_ns: Time at which the call began.
        end_ns: Time at which the call returned.
    """

    thread: int
    begin_ns: int
    end_ns: int


_taken: list[Call] | None = None


def take(is_on: bool) -> None:
    """Turns recording on or off for all process groups of this process, and drops recorded calls."""
    global _taken
    _taken = [] if is_on else None


def taken() -> list[Call]:
    """Returns and clears the recorded calls; empty unless :func:`take` has turned recording on."""
    if not _taken:
        return []
    calls = list(_taken)
    _taken.clear()
    return calls


def timed(call: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Returns a context that records the time of a call if recording is on; else the given context."""
    return call if _taken is None else _timed(call, _taken)


@contextmanager
def _timed(call: AbstractContextManager[Any], into: list[Call]) -> Generator[None, None, None]:
    begin_ns = time.time_ns()
    try:
        with call:
            yield
    finally:
        into.append(Call(threading.get_ident(), begin_ns, time.time_ns()))
