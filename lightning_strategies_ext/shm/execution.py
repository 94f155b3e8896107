"""Execution: who carries out the operations of a process group, and when.

Operations are carried out one after the other, in the order in which they were started. The thread that starts one
works on it as long as it gets on: an exchange in which the ranks are in step so ends before the call returns, and no
other thread is woken for it. Where it would have to sleep until others come, an operation that was started
asynchronously is left to a thread of the group, and the caller goes on to compute. Who waits for a result takes part in
the work.
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.distributed import DistBackendError, Work
from torch.futures import Future

from lightning_strategies_ext.shm.compiled import CompiledAllReduce
from lightning_strategies_ext.shm.rounds import Rounds


class Exchange(Protocol):
    """What carries out an operation with other ranks, as far as one can wait for it."""

    @property
    def spin_s(self) -> float:
        """How long to look for others before going to sleep, in seconds."""

    def wait(self, deadline: float) -> None:
        """Sleeps until something came from others; a TimeoutError if nothing did."""


#: How long the caller of an asynchronous operation sleeps for others, in seconds, before it leaves the rest to a
#: thread. On a host whose cores are busy a thread that is woken waits for its turn, at each piece of a large tensor:
#: a step with 4 MB of gradients then took up to three times as long.
PATIENCE_S: Final = 1e-3


class ShmWork(Work):
    """The handle of an operation that was started.

    Args:
        name: Of the operation, for messages.
        progress: Does the work; yields where others must be waited for. None if it has ended.
        exchange: What to wait with then.
        outputs: What the future of the operation gives: a list of tensors.
        deadline: Until when others may be waited for, on the monotonic clock, in seconds.
        execution: What carries it out.
        is_blocking: Whether it waits where it cannot yield, so that it must not be begun by a thread that goes on.
    """

    def __init__(
        self,
        name: str,
        progress: Generator[None, None, None] | None,
        exchange: Exchange,
        outputs: Any,
        deadline: float,
        execution: "Execution",
        *,
        is_blocking: bool = False,
    ) -> None:
        super().__init__()
        self.name = name
        self.deadline = deadline
        self.exchange = exchange
        self.is_blocking = is_blocking
        self._progress = progress
        self._outputs = outputs
        self._execution = execution
        self._error: Exception | None = None
        self._end: Future[Any] | None = None
        self._future: Future[Any]
        self._is_told = False

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._progress is None

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._progress is None and self._error is None

    def exception(self) -> Exception | None:
        """Why it has failed, if it has."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors that it has filled."""
        return list(self._outputs)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Returns when the tensors are filled.

        Args:
            timeout: Ends the wait earlier than the group's own timeout does; 0 leaves it at that.

        Raises:
            torch.distributed.DistBackendError: If the operation has failed.
        """
        if timeout > timedelta(0):
            self.deadline = min(self.deadline, time.monotonic() + timeout.total_seconds())
        self._execution.complete(self)
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """The same as :meth:`wait`: nothing here runs on a stream."""
        self.wait()

    def get_future(self) -> "Future[Any]":
        """A future of the tensors."""
        with self._execution.futures:
            if self._end is None:
                self._end = Future()
                # Only a future that comes of a callback can fail in a way that C++ code, such as DDP's, understands.
                self._future = self._end.then(self._outcome)
        if self._progress is None:
            self.tell()
        return self._future

    def advance(self) -> bool:
        """Does what can be done now; True when there is nothing left.

        Raises:
            Exception: What the operation has raised.
        """
        assert self._progress is not None
        for _ in self._progress:
            return False
        return True

    def end(self, error: Exception | None) -> None:
        """Marks it as ended."""
        self._error = error
        with self._execution.futures:
            self._progress = None

    def tell(self) -> None:
        """Fulfils the future, if there is one, which calls what others have hung on it."""
        with self._execution.futures:
            if self._end is None or self._is_told:
                return
            self._is_told = True
        self._end.set_result(None)

    def _outcome(self, end: "Future[Any]") -> Any:
        if self._error is not None:
            raise self._error
        return self._outputs


class Execution:
    """Carries out the operations of one group in one process.

    Args:
        rounds: What they are made of.
    """

    def __init__(self, rounds: Rounds) -> None:
        self.futures = threading.Lock()
        self._rounds = rounds
        self._queue: deque[ShmWork] = deque()
        self._is_running = threading.Lock()
        self._todo = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._broken: str | None = None
        self._is_closed = False
        #: What a synchronous operation gives that has ended at once: all of them are alike.
        self._ended = ShmWork("all_reduce", None, rounds, [], 0.0, self)
        _open.add(self)

    def start(self, work: ShmWork, is_asynchronous: bool) -> None:
        """Starts an operation; returns when it has ended, or at once where it is asynchronous and must wait.

        Raises:
            torch.distributed.DistBackendError: If it has failed, unless it is asynchronous: then its handle raises.
        """
        self._queue.append(work)
        self._begin_queue(work, is_asynchronous)

    def all_reduce(self, compiled: CompiledAllReduce, tensor: Tensor, opts: Any, timeout: timedelta) -> ShmWork:
        """All-reduces one tensor as :meth:`start` does, in fewer steps if nothing has to be waited for.

        Args:
            compiled: What carries it out.
            tensor: Contiguous, and such that it can.
            opts: The caller's.
            timeout: If these have none.

        Raises:
            torch.distributed.DistBackendError: As :meth:`start`.
        """
        work: ShmWork | None = None
        if not self._queue and self._broken is None and self._is_running.acquire(blocking=False):
            try:
                if not self._queue:
                    if compiled.begin(tensor, opts.reduceOp):
                        return (
                            ShmWork("all_reduce", None, compiled, [tensor], 0.0, self) if opts.asyncOp else self._ended
                        )
                    work = ShmWork("all_reduce", compiled.go_on(), compiled, [tensor], deadline_of(opts, timeout), self)
                    self._queue.append(work)
            except BaseException:  # the user's Ctrl-C
                self._break("all_reduce: interrupted")
                raise
            finally:
                self._is_running.release()
        if work is None:
            progress = compiled.go_through([tensor], opts.reduceOp)
            work = ShmWork("all_reduce", progress, compiled, [tensor], deadline_of(opts, timeout), self)
            self._queue.append(work)
        self._begin_queue(work, opts.asyncOp)
        return work

    def _begin_queue(self, work: ShmWork, is_asynchronous: bool) -> None:
        # What a future calls in our own thread has nobody else to carry out what it starts.
        if not is_asynchronous or threading.current_thread() is self._thread:
            work.wait()
            return
        while self._queue and self._is_running.acquire(blocking=False):
            if not self._carry_out_first(may_sleep=False):
                break
        if self._queue:
            self._wake_thread()

    def complete(self, work: ShmWork) -> None:
        """Returns when an operation has ended."""
        while not work.is_completed():
            if not self._is_running.acquire(timeout=max(work.deadline - time.monotonic(), 0.0)):
                # Another thread is at it, and has more time than this one.
                self._break(f"{work.name}: it has not ended in the time that was given to wait for it")
                self._is_running.acquire()
            if work.is_completed():
                self._is_running.release()
            else:
                self._carry_out_first(may_sleep=True)

    def close(self) -> None:
        """Leaves the other ranks. What is under way fails. A second call does nothing."""
        self._is_closed = True
        self._broken = self._broken or "it was shut down"
        self._rounds.leave()
        self._todo.release()
        # Who waits for a peer finds the connection shut; the descriptor must not become another file's under its hands.
        if self._is_running.acquire(timeout=1.0):
            self._rounds.close()
            self._is_running.release()

    def _carry_out_first(self, may_sleep: bool) -> bool:
        """Works on the operation that is first in the queue; True if it has ended, or if there was none.

        Called with the lock held, which it releases: what hangs on the future of an operation may start others.
        """
        ended: ShmWork | None = None
        try:
            if self._queue and self._has_ended(self._queue[0], may_sleep):
                ended = self._queue.popleft()
        except BaseException:  # the user's Ctrl-C
            ended = self._queue.popleft()
            raise
        finally:
            self._is_running.release()
            if ended is not None:
                ended.tell()
        return ended is not None or not self._queue

    def _has_ended(self, work: ShmWork, may_sleep: bool) -> bool:
        error: Exception | None = None
        if self._broken is not None:
            error = DistBackendError(f"{work.name}: this process group has failed before: {self._broken}")
        elif work.is_blocking and not may_sleep:
            return False
        else:
            try:
                # Tensors that were made in inference mode can be written to only in it.
                with torch.inference_mode():
                    if not self._go_on(work, may_sleep):
                        return False
            except BaseException as caught:
                self._break(f"{work.name}: {str(caught) or type(caught).__name__}")
                kind = type(caught) if isinstance(caught, DistBackendError) else DistBackendError
                error = kind(f"{self._broken}.")
                if not isinstance(caught, Exception):
                    work.end(error)
                    raise
        work.end(error)
        return True

    def _go_on(self, work: ShmWork, may_sleep: bool) -> bool:
        spin_until = 0.0
        patience_until = time.monotonic() + PATIENCE_S
        while not work.advance():
            now = time.monotonic()
            spin_until = spin_until or now + work.exchange.spin_s
            if now < spin_until:
                os.sched_yield()
                continue
            if may_sleep:
                work.exchange.wait(work.deadline)
            elif now > patience_until or not _slept(work.exchange, patience_until):
                return False
            spin_until = 0.0
        return True

    def _break(self, reason: str) -> None:
        if self._broken is None:
            self._broken = reason
            self._rounds.break_off(reason)

    def _wake_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shm-process-group", daemon=True)
            self._thread.start()
        self._todo.release()

    def _run(self) -> None:
        while True:
            self._todo.acquire()
            if self._is_closed:
                return
            while self._queue:
                self._is_running.acquire()
                self._carry_out_first(may_sleep=True)


def deadline_of(opts: Any, timeout: timedelta) -> float:
    """Until when an operation may take, on the monotonic clock, in seconds: by its own timeout, or its group's."""
    seconds = opts.timeout.total_seconds()
    return time.monotonic() + (seconds if seconds > 0 else timeout.total_seconds())


def _slept(exchange: Exchange, until: float) -> bool:
    try:
        exchange.wait(until)
    except TimeoutError:
        return False
    return True


_open: "weakref.WeakSet[Execution]" = weakref.WeakSet()


def _disown_all() -> None:
    for execution in _open:
        execution._broken = "it is of the process that this one was forked from"


# A forked child has the shared memory too: what it would write there, the others would take for its parent's.
os.register_at_fork(after_in_child=_disown_all)


def close_all() -> None:
    """Leaves the other ranks of all groups of this process, whoever holds these."""
    for execution in list(_open):
        execution.close()
