"""One rank's notes of a training, from its first step to its last; its methods are called at each step.

A training step of a small model takes a millisecond, so what is called in each step reads a clock and appends to a
list. What costs more is done in few steps (``Timekeeper``), or once per window.
"""

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from lightning_strategies_ext.monitoring.mailbox import Mailbox
from lightning_strategies_ext.monitoring.records import (
    AFTER_BACKWARD,
    BATCH,
    EXCHANGE,
    IN_BACKWARD,
    OF_MODELS,
    Window,
)


class Timekeeper(Protocol):
    """Times the exchanges of an engine that tells nothing by itself, when it is asked to."""

    def observe(self, is_on: bool) -> None:
        """Begins or ends to take the times of steps, from the next one on."""

    def last(self) -> tuple[int, int, int] | None:
        """When the exchange of the step that is over began, was all ready, and ended; None if there was none."""


class Session:
    """See above; an :class:`.observer.ExchangeObserver`.

    Args:
        rank: Global rank.
        host: Identity of the host.
        every_n_steps: Optimizer steps per window.
        observed_steps: How many of them, the last ones, ``timekeeper`` observes, and so many at the beginning.
        timekeeper: Of the engine; None if that calls :meth:`exchanged`, or exchanges nothing.
        count_bytes: Says how many bytes have been handed over so far; None if :meth:`exchanged` says it.
        mailbox: To rank 0; None for a rank that is alone.
        hear: Called on rank 0 with the same window of all ranks.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        every_n_steps: int,
        observed_steps: int,
        timekeeper: Timekeeper | None,
        count_bytes: Callable[[int], int] | None,
        mailbox: Mailbox | None,
        hear: Callable[[list[Window]], None],
    ) -> None:
        self.rank = rank
        self._host = host
        self._every_n_steps = every_n_steps
        self._observed_steps = observed_steps
        self._timekeeper = timekeeper
        self._count_bytes = count_bytes
        self._mailbox = mailbox
        self._hear = hear
        self._batches: list[tuple[int, ...]] = []
        self._exchanges: list[tuple[int, ...]] = []
        self._num_bytes = 0
        self._counted = 0
        self._num_windows = 0
        self._step = self._left = 0
        self._previous_end = self._fetch = self._fetched = self._begin = 0
        self._backward_begin = self._backward_again = self._backward_end = self._backward = 0
        self._has_stepped = self._is_observing = False
        self._observe_if_due()

    # --- in each step, in this order ---

    def fetch_begins(self) -> None:
        """A batch is asked for."""
        self._fetch = time.time_ns()

    def batch_begins(self) -> None:
        """It is there."""
        self._begin = time.time_ns()
        self._fetched = self._fetch or self._begin

    def backward_begins(self) -> None:
        """A backward pass begins; a batch may have several."""
        self._backward_again = time.time_ns()
        if not self._backward_begin:
            self._backward_begin = self._backward_again

    def backward_ends(self) -> None:
        """It has ended, and exchanges that are a part of it have."""
        self._backward_end = time.time_ns()
        self._backward += self._backward_end - self._backward_again

    def optimizer_steps(self) -> None:
        """An optimizer is about to step: this batch is the last of its optimizer step."""
        self._has_stepped = True

    def exchanged(
        self, begin_ns: int, ready_ns: int, end_ns: int, num_bytes: int, *, is_of_models: bool = False
    ) -> None:
        """See :class:`.observer.ExchangeObserver`."""
        kind = OF_MODELS if is_of_models else AFTER_BACKWARD
        self._exchanges.append((self._step, begin_ns, ready_ns, end_ns, kind))
        self._num_bytes += num_bytes

    def batch_ends(self) -> None:
        """All of it is done."""
        end = time.time_ns()
        self._batches.append(
            (
                *(self._step, self._previous_end, self._fetched, self._begin),
                *(self._backward_begin, self._backward_end, end, self._backward),
            )
        )
        self._previous_end = end
        self._fetch = self._backward_begin = self._backward_end = self._backward = 0
        if self._has_stepped:
            self._step_ends()

    def pauses(self) -> None:
        """Something else than the next batch comes, such as a validation."""
        self._previous_end = 0

    # --- now and then ---

    def finish(self, patience_s: float) -> None:
        """Ends with the last step; rank 0 waits for the other ranks for so long at most."""
        self._close_window()
        self._stop_observing()
        if self._mailbox is not None:
            self._mailbox.finish(patience_s)
            self._hear_complete()

    def abandon(self) -> None:
        """Ends at once; rank 0 keeps what it has heard."""
        self._stop_observing()
        if self._mailbox is not None:
            self._mailbox.abandon()

    def _step_ends(self) -> None:
        self._has_stepped = False
        if self._is_observing:
            assert self._timekeeper is not None
            times = self._timekeeper.last()
            if times is not None:
                self._exchanges.append((self._step, *times, IN_BACKWARD))
        self._step += 1
        if self._step % self._every_n_steps == 0:
            self._close_window()
        self._observe_if_due()

    def _observe_if_due(self) -> None:
        if self._timekeeper is None:
            return
        place = self._step % self._every_n_steps
        is_due = self._step < self._observed_steps or place >= self._every_n_steps - self._observed_steps
        if is_due is not self._is_observing:
            self._is_observing = is_due
            self._timekeeper.observe(is_due)

    def _stop_observing(self) -> None:
        if self._is_observing and self._timekeeper is not None:
            self._timekeeper.observe(False)
        self._is_observing = False

    def _close_window(self) -> None:
        batches, self._batches = np.array(self._batches, BATCH), []
        exchanges, self._exchanges = np.array(self._exchanges, EXCHANGE), []
        num_bytes, self._num_bytes = self._num_bytes, 0
        num_steps, self._left = self._step - self._left, self._step
        if not num_steps:
            return
        if self._count_bytes is not None:
            before, self._counted = self._counted, self._count_bytes(self._step)
            num_bytes += self._counted - before
        window = Window(self.rank, self._host, self._num_windows, num_bytes, batches, exchanges)
        self._num_windows += 1
        if self._mailbox is None:
            self._hear([window])
        else:
            self._mailbox.post(window)
            self._hear_complete()

    def _hear_complete(self) -> None:
        assert self._mailbox is not None
        for windows in self._mailbox.complete():
            self._hear(windows)
