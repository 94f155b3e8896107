"""One rank's notes of a training, from its first step to its last.

A training step of a small model takes a millisecond, and Lightning takes three microseconds for each hook of a callback
that it calls. So most steps are only counted, where a batch is asked for; some in a row are observed, and only for
those ``switch`` lets hooks be called. Which ones follows from the number of steps, so that all ranks observe the same,
and differs from window to window, so that nothing that comes every so many batches is always seen, or never.
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
    NUM_WARMUP_STEPS,
    OF_MODELS,
    Window,
)

#: Steps that the observed ones of a window move on by, from one to the next; prime to most numbers of workers.
_STRIDE = 17


class Timekeeper(Protocol):
    """Times the exchanges of an engine that tells nothing by itself, when it is asked to."""

    def observe(self, is_on: bool) -> None:
        """Begins or ends to take the times of steps, from the next one on."""

    def follow(self, is_on: bool) -> None:
        """Goes on after the engine has been made anew, taking times or not."""

    def last(self) -> tuple[int, int, int] | None:
        """When the exchange of the step that is over began, was all ready, and ended; None if there was none."""


class Session:
    """See above; an :class:`.observer.ExchangeObserver`.

    Args:
        rank: Global rank.
        host: Identity of the host.
        every_n_steps: Optimizer steps per window.
        observed_steps: How many of them are observed, and so many at the beginning.
        num_done: Optimizer steps that were done before.
        switch: Called with whether the steps from here on are observed.
        timekeeper: Of the engine; None if that calls :meth:`exchanged`, or exchanges nothing.
        count_bytes: Says how many bytes were handed over since it was asked last, by the steps that were done since;
            None if :meth:`exchanged` says it.
        mailbox: To rank 0; None for a rank that is alone.
        hear: Called on rank 0 with the same window of all ranks.
        fail: Called with what has gone wrong between two steps.
        clock: Gives the time in observed steps, as ``time.time_ns()`` does, once what came before is done.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        every_n_steps: int,
        observed_steps: int,
        num_done: int,
        switch: Callable[[bool], None],
        timekeeper: Timekeeper | None,
        count_bytes: Callable[[int], int] | None,
        mailbox: Mailbox | None,
        hear: Callable[[list[Window]], None],
        fail: Callable[[Exception], None],
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._clock = clock
        self.rank = rank
        self._host = host
        self._every_n_steps = every_n_steps
        self._observed_steps = min(observed_steps, every_n_steps)
        self._switch = switch
        self._timekeeper = timekeeper
        self._count_bytes = count_bytes
        self._mailbox = mailbox
        self._hear = hear
        self._fail = fail
        self._batches: list[tuple[int, ...]] = []
        self._exchanges: list[tuple[int, ...]] = []
        self._num_bytes = self._counted_to = 0
        self._number = self._begun_at = 0
        self._previous_end = self._fetch = self._fetched = self._begin = 0
        self._backward_begin = self._backward_again = self._backward_end = self._backward = 0
        self._has_stepped = self._is_observing = False
        self._before = self._done = num_done
        self._next = num_done + 1  # when something is to be decided again
        self._observe(True)

    # --- in each step ---

    def fetch_begins(self, num_done: int) -> None:
        """A batch is asked for.

        Args:
            num_done: Optimizer steps so far.
        """
        self._done = num_done
        if num_done >= self._next:
            try:
                self._decide()
            except Exception as error:
                self._fail(error)
        if self._is_observing:
            self._fetch = self._clock()

    def exchanged(
        self, begin_ns: int, ready_ns: int, end_ns: int, num_bytes: int, *, is_of_models: bool = False
    ) -> None:
        """See :class:`.observer.ExchangeObserver`."""
        is_in_backward = self._backward_again > self._backward_end
        kind = OF_MODELS if is_of_models else IN_BACKWARD if is_in_backward else AFTER_BACKWARD
        if self._is_observing or is_of_models:  # means over other steps would not add up to the batches
            self._exchanges.append((self._done - self._before, begin_ns, ready_ns, end_ns, kind))
        self._num_bytes += num_bytes

    def exchange_changes(self) -> None:
        """See :class:`.observer.ExchangeObserver`."""
        self._count()
        if self._timekeeper is not None:
            self._timekeeper.follow(self._is_observing)

    # --- in observed steps, in this order ---

    def batch_begins(self) -> None:
        """The batch is there."""
        self._begin = self._clock()
        self._fetched = self._fetch or self._begin

    def backward_begins(self) -> None:
        """A backward pass begins; a batch may have several."""
        self._backward_again = self._clock()
        if not self._backward_begin:
            self._backward_begin = self._backward_again

    def backward_ends(self) -> None:
        """It has ended, and exchanges that are a part of it have."""
        self._backward_end = self._clock()
        self._backward += self._backward_end - self._backward_again

    def optimizer_steps(self) -> None:
        """An optimizer is about to step: this batch is the last of its optimizer step."""
        self._has_stepped = True

    def batch_ends(self) -> None:
        """All of it is done."""
        end, step = self._clock(), self._done - self._before
        self._batches.append(
            (
                *(step, self._previous_end, self._fetched, self._begin),
                *(self._backward_begin, self._backward_end, end, self._backward),
            )
        )
        self._previous_end = end
        self._fetch = self._backward_begin = self._backward_end = self._backward = 0
        if self._has_stepped and self._timekeeper is not None:
            times = self._timekeeper.last()
            if times is not None:
                self._exchanges.append((step, *times, IN_BACKWARD))
        self._has_stepped = False

    # --- now and then ---

    def pauses(self) -> None:
        """Something else than the next batch comes, such as a validation."""
        self._previous_end = 0

    def finish(self, num_done: int, timeout_s: float) -> None:
        """Ends after the last step; rank 0 waits for the other ranks for so long at most.

        Args:
            num_done: Optimizer steps so far.
            timeout_s: How long, in seconds.
        """
        self._done = num_done
        self._close_window()
        self._observe(False)
        if self._mailbox is not None:
            self._mailbox.finish(timeout_s)
            self._hear_complete()

    def abandon(self) -> None:
        """Ends at once; rank 0 keeps what it has heard."""
        self._observe(False)
        if self._mailbox is not None:
            self._mailbox.abandon()

    def _decide(self) -> None:
        step, every_n_steps = self._done - self._before, self._every_n_steps
        if step // every_n_steps > self._number:
            self._close_window()
        begin = self._number * every_n_steps
        first = begin + self._number * _STRIDE % (every_n_steps - self._observed_steps + 1)
        last = first + self._observed_steps
        if not self._number:  # at the beginning, and the steps that are left out of means
            first, last = 0, min(last + NUM_WARMUP_STEPS, every_n_steps)
        self._observe(first <= step < last)
        changes = [place for place in (first, last, begin + every_n_steps) if place > step]
        self._next = self._before + min(changes)

    def _observe(self, is_on: bool) -> None:
        if is_on is self._is_observing:
            return
        self._is_observing = is_on
        self._previous_end = 0
        self._switch(is_on)
        if self._timekeeper is not None:
            self._timekeeper.observe(is_on)

    def _close_window(self) -> None:
        batches, self._batches = np.array(self._batches, BATCH), []
        exchanges, self._exchanges = np.array(self._exchanges, EXCHANGE), []
        self._count()
        num_bytes, self._num_bytes = self._num_bytes, 0
        step = self._done - self._before
        num_steps, self._begun_at = step - self._begun_at, step
        number, self._number = self._number, step // self._every_n_steps
        if not num_steps:
            return
        window = Window(self.rank, self._host, number, num_steps, num_bytes, batches, exchanges)
        if self._mailbox is None:
            self._hear([window])
        else:
            self._mailbox.post(window)
            self._hear_complete()

    def _count(self) -> None:
        if self._count_bytes is not None:
            step = self._done - self._before
            self._num_bytes += self._count_bytes(step - self._counted_to)
            self._counted_to = step

    def _hear_complete(self) -> None:
        assert self._mailbox is not None
        for windows in self._mailbox.complete():
            self._hear(windows)
