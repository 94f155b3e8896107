"""Waiting: what one thread waits for at once, each with what is to be done when it comes."""

import math
import os
import selectors
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class SelectorLoop:
    """Of one thread; all but :meth:`wake` is called by it, or by who has made it, before and after."""

    def __init__(self) -> None:
        self._awake, self._waker = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._paused: dict[Any, tuple[float, Callable[[], bool]]] = {}
        self.add(self._awake, lambda: bool(os.read(self._awake, 1)))

    def add(self, file: Any, on_ready: Callable[[], bool]) -> None:
        """Waits for something to read from a file, or for its other end to go.

        Args:
            file: It, or its descriptor.
            on_ready: Deals with what has come. Whether the thread is to look at once.
        """
        self._selector.register(file, selectors.EVENT_READ, on_ready)

    def remove(self, file: Any) -> None:
        """Waits for a file no more."""
        self._selector.unregister(file)

    def pause(self, file: Any, seconds: float) -> None:
        """Ignores a file for a number of seconds; the file may be closed meanwhile."""
        on_ready = self._selector.unregister(file).data
        self._paused[file] = time.monotonic() + seconds, on_ready

    def wait(self, seconds: float) -> None:
        """Deals with what comes until something is to be looked at, :meth:`wake` is called, or the time is over."""
        until, is_urgent, left = time.monotonic() + seconds, False, seconds
        while not is_urgent and left >= 0:
            for key, _ in self._selector.select(min(left, self._resume()) if self._paused else left):
                if self._selector.get_map().get(key.fd) == key:  # not removed with one before it
                    is_urgent |= key.data()
            left = until - time.monotonic()

    def _resume(self) -> float:
        """Ends pauses that are over, and returns the number of seconds until the next one is."""
        now = time.monotonic()
        for file, (until, on_ready) in list(self._paused.items()):
            if file.fileno() < 0:
                del self._paused[file]
            elif until <= now:
                del self._paused[file]
                self.add(file, on_ready)
        return min((until - now for until, _ in self._paused.values()), default=math.inf)

    def wake(self) -> None:
        """Lets :meth:`wait` return; from any thread or signal handler, also after the end."""
        with suppress(OSError):
            os.write(self._waker, b".")

    def close(self) -> None:
        """Ends it; nobody may wait any more."""
        self._selector.close()
        os.close(self._awake)
        waker, self._waker = self._waker, -1
        os.close(waker)
