"""Worker pool: worker processes that start once, run one task after another, and are monitored all the time.

Whatever happens to a worker, :meth:`WorkerPool.run` returns: with the workers' results, or with one exception that
names the rank that failed first and the reason. In the second case no worker remains in an unknown state.
"""

import atexit
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import inf
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from typing import Any

from lightning_strategies_ext.exceptions import WorkerDiedError, WorkerRaisedError
from lightning_strategies_ext.failure.process_exit import MONITOR_EXIT_CODE
from lightning_strategies_ext.launch.processes import fork_server
from lightning_strategies_ext.launch.processes.process_settings import ProcessSettings, RngState
from lightning_strategies_ext.launch.processes.worker_interface import (
    EXIT_TIMEOUT_S,
    SentTask,
    TaskReply,
    Worker,
    WorkerStarter,
    WorkerState,
)
from lightning_strategies_ext.launch.processes.worker_main import WorkerTask
from lightning_strategies_ext.launch.protocol import (
    EndOfResults,
    Ping,
    Pong,
    PullResult,
    RunTask,
    SaveState,
    Shutdown,
    TaskDone,
    TaskFailed,
)

log = logging.getLogger(__name__)

#: Seconds that ranks have to fail as well after one has failed, before they are killed.
GRACE_S = 5.0
#: The same after rank 0 has failed. It is shorter, because the pool then needs no results of the other ranks.
SHORT_GRACE_S = 1.0
#: Seconds that ranks have to stop together after Ctrl-C.
INTERRUPT_GRACE_S = 10.0
_POLL_S = 0.5

_pools: "weakref.WeakSet[WorkerPool]" = weakref.WeakSet()
#: Threads that close pools.
_closing: list[threading.Thread] = []


@dataclass
class TaskOutcome:
    """Outcome of a task.

    Attributes:
        error: Exception for the main process to raise, or None.
        has_results: Local ranks that have results to pull.
        rng: Random states of each rank after the task, in order of local ranks; empty if the task failed.
    """

    error: BaseException | None
    has_results: set[int]
    rng: list[RngState] = field(default_factory=list)


class WorkerPool:
    """Worker processes, one per device.

    Args:
        num_workers: Number of workers.
        starter: Starter of the workers.
        reraised_types: Types of worker exceptions that this process raises unchanged.
        inherited_task: Task that workers inherit in a fork, because it cannot be pickled.

    Attributes:
        starter: Starter of the workers.
        workers: The workers, in order of ranks.
    """

    def __init__(
        self,
        num_workers: int,
        starter: WorkerStarter,
        reraised_types: tuple[type[BaseException], ...] = (),
        inherited_task: WorkerTask | None = None,
    ) -> None:
        if not _pools:
            atexit.unregister(_close_all)
            atexit.register(_close_all)  # last, so that it runs before multiprocessing's handler waits for children
        # A process of multiprocessing waits for its children before it runs `atexit` handlers.
        self._at_exit = Finalize(None, self.close, exitpriority=0)
        self._owner = os.getpid()
        self._reraised_types = reraised_types
        self.starter = starter
        self.workers: list[Worker] = []
        _pools.add(self)
        try:
            for worker in starter.start(num_workers, inherited_task):
                self.workers.append(worker)  # one by one: after an error, `close` ends those that have started
            self.workers.sort(key=lambda worker: worker.rank)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process IDs of the workers, in order of ranks."""
        return [worker.pid for worker in self.workers]

    def is_usable(self) -> bool:
        """Whether all workers reply to a ping and wait for a task."""
        if not self.workers or self._owner != os.getpid():
            return False
        for worker in self.workers:
            worker.send(Ping())
        are_idle = all(worker.state is WorkerState.IDLE for worker in self.workers)
        return are_idle and all(isinstance(worker.wait_for_message(), Pong) for worker in self.workers)

    # --- a task ---

    def run(self, task: SentTask | None, settings: Sequence[ProcessSettings], is_continuation: bool) -> TaskOutcome:
        """Runs a task in all workers and waits until each has run it, or one has failed.

        Args:
            task: The task; None for the task that the workers have inherited.
            settings: Settings of each worker.
            is_continuation: Whether the task continues where an earlier one ended.
        """
        for worker in self.workers:
            worker.reply = None  # also of workers that receive no task because of an interrupt
        try:
            with self.forwarding_sigterm():
                for worker, own in zip(self.workers, settings, strict=True):
                    worker.submit(RunTask(own, is_continuation, is_inherited=task is None), task)
                self.collect_replies(until=self._has_failed)
                if self._has_failed():
                    # The other ranks fail as well, which shows the first failure.
                    self.collect_replies(GRACE_S, until=lambda: self.workers[0].reply is not None)
                    self.collect_replies(SHORT_GRACE_S)
                    self.kill_running()
        except KeyboardInterrupt as interrupt:
            with suppress(KeyboardInterrupt):  # a second Ctrl-C ends the wait
                self.signal(signal.SIGINT)
                self.collect_replies(INTERRUPT_GRACE_S)
            return self.outcome(interrupt)
        return self.outcome(self.error_of(self.replies) if self._has_failed() else None)

    def _has_failed(self) -> bool:
        return any(worker.state in (WorkerState.FAILED, WorkerState.EXITED) for worker in self.workers)

    def next_replies(
        self, states: Sequence[WorkerState] = (WorkerState.RUNNING,), timeout_s: float = inf
    ) -> Iterator[tuple[Worker, Any]]:
        """Waits until workers in one of the given states have replied, at most half a second; yields their replies."""
        workers = [worker for worker in self.workers if worker.state in states]
        wait([waitable for worker in workers for waitable in worker.waitables], max(0.0, min(timeout_s, _POLL_S)))
        for worker in workers:
            reply = worker.next_reply()
            if reply is not None:
                yield worker, reply

    def collect_replies(
        self,
        timeout_s: float = inf,
        until: Callable[[], bool] = lambda: False,
        on_message: Callable[[Worker, Any], None] = lambda worker, message: None,
    ) -> None:
        """Waits until all workers have replied to their task, until a condition holds, or until the timeout has passed.

        Args:
            timeout_s: Timeout in seconds.
            until: The condition.
            on_message: Called with each reply, and with each other message of a worker.
        """
        deadline = time.monotonic() + timeout_s
        while self._running and not until() and time.monotonic() < deadline:
            for worker, message in self.next_replies(timeout_s=deadline - time.monotonic()):
                on_message(worker, message)

    def kill_running(self) -> None:
        """Kills the workers that have not replied to their task."""
        for worker in self._running:
            log.info("Rank %d has not replied in time; killing it.", worker.rank)
            worker.kill()

    @property
    def _running(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.state is WorkerState.RUNNING]

    @property
    def replies(self) -> dict[int, TaskReply]:
        """Replies to the last task by rank, in the order in which they arrived."""
        workers = sorted(self.workers, key=lambda worker: worker.replied_at)
        return {worker.rank: worker.reply for worker in workers if worker.reply is not None}

    def outcome(self, error: BaseException | None) -> TaskOutcome:
        """Returns the outcome of the last task with the given error."""
        has_results = {worker.rank for worker in self.workers if worker.has_results}
        done = [worker.reply for worker in self.workers if isinstance(worker.reply, TaskDone)]
        return TaskOutcome(error, has_results, [reply.rng for reply in done] if error is None else [])

    # --- its results ---

    def pull(self, rank: int, timeout_s: float | None = None) -> Iterator[Any]:
        """Yields the results of a worker's task, in order. The worker produces each result when it is requested.

        Args:
            rank: Local rank of the worker.
            timeout_s: Seconds that the worker has for each result before it is killed; None for no limit.

        Raises:
            WorkerDiedError: If the worker exits.
            WorkerRaisedError: If a result cannot be sent.
        """
        worker = self.workers[rank]
        while True:
            worker.send(PullResult())
            result = worker.wait_for_message(timeout_s)
            if result is None:
                worker.kill()
                result = worker.wait_for_message()
            if isinstance(result, EndOfResults):
                return
            if isinstance(result, WorkerDiedError):
                raise result
            if isinstance(result, TaskFailed):
                raise self._error_from(rank, result)
            yield result
            del result

    def save_state(self, rank: int, path: str) -> str | None:
        """Lets a worker save the state of its stage to a file, because the state could not be pulled.

        Returns:
            None, or the reason why the file was not written.
        """
        worker = self.workers[rank]
        worker.send(SaveState(path))
        reply = worker.wait_for_message()
        if isinstance(reply, WorkerDiedError):
            return str(reply)
        return reply.summary if isinstance(reply, TaskFailed) else None

    # --- the workers ---

    def replace(self, rank: int) -> Worker:
        """Starts a worker that replaces one that has exited, and prepares it while the other workers run."""
        exited = self.workers[rank]
        exited.close()
        worker = self.workers[rank] = self.starter.replace(exited, self.workers)
        return worker

    def retain(self, workers: Sequence[Worker]) -> None:
        """Kills all other workers, and assigns new ranks to the given ones, in their order."""
        for worker in self.workers:
            if worker not in workers:
                worker.kill()
                worker.close()
        for rank, worker in enumerate(workers):
            worker.rank = rank
        self.workers = list(workers)

    def signal(self, signum: int) -> None:
        """Sends a signal to all workers."""
        for worker in self.workers:
            worker.signal(signum)

    def close(self) -> None:
        """Shuts the workers down and waits until they have exited. A second call is a no-op."""
        workers, self.workers = self.workers, []
        if self._owner != os.getpid():
            return
        _pools.discard(self)
        self._at_exit.cancel()
        for worker in workers:
            if worker.state is WorkerState.RUNNING:
                worker.kill()
            worker.send(Shutdown())
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        for worker in workers:
            worker.wait(max(0.0, deadline - time.monotonic()))
            worker.kill()
            worker.close()
        self.starter.close()

    def close_in_background(self) -> None:
        """Closes the pool when its owner is garbage-collected: at once, or in a thread.

        A collection may run within any call of this process. Within a call of Ray Client, which holds a lock, the calls
        that shut down workers on Ray would wait for the lock indefinitely.
        """
        if not self.starter.closes_through_library:
            self.close()
            return
        thread = threading.Thread(target=self.close, daemon=True, name="lightning-strategies-ext worker shutdown")
        try:
            thread.start()
        except RuntimeError:  # no thread can start when the interpreter exits
            self.close()
        else:
            _closing.append(thread)

    @contextmanager
    def forwarding_sigterm(self) -> Generator[None, None, None]:
        """Forwards a SIGTERM to the workers, which then stop together, unless the user has set a handler."""
        previous = signal.getsignal(signal.SIGTERM)
        # Ray sets a handler, which exits, if the user has connected this process to a cluster.
        is_default = previous == signal.SIG_DFL or getattr(previous, "__module__", "").startswith("ray.")
        is_forwarding = threading.current_thread() is threading.main_thread() and is_default
        if is_forwarding:
            signal.signal(signal.SIGTERM, lambda signum, frame: self.signal(signum))
        try:
            yield
        finally:
            if is_forwarding:
                signal.signal(signal.SIGTERM, previous)

    # --- errors ---

    def error_of(self, replies: dict[int, TaskReply]) -> BaseException:
        """Returns the exception that the main process raises after the given replies, by local rank."""
        exits = [reply for reply in replies.values() if isinstance(reply, WorkerDiedError)]
        failures = {rank: reply for rank, reply in replies.items() if isinstance(reply, TaskFailed)}
        # A rank that a failure monitor has terminated or killed is not the cause, if another cause is known.
        is_hang = any(getattr(failure.exception, "is_hang", False) for failure in failures.values())
        monitor_codes = (MONITOR_EXIT_CODE, -signal.SIGKILL) if is_hang else (MONITOR_EXIT_CODE,)
        exits = [error for error in exits if error.exit_code not in monitor_codes] or ([] if failures else exits)
        if exits:  # the other ranks have usually failed because they lost this one
            cause = exits[0]
            secondary = "".join(f"\nThen rank {rank} failed: {failure.summary}" for rank, failure in failures.items())
            error = add_to_error(cause, secondary)
            first = next((failure.first_failure for failure in failures.values() if failure.first_failure), None)
            if first is not None and first.ranks == (cause.error_index,):  # other ranks cannot see its exit code
                first = replace(first, headline=str(cause))
            error.first_failure = first
            return error
        # A rank that failed or was terminated because of another is not the first failure, even if it replied first.
        rank = min(failures, key=lambda rank: (failures[rank].is_secondary, failures[rank].time))
        failure = failures[rank]
        exception = failure.exception
        if isinstance(exception, self._reraised_types):
            return exception
        return self._raised_by_all(failures) or self._error_from(rank, failure)

    def _raised_by_all(self, failures: dict[int, TaskFailed]) -> Exception | None:
        """Returns rank 0's exception if all ranks raised it, of the same class and with the same message; else None.

        Its cause is the :class:`.WorkerRaisedError` with the traceback.
        """
        exceptions = [failure.exception for _, failure in sorted(failures.items()) if not failure.is_secondary]
        first = exceptions[0] if len(exceptions) == len(self.workers) else None
        if not isinstance(first, Exception):
            return None
        if any(type(other) is not type(first) or str(other) != str(first) for other in exceptions):
            return None
        cause = self._error_from(min(failures), failures[min(failures)])
        cause.__cause__ = None  # otherwise the exception would be its own cause
        first.__cause__ = cause
        return first

    def _error_from(self, rank: int, failure: TaskFailed) -> WorkerRaisedError:
        worker = self.workers[rank]
        headline = f"rank {rank} ({worker.description}) failed: {failure.summary}"
        message = f"{headline}\n\nTraceback of rank {rank}:\n{failure.traceback}"
        error = WorkerRaisedError(message, rank, worker.pid)
        error.__cause__ = failure.exception
        error.first_failure = failure.first_failure
        return error


def add_to_error(error: WorkerDiedError, text: str) -> WorkerDiedError:
    """Returns the error with another text at the end of its message."""
    return WorkerDiedError(f"{error}{text}", error.error_index, error.error_pid, error.exit_code, error.signal_name)


def wait_until_closed() -> None:
    """Waits until all pools whose owners were garbage-collected are closed."""
    while _closing:
        _closing.pop().join()


def _close_all() -> None:
    wait_until_closed()
    for pool in list(_pools):
        pool.close()
    fork_server.close()
