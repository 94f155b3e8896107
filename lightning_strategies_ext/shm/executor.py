"""Execution: which thread executes the operations of a process group, and when.

Operations are executed one after the other, in the order in which they were started. The thread that starts an
operation executes it. An operation for which all ranks are ready therefore ends before the call returns, and wakes no
other thread. If an asynchronous operation has to wait for other ranks, its caller polls, then sleeps, for up to a
millisecond (:data:`MAX_CALLER_BLOCK_S`). After that, a thread of the group takes over and the caller continues. A
thread that waits for a result helps to execute the operation.
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

from lightning_strategies_ext.shm.links import MismatchFoundError
from lightning_strategies_ext.shm.native import NativeAllReduce, SharedCopies
from lightning_strategies_ext.shm.rounds import Rounds
from lightning_strategies_ext.shm.work import ShmWork

#: Seconds for which the caller of an asynchronous operation waits for other ranks before a thread takes over. On a host
#: with busy cores, that thread waits for a core at each piece of a large tensor: without this wait, a step with 4 MB of
#: gradients took up to three times as long.
MAX_CALLER_BLOCK_S: Final = 1e-3
#: A handle has a part in C++ and a part in Python. C++ code stores only the C++ part: if the Python part is freed, a
#: wait of the C++ code never returns. DDP's `join` stores a handle for a single float that way. The last handles of
#: tensors up to this size, in bytes, are kept alive.
_SMALL_NUM_BYTES: Final = 64
_NUM_SMALL: Final = 256
#: Seconds after a deadline in which the executing thread can raise its error, which names the awaited ranks, before a
#: thread that waits for it raises a less specific error.
_ERROR_MARGIN_S: Final = 0.5
#: torch before 2.7 drops the Python part of every handle that C++ code requests. Such handles are kept alive until a
#: thread waits for them, up to a maximum number, because a caller may never wait.
_LOSES_HANDLES: Final = torch.__version__ < "2.7"
_MAX_UNWAITED: Final = 1024


#: If a yield takes longer, in seconds, another process has used the core for a time slice. If every poll yielded, an
#: operation would take as long as the slices of all busy processes. Polls therefore do not yield for some time.
_LONG_YIELD_S: Final = 1e-3
_NO_YIELD_S: Final = 0.1


class OperationExecutor:
    """Executes the operations of one process group in one process.

    Args:
        rounds: Rounds of the group.

    Attributes:
        futures_lock: Lock that is held while a future is created or fulfilled.
        unwaited: Handles that no thread has waited for yet, if torch drops their Python part.
    """

    def __init__(self, rounds: Rounds) -> None:
        self.futures_lock = threading.Lock()
        self.unwaited: OrderedDict[ShmWork, None] = OrderedDict()
        self._small: deque[ShmWork] = deque(maxlen=_NUM_SMALL)
        self._rounds = rounds
        self._queue: deque[ShmWork] = deque()
        self._execution_lock = threading.Lock()
        self._wakeups = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._thread_lock = threading.Lock()
        self._broken: str | None = None
        self._is_closed = False
        self._next_yield_at = 0.0
        #: Handle of every synchronous operation that ends at once.
        self._completed_work = ShmWork("all_reduce", None, rounds, [], 0.0, self)
        _open.add(self)

    def start(self, work: ShmWork, is_asynchronous: bool) -> None:
        """Starts an operation. Returns when it has ended; an asynchronous operation may continue afterwards.

        Raises:
            torch.distributed.DistBackendError: If a synchronous operation has failed; the handle of an asynchronous
                operation raises this error instead.
        """
        self._queue.append(work)
        self._start_queued(work, is_asynchronous)

    def all_reduce(
        self,
        native: NativeAllReduce,
        tensor: Tensor,
        opts: Any,
        timeout: timedelta,
        copies: SharedCopies | None = None,
    ) -> ShmWork:
        """All-reduces one tensor like :meth:`start`, with less overhead if all ranks are ready.

        Args:
            native: All-reduce of the native library.
            tensor: Contiguous tensor that the native library supports.
            opts: Options of the caller.
            timeout: Timeout of the operation if ``opts`` has none.
            copies: Memory for the result; None to reduce the tensor in place.

        Raises:
            torch.distributed.DistBackendError: If a synchronous operation has failed; the handle of an asynchronous
                operation raises this error instead.
        """
        work: ShmWork | None = None
        call = native.prepare(tensor, opts.reduceOp, copies)
        if not self._queue and self._broken is None and self._execution_lock.acquire(blocking=False):
            try:
                if not self._queue:
                    if native.begin(call):
                        if not is_asynchronous(opts):
                            return self._completed_work
                        return self._retain_handle(ShmWork("all_reduce", None, native, [tensor], 0.0, self))
                    progress = native.resume(call)
                    work = ShmWork("all_reduce", progress, native, [tensor], deadline_of(opts, timeout), self)
                    # The operation has begun, so it precedes operations that other threads have queued in the meantime.
                    self._queue.appendleft(work)
            except BaseException as caught:  # including Ctrl-C of the user
                self._fail_group(f"all_reduce: {str(caught) or type(caught).__name__}")
                raise
            finally:
                self._execution_lock.release()
        if work is None:
            work = ShmWork("all_reduce", native.run([call]), native, [tensor], deadline_of(opts, timeout), self)
            self._queue.append(work)
        self._start_queued(work, is_asynchronous(opts))
        return work

    def _start_queued(self, work: ShmWork, is_asynchronous: bool) -> None:
        # Operations that a future's callback starts in the group's thread have no other thread that executes them.
        if not is_asynchronous or threading.current_thread() is self._thread:
            self.complete(self._retain_handle(work) if is_asynchronous else work)
            work.raise_if_failed()
            return
        self._retain_handle(work)
        while self._queue and self._execution_lock.acquire(blocking=False):
            if not self._advance_first(until=time.monotonic() + MAX_CALLER_BLOCK_S):
                break
        if self._queue:
            self._wake_thread()

    def _retain_handle(self, work: ShmWork) -> ShmWork:
        if work.num_bytes <= _SMALL_NUM_BYTES:
            self._small.append(work)
        elif _LOSES_HANDLES:
            self.unwaited[work] = None
            if len(self.unwaited) > _MAX_UNWAITED:
                self.unwaited.popitem(last=False)
        return work

    def complete(self, work: ShmWork, until: float = math.inf) -> bool:
        """Waits until an operation has ended, as described in :meth:`.Completion.complete`; helps to execute it."""
        while not work.is_completed():
            now = time.monotonic()
            if now >= until:
                self._wake_thread()
                return False
            latest = min(work.deadline + _ERROR_MARGIN_S, until)
            remaining_s = math.inf if self._broken is not None else max(latest - now, 0.0)
            if self._execution_lock.acquire(timeout=min(remaining_s, threading.TIMEOUT_MAX)):
                if work.is_completed():
                    self._execution_lock.release()
                else:
                    self._advance_first(until)
            elif work.deadline <= until:  # another thread executes the operation, with a later deadline
                self._fail_group(f"{work.name}: it did not complete within its timeout")
        return True

    @property
    def current_work(self) -> ShmWork | None:
        """The first operation that has started and not ended, or None."""
        try:
            return self._queue[0]
        except IndexError:
            return None

    def close(self) -> None:
        """Leaves the group. Operations in progress fail. Repeated calls are no-ops."""
        self._is_closed = True
        self._broken = self._broken or "it was shut down"
        self._rounds.leave()
        # A thread that waits for a peer detects the shutdown. The socket is closed only afterwards, so that its
        # descriptor is not reused for another file during the wait.
        if self._execution_lock.acquire(timeout=1.0):
            self._rounds.close()
            self._execution_lock.release()
            self._drain_queue()
        self._wakeups.release()

    def _advance_first(self, until: float) -> bool:
        """Advances the first operation of the queue. Returns whether it has ended, or the queue is empty.

        The caller holds the lock, and this method releases it: callbacks of the future may start other operations.
        """
        completed: ShmWork | None = None
        try:
            if self._queue and self._try_to_finish(self._queue[0], until):
                completed = self._queue[0]
        except BaseException as raised:  # such as Ctrl-C of the user, at any line
            completed = self._queue[0] if self._queue else None
            if completed is not None and not completed.is_completed():  # a thread may wait for it
                self._fail_group(f"{completed.name}: {str(raised) or type(raised).__name__}")
                completed.end(DistBackendError(f"{self._broken}."))
            raise
        finally:
            if completed is not None:
                self._queue.popleft()
            self._execution_lock.release()
            if completed is not None:
                completed.fulfill_future()
        return completed is not None or not self._queue

    def _try_to_finish(self, work: ShmWork, until: float) -> bool:
        error: Exception | None = None
        if self._broken is not None:
            error = DistBackendError(f"{work.name}: this process group has failed before: {self._broken}")
        else:
            try:
                # Tensors that were created in inference mode can be written only in inference mode.
                with torch.inference_mode():
                    if not self._advance(work, until):
                        return False
            except BaseException as raised:
                caught = work.waitable.reply_to_mismatch(raised) if isinstance(raised, MismatchFoundError) else raised
                self._fail_group(f"{work.name}: {str(caught) or type(caught).__name__}")
                kind = type(caught) if isinstance(caught, DistBackendError) else DistBackendError
                error = kind(f"{self._broken}.")
                if not isinstance(caught, Exception):
                    work.end(error)
                    raise
        work.end(error)
        return True

    def _advance(self, work: ShmWork, until: float) -> bool:
        poll_end = 0.0
        while not work.advance():
            now = time.monotonic()
            poll_end = poll_end or now + work.waitable.poll_s
            if now < poll_end:
                if now >= self._next_yield_at:
                    os.sched_yield()
                    if (after := time.monotonic()) - now > _LONG_YIELD_S:
                        self._next_yield_at = after + _NO_YIELD_S
                continue
            # Operations later in the queue may have earlier deadlines.
            deadline = min(queued.deadline for queued in tuple(self._queue))
            try:
                work.waitable.wait(min(deadline, until))
            except TimeoutError as error:
                if deadline <= until:
                    raise TimeoutError(f"{error} before the timeout of the operation") from None
                work.status_text = str(error)
                return False
            poll_end = 0.0
        return True

    def _fail_group(self, reason: str) -> None:
        if self._broken is None:
            self._broken = reason
            self._rounds.abort(reason)

    def _wake_thread(self) -> None:
        if self._is_closed:
            self._drain_queue()
            return
        with self._thread_lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="shm-process-group", daemon=True)
                self._thread.start()
        self._wakeups.release()

    def _run(self) -> None:
        while not self._is_closed:
            self._wakeups.acquire()
            self._drain_queue()

    def _drain_queue(self) -> None:
        while self._queue:
            self._execution_lock.acquire()
            self._advance_first(until=math.inf)


def is_asynchronous(opts: Any) -> bool:
    """Returns whether an operation is asynchronous; True for options that do not state it (torch before 2.8)."""
    return bool(getattr(opts, "asyncOp", True))


def deadline_of(opts: Any, timeout: timedelta) -> float:
    """Returns the deadline of an operation on the monotonic clock, in seconds, by its own timeout or its group's."""
    seconds = opts.timeout.total_seconds()
    return time.monotonic() + (seconds if seconds > 0 else timeout.total_seconds())


_open: "weakref.WeakSet[OperationExecutor]" = weakref.WeakSet()


def _disable_inherited() -> None:
    for executor in _open:
        executor._broken = "it belongs to the process from which this process was forked"
        # Threads of the parent, which do not exist in this process, may have held the locks.
        executor._execution_lock, executor._thread_lock = threading.Lock(), threading.Lock()
        executor.futures_lock = threading.Lock()


# A forked child has the shared memory, too: peers would mistake its data for data of its parent.
if hasattr(os, "register_at_fork"):  # Windows forks nothing
    os.register_at_fork(after_in_child=_disable_inherited)


def close_all() -> None:
    """Closes all ``shm`` process groups of this process, also those that are still referenced."""
    for executor in list(_open):
        executor.close()
