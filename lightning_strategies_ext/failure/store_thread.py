"""The thread of a stage that asks the store which all ranks share, for whoever has something to ask there.

It may have to wait for the store, which goes with rank 0's process. The watch may wait for nobody, and so has a thread
of its own.
"""

import threading
import time
from typing import Protocol

from lightning_strategies_ext.failure.ending import leave_thread


class Question(Protocol):
    """What is asked again and again until it is answered."""

    interval_s: float
    """Seconds between two looks."""

    def look(self) -> bool:
        """Asks the store once, in the thread. Whether to ask again."""


class StoreThread:
    """One rank's, for one stage."""

    def __init__(self) -> None:
        self._due_at: dict[Question, float] = {}
        self._asked: Question | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="lightning-strategies-ext store", daemon=True)
        self._thread.start()

    def ask(self, question: Question) -> None:
        """Begins to ask, the first time after the question's interval."""
        with self._changed:
            self._due_at[question] = time.monotonic() + question.interval_s
            self._changed.notify_all()

    def drop(self, question: Question) -> None:
        """Asks no more; returns when it is not being asked. A second call does no harm."""
        with self._changed:
            self._due_at.pop(question, None)
            while self._asked is question and threading.current_thread() is not self._thread:
                self._changed.wait()

    def close(self) -> None:
        """Ends the thread and waits for that, unless it was left to itself. A second call does no harm."""
        if self._end() and threading.current_thread() is not self._thread:
            self._thread.join()

    def abandon(self) -> None:
        """Leaves the thread to itself, which may wait for a store that is gone."""
        self._end()
        leave_thread(self._thread)

    def _end(self) -> bool:
        with self._changed:
            is_first_call, self._is_closed = not self._is_closed, True
            self._due_at.clear()
            self._changed.notify_all()
            return is_first_call

    def _run(self) -> None:
        while (question := self._next()) is not None:
            goes_on = False
            try:
                goes_on = question.look()
            finally:
                with self._changed:
                    self._asked = None
                    if not goes_on:
                        self._due_at.pop(question, None)
                    elif question in self._due_at:
                        self._due_at[question] = time.monotonic() + question.interval_s
                    self._changed.notify_all()

    def _next(self) -> Question | None:
        """Waits until something is to be asked; None at the end."""
        with self._changed:
            while not self._is_closed:
                now = time.monotonic()
                question = min(self._due_at, key=self._due_at.__getitem__, default=None)
                if question is not None and self._due_at[question] <= now:
                    self._asked = question
                    return question
                self._changed.wait(None if question is None else self._due_at[question] - now)
            return None
