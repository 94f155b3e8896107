"""Execution: who carries out the operations of a process group, and when.

Operations are carried out one after the other, in the order in which they were started. The thread that starts one
works on it as long as it gets on: an exchange in which the ranks are in step so ends before the call returns, and no
other thread is woken for it. Where it would have to sleep until others come, an operation that was started
asynchronously is left to a thread of the group, and the caller goes on to compute. Who waits for a result takes part in
the work.
"""

import math
import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import DistBackendError

from lightning_strategies_ext.shm.native import CompiledAllReduce, SharedCopies
from lightning_strategies_ext.shm.rounds import Rounds
from lightning_strategies_ext.shm.work import ShmWork

#: How long the caller of an asynchronous operation sleeps for others, in seconds, before it leaves the rest to a
#: thread. On a host whose cores are busy a thread that is woken waits for its turn, at each piece of a large tensor:
#: a step with 4 MB of gradients then took up to three times as long.
MAX_CALLER_BLOCK_S: Final = 1e-3
#: C++ code that keeps a handle keeps its C++ half only; what is left when the Python half is gone waits for ever. DDP's
#: `join` does so with the handle of a single float. So the last handles of tensors up to this size, in bytes, are held.
_SMALL_NUM_BYTES: Final = 64
_NUM_SMALL: Final = 256
#: How long the thread that carries out operations has to say for whom it has waited too long, in seconds, before one
#: that waits for it says that it has waited too long.
_OTHERS_WORD_S: Final = 0.5
#: torch before 2.7 loses the Python half of every handle that it asks for in C++. Those are held until somebody waits;
#: who starts operations and never waits for them is forgotten after so many.
_LOSES_HANDLES: Final = torch.__version__ < "2.7"
_MOST_UNCLAIMED: Final = 1024


class Execution:
    """Carries out the operations of one group in one process.

    Args:
        rounds: What they are made of.

    Attributes:
        futures: Held while a future is made or fulfilled.
        unclaimed: Handles that nobody has waited for yet, where torch loses them.
    """

    def __init__(self, rounds: Rounds) -> None:
        self.futures = threading.Lock()
        self.unclaimed: OrderedDict[ShmWork, None] = OrderedDict()
        self._small: deque[ShmWork] = deque(maxlen=_NUM_SMALL)
        self._rounds = rounds
        self._queue: deque[ShmWork] = deque()
        self._is_running = threading.Lock()
        self._todo = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._is_starting_thread = threading.Lock()
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

    def all_reduce(
        self,
        compiled: CompiledAllReduce,
        tensor: Tensor,
        opts: Any,
        timeout: timedelta,
        copies: SharedCopies | None = None,
    ) -> ShmWork:
        """All-reduces one tensor as :meth:`start` does, in fewer steps if nothing has to be waited for.

        Args:
            compiled: What carries it out.
            tensor: Contiguous, and such that it can.
            opts: The caller's.
            timeout: If these have none.
            copies: For the result; None if it belongs into the tensor.

        Raises:
            torch.distributed.DistBackendError: As :meth:`start`.
        """
        work: ShmWork | None = None
        call = compiled.call_for(tensor, opts.reduceOp, copies)
        if not self._queue and self._broken is None and self._is_running.acquire(blocking=False):
            try:
                if not self._queue:
                    if compiled.begin(call):
                        if not is_asynchronous(opts):
                            return self._ended
                        return self._held(ShmWork("all_reduce", None, compiled, [tensor], 0.0, self))
                    progress = compiled.go_on(call)
                    work = ShmWork("all_reduce", progress, compiled, [tensor], deadline_of(opts, timeout), self)
                    # It has begun: what another thread has queued in the meantime comes after it.
                    self._queue.appendleft(work)
            except BaseException as caught:  # the user's Ctrl-C
                self._break(f"all_reduce: {str(caught) or type(caught).__name__}")
                raise
            finally:
                self._is_running.release()
        if work is None:
            work = ShmWork(
                "all_reduce", compiled.go_through([call]), compiled, [tensor], deadline_of(opts, timeout), self
            )
            self._queue.append(work)
        self._begin_queue(work, is_asynchronous(opts))
        return work

    def _begin_queue(self, work: ShmWork, is_asynchronous: bool) -> None:
        # What a future calls in our own thread has nobody else to carry out what it starts.
        if not is_asynchronous or threading.current_thread() is self._thread:
            self.complete(self._held(work) if is_asynchronous else work)
            work.check()
            return
        self._held(work)
        while self._queue and self._is_running.acquire(blocking=False):
            if not self._carry_out_first(until=time.monotonic() + MAX_CALLER_BLOCK_S):
                break
        if self._queue:
            self._leave_to_thread()

    def _held(self, work: ShmWork) -> ShmWork:
        if work.num_bytes <= _SMALL_NUM_BYTES:
            self._small.append(work)
        elif _LOSES_HANDLES:
            self.unclaimed[work] = None
            if len(self.unclaimed) > _MOST_UNCLAIMED:
                self.unclaimed.popitem(last=False)
        return work

    def complete(self, work: ShmWork, until: float = math.inf) -> bool:
        """Returns when an operation has ended; False if it has not at some time, on the monotonic clock in seconds."""
        while not work.is_completed():
            now = time.monotonic()
            if now >= until:
                self._leave_to_thread()
                return False
            latest = min(work.deadline + _OTHERS_WORD_S, until)
            left = math.inf if self._broken is not None else max(latest - now, 0.0)
            if self._is_running.acquire(timeout=min(left, threading.TIMEOUT_MAX)):
                if work.is_completed():
                    self._is_running.release()
                else:
                    self._carry_out_first(until)
            elif work.deadline <= until:  # another thread is at it, and has more time than this one
                self._break(f"{work.name}: it has not ended in the time that it was given")
        return True

    @property
    def waiting_for(self) -> ShmWork | None:
        """The operation that has begun and not ended, if there is one."""
        try:
            return self._queue[0]
        except IndexError:
            return None

    def close(self) -> None:
        """Leaves the other ranks. What is under way fails. A second call does nothing."""
        self._is_closed = True
        self._broken = self._broken or "it was shut down"
        self._rounds.leave()
        # Who waits for a peer finds the connection shut; the descriptor must not become another file's under its hands.
        if self._is_running.acquire(timeout=1.0):
            self._rounds.close()
            self._is_running.release()
            self._end_queue()
        self._todo.release()

    def _carry_out_first(self, until: float) -> bool:
        """Works on the operation that is first in the queue; True if it has ended, or if there was none.

        Called with the lock held, which it releases: what hangs on the future of an operation may start others.
        """
        ended: ShmWork | None = None
        try:
            if self._queue and self._has_ended(self._queue[0], until):
                ended = self._queue.popleft()
        except BaseException:  # the user's Ctrl-C
            ended = self._queue.popleft()
            raise
        finally:
            self._is_running.release()
            if ended is not None:
                ended.tell()
        return ended is not None or not self._queue

    def _has_ended(self, work: ShmWork, until: float) -> bool:
        error: Exception | None = None
        if self._broken is not None:
            error = DistBackendError(f"{work.name}: this process group has failed before: {self._broken}")
        else:
            try:
                # Tensors that were made in inference mode can be written to only in it.
                with torch.inference_mode():
                    if not self._go_on(work, until):
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

    def _go_on(self, work: ShmWork, until: float) -> bool:
        spin_until = 0.0
        while not work.advance():
            now = time.monotonic()
            spin_until = spin_until or now + work.exchange.spin_s
            if now < spin_until:
                os.sched_yield()
                continue
            # What is queued behind it may have less time.
            deadline = min(queued.deadline for queued in tuple(self._queue))
            try:
                work.exchange.wait(min(deadline, until))
            except TimeoutError as error:
                if deadline <= until:
                    raise TimeoutError(f"{error} before the timeout of the operation") from None
                work.state = str(error)
                return False
            spin_until = 0.0
        return True

    def _break(self, reason: str) -> None:
        if self._broken is None:
            self._broken = reason
            self._rounds.break_off(reason)

    def _leave_to_thread(self) -> None:
        if self._is_closed:
            self._end_queue()
            return
        with self._is_starting_thread:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="shm-process-group", daemon=True)
                self._thread.start()
        self._todo.release()

    def _run(self) -> None:
        while not self._is_closed:
            self._todo.acquire()
            self._end_queue()

    def _end_queue(self) -> None:
        while self._queue:
            self._is_running.acquire()
            self._carry_out_first(until=math.inf)


def is_asynchronous(opts: Any) -> bool:
    """Whether the caller goes on while the operation does; so it may where options do not say it (torch before 2.8)."""
    return bool(getattr(opts, "asyncOp", True))


def deadline_of(opts: Any, timeout: timedelta) -> float:
    """Until when an operation may take, on the monotonic clock, in seconds: by its own timeout, or its group's."""
    seconds = opts.timeout.total_seconds()
    return time.monotonic() + (seconds if seconds > 0 else timeout.total_seconds())


_open: "weakref.WeakSet[Execution]" = weakref.WeakSet()


def _disown_all() -> None:
    for execution in _open:
        execution._broken = "it is of the process that this one was forked from"
        # A thread that is not here may have held them.
        execution._is_running, execution._is_starting_thread = threading.Lock(), threading.Lock()
        execution.futures = threading.Lock()


# A forked child has the shared memory too: what it would write there, the others would take for its parent's.
if hasattr(os, "register_at_fork"):  # Windows forks nothing
    os.register_at_fork(after_in_child=_disown_all)


def close_all() -> None:
    """Leaves the other ranks of all groups of this process, whoever holds these."""
    for execution in list(_open):
        execution.close()
