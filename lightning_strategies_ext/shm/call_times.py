"""For how long calls hold up who starts an operation, while somebody wants to know.

A short operation ends within the call that starts it, and a longer one is worked on there for up to a millisecond (see
:mod:`.execution`). To whoever has started it asynchronously, that looks like computation.
"""

import threading
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple


class Call(NamedTuple):
    """One that has started an operation; times are those of ``time.time_ns()``.

    Attributes:
        thread: That has called, as ``threading.get_ident()`` names it.
        begin_ns: When.
        end_ns: When it was let go on.
    """

    thread: int
    begin_ns: int
    end_ns: int


_taken: list[Call] | None = None


def take(is_on: bool) -> None:
    """Begins or ends to take times, of all groups of this process."""
    global _taken
    _taken = [] if is_on else None


def taken() -> list[Call]:
    """What has been taken since the last time; nothing unless :func:`take` was called."""
    if not _taken:
        return []
    calls = list(_taken)
    _taken.clear()
    return calls


def timed(call: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """What takes the time of a call, if somebody wants to know; else what is given."""
    return call if _taken is None else _timed(call, _taken)


@contextmanager
def _timed(call: AbstractContextManager[Any], into: list[Call]) -> Generator[None, None, None]:
    begin_ns = time.time_ns()
    try:
        with call:
            yield
    finally:
        into.append(Call(threading.get_ident(), begin_ns, time.time_ns()))
