"""Selector loop: one thread waits for events on several files, each with a callback."""

import math
import os
import selectors
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class SelectorLoop:
    """The selector loop of one thread. Other threads call only :meth:`wake` while the thread runs."""

    def __init__(self) -> None:
        self._wake_reader, self._wake_writer = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._paused: dict[Any, tuple[float, Callable[[], bool]]] = {}
        self.add(self._wake_reader, lambda: bool(os.read(self._wake_reader, 1)))

    def add(self, file: Any, on_ready: Callable[[], bool]) -> None:
        """Waits for data from a file, or for the close of its other end.

        Args:
            file: File or file descriptor.
            on_ready: Callback for an event. It returns whether :meth:`wait` has to return at once.
        """
        self._selector.register(file, selectors.EVENT_READ, on_ready)

    def wait_for_writable(self, file: Any, is_waiting: bool) -> None:
        """Sets whether the callback of a file is also called when the file has room for data to be written."""
        key = self._selector.get_key(file)
        events = selectors.EVENT_READ | selectors.EVENT_WRITE if is_waiting else selectors.EVENT_READ
        if key.events != events:
            self._selector.modify(file, events, key.data)

    def remove(self, file: Any) -> None:
        """Stops waiting for a file."""
        self._selector.unregister(file)

    def pause(self, file: Any, seconds: float) -> None:
        """Ignores a file for the given number of seconds, in which the file may be closed."""
        on_ready = self._selector.unregister(file).data
        self._paused[file] = time.monotonic() + seconds, on_ready

    def wait(self, seconds: float = math.inf) -> None:
        """Handles events for the given number of seconds, until a callback returns True, or until :meth:`wake`."""
        deadline, is_urgent, remaining_s = time.monotonic() + seconds, False, seconds
        while not is_urgent and remaining_s >= 0:
            timeout = min(remaining_s, self._resume()) if self._paused else remaining_s
            for key, _ in self._selector.select(None if timeout == math.inf else timeout):
                if self._selector.get_map().get(key.fd) == key:  # not removed with one before it
                    is_urgent |= key.data()
            remaining_s = deadline - time.monotonic()

    def _resume(self) -> float:
        """Ends pauses that are over; returns the seconds until the next pause is over."""
        now = time.monotonic()
        for file, (deadline, on_ready) in list(self._paused.items()):
            if file.fileno() < 0:
                del self._paused[file]
            elif deadline <= now:
                del self._paused[file]
                self.add(file, on_ready)
        return min((deadline - now for deadline, _ in self._paused.values()), default=math.inf)

    def wake(self) -> None:
        """Makes :meth:`wait` return. Any thread and any signal handler may call it, also after :meth:`close`."""
        with suppress(OSError):
            os.write(self._wake_writer, b".")

    def close(self) -> None:
        """Closes the loop. The thread must not wait in it. A second call is a no-op."""
        wake_writer, self._wake_writer = self._wake_writer, -1
        if wake_writer >= 0:
            self._selector.close()
            os.close(self._wake_reader)
            os.close(wake_writer)
