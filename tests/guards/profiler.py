"""Counts the calls of Python functions in a process, by the package that contains the code.

A call is an event "call" of ``sys.setprofile``: a call of a Python function, or the resumption of a generator. Calls of
C functions are not counted. Counted are the thread that calls :meth:`Profiler.begin` and each thread that Python has
started since :meth:`Profiler.install`, except :data:`MONITOR_THREADS`.
"""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any
from weakref import WeakSet

import lightning
import torch

import lightning_strategies_ext

#: Threads of the failure monitor, by name. They poll several times per second, so their calls depend on time.
MONITOR_THREADS = frozenset(
    f"lightning-strategies-ext {name}" for name in ("failure monitor", "store", "parent monitor")
)
_GUARDS = f"{Path(__file__).parent}/"


def _directory_of(package: ModuleType) -> str:
    return f"{Path(package.__file__ or '').parent}/"


#: Owner of code → directory of the code. The code of this package of tests is not counted.
_DIRECTORIES = {
    "ext": _directory_of(lightning_strategies_ext),
    "Lightning": _directory_of(lightning),
    "torch": _directory_of(torch),
}
OWNERS = (*_DIRECTORIES, "other")


class Window:
    """The calls between two points in time.

    Args:
        calls: Number of calls of each function.

    Attributes:
        totals: Owner of the code → number of calls.
        functions: ``"module:function"`` of this project's package → number of calls.
    """

    def __init__(self, calls: Counter[CodeType]) -> None:
        self.totals = dict.fromkeys(OWNERS, 0)
        self.functions: Counter[str] = Counter()
        for code, num_calls in calls.items():
            if code.co_filename.startswith(_GUARDS):
                continue
            owner = _owner_of(code)
            self.totals[owner] += num_calls
            if owner == "ext":
                self.functions[_name_of(code)] += num_calls


class Profiler:
    """A counter of calls in consecutive windows. A process has one, because its threads keep their profile function."""

    def __init__(self) -> None:
        self._windows: list[list[CodeType]] = []
        self._calls: list[CodeType] | None = None
        # Not the identifiers of threads: a new thread may get the identifier of a thread that has ended.
        self._counted_threads: WeakSet[threading.Thread] = WeakSet()

    def install(self) -> None:
        """Installs the profile function on threads that start from now on."""
        threading.setprofile(self._on_first_event)

    def begin(self) -> None:
        """Begins the first window, and counts this thread from here on."""
        self._counted_threads.add(threading.current_thread())
        sys.setprofile(self._on_event)
        self.begin_next()

    def begin_next(self) -> None:
        """Ends the current window and begins the next one.

        Raises:
            AssertionError: If a thread exists that is neither counted nor one of the failure monitor's.
        """
        self._check_threads()
        self._calls = []
        self._windows.append(self._calls)

    def end(self) -> list[Window]:
        """Ends the last window and returns all windows.

        Raises:
            AssertionError: If a thread exists that is neither counted nor one of the failure monitor's.
        """
        self._calls = None
        sys.setprofile(None)
        self._check_threads()
        windows, self._windows = self._windows, []
        return [Window(Counter(calls)) for calls in windows]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the calls of this thread inside the block; calls of other threads are counted."""
        before = sys.getprofile()
        sys.setprofile(None)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _on_event(self, frame: FrameType, event: str, arg: Any) -> None:
        # `list.append` is atomic. The increment of a counter is not: another thread may run in the middle of it.
        if event == "call" and self._calls is not None:
            self._calls.append(frame.f_code)

    def _on_first_event(self, frame: FrameType, event: str, arg: Any) -> None:
        thread = threading.current_thread()
        if thread.name in MONITOR_THREADS:
            sys.setprofile(None)
            return
        self._counted_threads.add(thread)
        sys.setprofile(self._on_event)
        self._on_event(frame, event, arg)

    def _check_threads(self) -> None:
        threads = {thread.ident: thread for thread in threading.enumerate()}
        names = {thread.name for thread in threads.values() if thread not in self._counted_threads} - MONITOR_THREADS
        names |= {f"{ident}, not started by Python" for ident in sys._current_frames() if ident not in threads}
        assert not names, f"The calls on these threads are not counted: {sorted(names)}."


def _owner_of(code: CodeType) -> str:
    return next((owner for owner, path in _DIRECTORIES.items() if code.co_filename.startswith(path)), "other")


def _name_of(code: CodeType) -> str:
    module = Path(code.co_filename).relative_to(_DIRECTORIES["ext"]).with_suffix("")
    return f"{'.'.join(module.parts)}:{getattr(code, 'co_qualname', code.co_name)}"  # Python 3.10 has no co_qualname
