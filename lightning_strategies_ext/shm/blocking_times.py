"""Records how long calls block the threads that start operations, while recording is on.

An operation for which all ranks are ready ends within the call that starts it. The caller of another operation waits
there for up to a millisecond (see :mod:`.executor`). To the caller of an asynchronous operation, this time looks like
computation.
"""

import threading
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple


class BlockingCall(NamedTuple):
    """A call that has started an operation. Times are those of ``time.time_ns()``.

    Attributes:
        thread: Identifier of the calling thread, from ``threading.get_ident()``.
        begin_ns: Time at which the call began.
        end_ns: Time at which the call returned.
    """

    thread: int
    begin_ns: int
    end_ns: int


_recorded: list[BlockingCall] | None = None


def set_recording(is_on: bool) -> None:
    """Turns recording on or off for all process groups of this process, and drops recorded calls."""
    global _recorded
    _recorded = [] if is_on else None


def drain() -> list[BlockingCall]:
    """Returns and clears the recorded calls; empty unless :func:`set_recording` has turned recording on."""
    if not (all_calls := _recorded):
        return []
    calls = all_calls[:]
    del all_calls[: len(calls)]  # other threads may have added calls in the meantime
    return calls


def recorded(call: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Returns a context that records the time of a call if recording is on; else the given context."""
    return call if _recorded is None else _record(call, _recorded)


@contextmanager
def _record(call: AbstractContextManager[Any], into: list[BlockingCall]) -> Generator[None, None, None]:
    begin_ns = time.time_ns()
    try:
        with call:
            yield
    finally:
        into.append(BlockingCall(threading.get_ident(), begin_ns, time.time_ns()))
