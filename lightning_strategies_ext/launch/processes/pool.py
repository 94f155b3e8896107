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
    Worker,
    WorkerStarter,
    WorkerState,
)
from lightning_strategies_ext.launch.processes.worker_main import WorkerTask
from lightning_strategies_ext.launch.protocol import (
    EndOfResults,
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
#: The same once rank 0 has failed: the pool needs nothing from the other ranks then.
SHORT_GRACE_S = 1.0
#: Seconds that ranks have to stop together after Ctrl-C.
INTERRUPT_GRACE_S = 10.0
_POLL_S = 0.5

#: Replies of the workers to a task, by local rank.
TaskReplies = dict[int, TaskDone | TaskFailed | WorkerDiedError]

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
        self._workers: list[Worker] = []
        _pools.add(self)
        self._starter = starter
        self._inherited_task = inherited_task
        try:
            for rank in range(num_workers):
                self._workers.append(starter.start(rank, num_workers, inherited_task))
            self._workers = starter.prepare(self._workers)
        except BaseException:
            self.close()
            raise

    def is_usable(self) -> bool:
        """Whether all workers reply to a ping and wait for a task."""
        if not self._workers or self._owner != os.getpid():
            return False
        for worker in self._workers:
            worker.ping()
        return all(worker.state is WorkerState.IDLE and worker.is_responsive() for worker in self._workers)

    @property
    def workers(self) -> list[Any]:
        """The workers, each a :class:`.Worker`, in order of ranks."""
        return self._workers

    @property
    def address(self) -> str | None:
        """Address at which the workers reach this host, see :attr:`.WorkerStarter.address`."""
        return self._starter.address

    @property
    def pids(self) -> list[int]:
        """Process IDs of the workers, in order of ranks."""
        return [worker.pid for worker in self._workers]

    def run(self, task: SentTask | None, settings: Sequence[ProcessSettings], is_continuation: bool) -> TaskOutcome:
        """Runs a task in all workers and waits until each has run it, or one has failed.

        Args:
            task: The task; None for the task that the workers have inherited.
            settings: Settings of each worker.
            is_continuation: Whether the task continues where an earlier one ended.
        """
        replies: TaskReplies = {}

        def has_failed() -> bool:
            return any(not isinstance(reply, TaskDone) for reply in replies.values())

        try:
            with self.forwarding_sigterm():
                for worker, own in zip(self._workers, settings, strict=True):
                    self.submit(worker, RunTask(own, is_continuation, is_inherited=task is None), task)
                self._collect(replies, until=has_failed)
                if has_failed():
                    self._collect_failures(replies)
        except KeyboardInterrupt as interrupt:
            return self._interrupt(replies, interrupt)
        has_results = {rank for rank, reply in replies.items() if _has_results(reply)}
        rng = [reply.rng for _, reply in sorted(replies.items()) if isinstance(reply, TaskDone)]
        if len(rng) == len(self._workers):
            return TaskOutcome(None, has_results, rng)
        return TaskOutcome(self.error_of(replies), has_results)

    def pull(self, rank: int, timeout_s: float | None = None) -> Iterator[Any]:
        """Yields the results of a worker's task, in order. The worker produces each result when it is requested.

        Args:
            rank: Local rank of the worker.
            timeout_s: Seconds that the worker has for each result before it is killed; None for no limit.

        Raises:
            WorkerDiedError: If the worker exits.
            WorkerRaisedError: If a result cannot be sent.
        """
        worker = self._workers[rank]
        while True:
            try:
                worker.send(PullResult())
                if not worker.poll(timeout_s):
                    worker.kill()
                result = worker.receive()
            except (OSError, EOFError):
                raise worker.exit_error() from None
            if isinstance(result, EndOfResults):
                return
            if isinstance(result, TaskFailed):
                raise self._error_from(rank, result)
            yield result
            del result

    def save_state(self, rank: int, path: str, timeout_s: float | None = None) -> str | None:
        """Saves the state of a worker's stage to a file, because it could not be pulled.

        Args:
            rank: Local rank of the worker, which writes the file.
            path: Path of the file.
            timeout_s: Seconds that the worker has; None for no limit.

        Returns:
            None, or the reason why the file was not written.
        """
        worker = self._workers[rank]
        try:
            worker.send(SaveState(path))
            if not worker.poll(timeout_s):
                return f"rank {rank} did not write the file within {timeout_s} s"
            reply = worker.receive()
        except (OSError, EOFError):
            return str(worker.exit_error())
        return reply.summary if isinstance(reply, TaskFailed) else None

    def replace(self, rank: int) -> Any:
        """Starts a worker that replaces one that has exited, and prepares it while the other workers run."""
        dead = self._workers[rank]
        dead.close()
        worker = self._workers[rank] = self._starter.replace(dead, len(self._workers), self._inherited_task)
        return worker

    def retain(self, workers: Sequence[Worker]) -> None:
        """Kills all other workers, and assigns new ranks to the given ones, in their order."""
        for worker in self._workers:
            if worker not in workers:
                worker.kill()
                worker.close()
        for rank, worker in enumerate(workers):
            worker.rank = rank
        self._workers = list(workers)

    def signal(self, signum: int) -> None:
        """Sends a signal to all workers."""
        for worker in self._workers:
            worker.signal(signum)

    def close(self) -> None:
        """Shuts the workers down and waits until they have exited. A second call is a no-op."""
        workers, self._workers = self._workers, []
        if self._owner != os.getpid():
            return
        _pools.discard(self)
        self._at_exit.cancel()
        for worker in workers:
            if worker.state is WorkerState.RUNNING:
                worker.kill()
            with suppress(OSError):
                worker.send(Shutdown())
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        for worker in workers:
            worker.wait(max(0.0, deadline - time.monotonic()))
            worker.kill()
            worker.close()
        self._starter.close()

    def close_in_background(self) -> None:
        """Closes the pool when its owner is garbage-collected: at once, or in a thread.

        A collection may run within any call of this process. Within a call of Ray Client, which holds a lock, the calls
        that shut down workers on Ray would wait for the lock indefinitely.
        """
        if not self._starter.closes_through_library:
            self.close()
            return
        thread = threading.Thread(target=self.close, daemon=True, name="lightning-strategies-ext worker shutdown")
        try:
            thread.start()
        except RuntimeError:  # no thread can start when the interpreter exits
            self.close()
        else:
            _closing.append(thread)

    def submit(self, worker: Worker, order: RunTask, task: SentTask | None) -> None:
        """Sends a task for a worker to run; None for the task that it has inherited."""
        with suppress(OSError):  # it has exited: `next_reply` returns the reason
            worker.submit(order, task)

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

    def _collect(
        self,
        replies: TaskReplies,
        until: Callable[[], bool],
        timeout_s: float | None = None,
    ) -> None:
        """Waits for the missing replies, until a condition holds or the timeout has passed."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not until() and len(replies) < len(self._workers):
            missing = [worker for worker in self._workers if worker.rank not in replies]
            remaining_s = _POLL_S if deadline is None else min(_POLL_S, deadline - time.monotonic())
            if remaining_s < 0:
                return
            wait([waitable for worker in missing for waitable in worker.waitables], remaining_s)
            for worker in missing:
                reply = worker.next_reply()
                if reply is not None:
                    replies[worker.rank] = reply

    def _collect_failures(self, replies: TaskReplies) -> None:
        """Waits for the other ranks to fail as well, which shows the first failure; kills those that do not."""

        def has_rank_0_replied() -> bool:
            return 0 in replies

        self._collect(replies, until=has_rank_0_replied, timeout_s=GRACE_S)
        self._collect(replies, until=lambda: False, timeout_s=SHORT_GRACE_S)
        for worker in self._workers:
            if worker.rank not in replies:
                log.info("Rank %d does not exit although another rank has failed; killing it.", worker.rank)
                worker.kill()

    def _interrupt(self, replies: TaskReplies, interrupt: KeyboardInterrupt) -> TaskOutcome:
        try:
            self.signal(signal.SIGINT)
            self._collect(replies, until=lambda: False, timeout_s=INTERRUPT_GRACE_S)
        except KeyboardInterrupt:  # a second one: without waiting
            pass
        return TaskOutcome(interrupt, {rank for rank, reply in replies.items() if _has_results(reply)})

    def error_of(self, replies: TaskReplies) -> BaseException:
        """Returns the exception that the main process raises after the given replies, by local rank."""
        exits = [reply for reply in replies.values() if isinstance(reply, WorkerDiedError)]
        failures = {rank: reply for rank, reply in replies.items() if isinstance(reply, TaskFailed)}
        # A rank that a failure monitor has terminated or killed is not the cause, if another cause is known.
        is_hang = any(getattr(failure.exception, "is_stuck", False) for failure in failures.values())
        monitor_codes = (MONITOR_EXIT_CODE, -signal.SIGKILL) if is_hang else (MONITOR_EXIT_CODE,)
        exits = [error for error in exits if error.exit_code not in monitor_codes] or ([] if failures else exits)
        if exits:  # the other ranks have usually failed because they lost this one
            cause = exits[0]
            secondary = "".join(f"\nThen rank {rank} failed: {failure.summary}" for rank, failure in failures.items())
            error = WorkerDiedError(
                f"{cause}{secondary}", cause.error_index, cause.error_pid, cause.exit_code, cause.signal_name
            )
            first = next((failure.first_failure for failure in failures.values() if failure.first_failure), None)
            if first is not None and first.ranks == (cause.error_index,):  # other ranks cannot see its exit code
                first = replace(first, headline=str(cause))
            error.first_failure = first
            return error
        # A rank that failed, or was terminated, because of another rank is not the first, even if it replied first.
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
        first = exceptions[0] if len(exceptions) == len(self._workers) else None
        if not isinstance(first, Exception):
            return None
        if any(type(other) is not type(first) or str(other) != str(first) for other in exceptions):
            return None
        cause = self._error_from(min(failures), failures[min(failures)])
        cause.__cause__ = None  # otherwise the exception would be its own cause
        first.__cause__ = cause
        return first

    def _error_from(self, rank: int, failure: TaskFailed) -> WorkerRaisedError:
        worker = self._workers[rank]
        headline = f"rank {rank} ({worker.description}) failed: {failure.summary}"
        message = f"{headline}\n\nTraceback of rank {rank}:\n{failure.traceback}"
        error = WorkerRaisedError(message, rank, worker.pid)
        error.__cause__ = failure.exception
        error.first_failure = failure.first_failure
        return error


def _has_results(reply: TaskDone | TaskFailed | WorkerDiedError) -> bool:
    return isinstance(reply, TaskDone) or (isinstance(reply, TaskFailed) and reply.has_results)


def wait_until_closed() -> None:
    """Waits until all pools whose owners were garbage-collected are closed."""
    while _closing:
        _closing.pop().join()


def _close_all() -> None:
    wait_until_closed()
    for pool in list(_pools):
        pool.close()
    fork_server.close()
