"""Recording of one rank's training, from its first step to its last.

A training step of a small model takes a millisecond, and Lightning spends three microseconds on each callback hook.
Most steps are therefore only counted, at the request for a batch. Only a few consecutive steps per window are observed,
for which ``switch`` enables the hooks. The step number determines which steps are observed, so that all ranks observe
the same ones. Their position varies between windows, so that no periodic event is observed always or never.
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
    MODEL_EXCHANGE,
    NUM_WARMUP_STEPS,
    Window,
)

#: Number of steps by which the observed steps move between windows; coprime to most numbers of workers.
_STRIDE = 17


class ExchangeTimer(Protocol):
    """Measures the exchanges of an engine that does not report them, while it is enabled."""

    def set_recording(self, is_on: bool) -> None:
        """Starts or stops the measurement, from the next step on."""

    def on_ddp_rebuilt(self, is_on: bool) -> None:
        """Continues after the engine has been created again, with the measurement on or off."""

    def last_exchange(self) -> tuple[int, int, int] | None:
        """Returns the beginning, ready time, and end of the last step's exchange; None if there was none."""


class StepRecorder:
    """Records the steps and exchanges of one rank; an :class:`.observer.ExchangeObserver`.

    Args:
        rank: Global rank.
        host: Identity of the host.
        every_n_steps: Number of optimizer steps per window.
        observed_steps: Number of observed steps per window, in the first window from its beginning.
        num_done: Number of optimizer steps done before.
        set_hooks_enabled: Function that is called with whether steps are observed from here on.
        exchange_timer: Timer of the engine's exchanges; None if the engine calls :meth:`on_exchange`, or exchanges
            nothing.
        count_bytes: Function of the number of steps since its last call that returns the number of bytes contributed
            in them; None if :meth:`on_exchange` receives the number.
        mailbox: Transfer to rank 0; None for a single rank.
        on_windows: Function that is called on rank 0 with the records of all ranks of one window.
        on_error: Function that is called with an exception between two steps.
        clock: Function that waits for preceding work and returns the time as ``time.time_ns()`` does; for observed
            steps.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        every_n_steps: int,
        observed_steps: int,
        num_done: int,
        set_hooks_enabled: Callable[[bool], None],
        exchange_timer: ExchangeTimer | None,
        count_bytes: Callable[[int], int] | None,
        mailbox: Mailbox | None,
        on_windows: Callable[[list[Window]], None],
        on_error: Callable[[Exception], None],
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._clock = clock
        self.rank = rank
        self._host = host
        self._every_n_steps = every_n_steps
        self._observed_steps = min(observed_steps, every_n_steps)
        self._set_hooks_enabled = set_hooks_enabled
        self._exchange_timer = exchange_timer
        self._count_bytes = count_bytes
        self._mailbox = mailbox
        self._on_windows = on_windows
        self._on_error = on_error
        self._batches: list[tuple[int, ...]] = []
        self._exchanges: list[tuple[int, ...]] = []
        self._num_bytes = self._counted_to = 0
        self._number = self._begun_at = 0
        self._previous_end = self._fetch = self._fetched = self._begin = 0
        self._backward_begin = self._backward_again = self._backward_end = self._backward = 0
        self._has_stepped = self._is_recording = False
        self._before = self._done = num_done
        self._next = num_done + 1  # step of the next decision
        self._set_recording(True)

    # --- in each step ---

    def on_fetch_start(self, num_done: int) -> None:
        """Called before a batch is requested.

        Args:
            num_done: Number of optimizer steps done.
        """
        self._done = num_done
        if num_done >= self._next:
            try:
                self._decide()
            except Exception as error:
                self._on_error(error)
        if self._is_recording:
            self._fetch = self._clock()

    def on_exchange(
        self, begin_ns: int, ready_ns: int, end_ns: int, num_bytes: int, *, is_model_exchange: bool = False
    ) -> None:
        """Records an exchange, see :class:`.observer.ExchangeObserver`."""
        is_in_backward = self._backward_again > self._backward_end
        kind = MODEL_EXCHANGE if is_model_exchange else IN_BACKWARD if is_in_backward else AFTER_BACKWARD
        if self._is_recording or is_model_exchange:  # means over other steps would not match the batches
            self._exchanges.append((self._done - self._before, begin_ns, ready_ns, end_ns, kind))
        self._num_bytes += num_bytes

    def on_exchange_change(self) -> None:
        """Counts the bytes so far, and notifies the exchange timer of a new engine."""
        self._count()
        if self._exchange_timer is not None:
            self._exchange_timer.on_ddp_rebuilt(self._is_recording)

    # --- in observed steps, in this order ---

    def on_batch_start(self) -> None:
        """Called when the batch has been fetched."""
        self._begin = self._clock()
        self._fetched = self._fetch or self._begin

    def on_backward_start(self) -> None:
        """Called before each backward pass; a batch may have several."""
        self._backward_again = self._clock()
        if not self._backward_begin:
            self._backward_begin = self._backward_again

    def on_backward_end(self) -> None:
        """Called after each backward pass and the exchanges within it."""
        self._backward_end = self._clock()
        self._backward += self._backward_end - self._backward_again

    def on_optimizer_step(self) -> None:
        """Called before an optimizer steps: this batch is the last of its optimizer step."""
        self._has_stepped = True

    def on_batch_end(self) -> None:
        """Called after the batch, including its optimizer step."""
        end, step = self._clock(), self._done - self._before
        self._batches.append(
            (
                *(step, self._previous_end, self._fetched, self._begin),
                *(self._backward_begin, self._backward_end, end, self._backward),
            )
        )
        self._previous_end = end
        self._fetch = self._backward_begin = self._backward_end = self._backward = 0
        if self._has_stepped and self._exchange_timer is not None:
            times = self._exchange_timer.last_exchange()
            if times is not None:
                self._exchanges.append((step, *times, IN_BACKWARD))
        self._has_stepped = False

    # --- occasionally ---

    def pause(self) -> None:
        """Called when something other than the next batch follows, such as a validation."""
        self._previous_end = 0

    def finish(self, num_done: int, timeout_s: float) -> None:
        """Ends the recording after the last step; rank 0 waits for the records of other ranks.

        Args:
            num_done: Number of optimizer steps done.
            timeout_s: Maximum waiting time, in seconds.
        """
        self._done = num_done
        self._close_window()
        self._set_recording(False)
        if self._mailbox is not None:
            self._mailbox.finish(timeout_s)
            self._process_complete()

    def abandon(self) -> None:
        """Ends the recording immediately; rank 0 keeps the records that it has received."""
        self._set_recording(False)
        if self._mailbox is not None:
            self._mailbox.abandon()

    def _decide(self) -> None:
        step, every_n_steps = self._done - self._before, self._every_n_steps
        if step // every_n_steps > self._number:
            self._close_window()
        begin = self._number * every_n_steps
        first = begin + self._number * _STRIDE % (every_n_steps - self._observed_steps + 1)
        last = first + self._observed_steps
        if not self._number:  # the first steps, and those that are excluded from means
            first, last = 0, min(last + NUM_WARMUP_STEPS, every_n_steps)
        self._set_recording(first <= step < last)
        changes = [boundary for boundary in (first, last, begin + every_n_steps) if boundary > step]
        self._next = self._before + min(changes)

    def _set_recording(self, is_on: bool) -> None:
        if is_on is self._is_recording:
            return
        self._is_recording = is_on
        self._previous_end = 0
        self._set_hooks_enabled(is_on)
        if self._exchange_timer is not None:
            self._exchange_timer.set_recording(is_on)

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
            self._on_windows([window])
        else:
            self._mailbox.post(window)
            self._process_complete()

    def _count(self) -> None:
        if self._count_bytes is not None:
            step = self._done - self._before
            self._num_bytes += self._count_bytes(step - self._counted_to)
            self._counted_to = step

    def _process_complete(self) -> None:
        assert self._mailbox is not None
        for windows in self._mailbox.complete():
            self._on_windows(windows)
