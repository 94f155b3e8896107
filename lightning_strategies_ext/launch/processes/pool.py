"""A pool of worker processes: started once, given one job after the other, watched all the time.

Whatever happens to a worker, :meth:`WorkerPool.run` returns: with the workers' results, or with one exception that says
which rank failed first and why, and then no worker is left in a state that nobody knows.
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
from lightning_strategies_ext.launch.processes.worker_interface import EXIT_TIMEOUT_S, SentTask, Worker, WorkerStarter
from lightning_strategies_ext.launch.processes.worker_main import WorkerTask
from lightning_strategies_ext.launch.protocol import PullResult, RunTask, SaveState, Shutdown, TaskDone, TaskFailed

log = logging.getLogger(__name__)

#: How long ranks may take to fail as well after one has failed, in seconds, before they are killed.
GRACE_S = 5.0
#: The same once rank 0 has failed: nothing is expected of the others then.
SHORT_GRACE_S = 1.0
#: How long ranks may take to stop together after Ctrl-C, in seconds.
INTERRUPT_GRACE_S = 10.0
_POLL_S = 0.5

#: What each worker has said to a job, by local rank.
TaskReplies = dict[int, TaskDone | TaskFailed | WorkerDiedError]

_pools: "weakref.WeakSet[WorkerPool]" = weakref.WeakSet()
#: Threads in which pools are closed.
_closing: list[threading.Thread] = []


@dataclass
class TaskOutcome:
    """How a job ended.

    Attributes:
        error: What the main process should raise, or None.
        has_results: The local ranks that have results to pull.
        rng: The generators' states of each rank after the job, in order of local ranks; empty if it failed.
    """

    error: BaseException | None
    has_results: set[int]
    rng: list[RngState] = field(default_factory=list)


class WorkerPool:
    """Worker processes, one per device.

    Args:
        num_workers: How many.
        starter: What starts them.
        reraised_types: Exceptions of a worker that this process should raise as they are.
        inherited_task: A job that workers get by being forked, for what cannot be pickled.
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
            atexit.register(_close_all)  # after multiprocessing's own, which waits for children: ours runs before it
        # A process that multiprocessing itself has started waits for its children before it comes to `atexit`.
        self._at_exit = Finalize(None, self.close, exitpriority=0)
        self._owner = os.getpid()
        self._reraised_types = reraised_types
        self._workers: list[Any] = []  # of the starter's class
        self._busy: set[int] = set()  # local ranks whose answer is missing
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
        """Asks all workers whether they are there, waiting for a job."""
        if not self._workers or self._owner != os.getpid():
            return False
        for worker in self._workers:
            worker.ping()
        return all(worker.is_responsive() for worker in self._workers)

    @property
    def workers(self) -> list[Any]:
        """The workers, each a :class:`.Worker`, in order of ranks."""
        return self._workers

    @property
    def address(self) -> str | None:
        """See :attr:`.WorkerStarter.address`."""
        return self._starter.address

    @property
    def pids(self) -> list[int]:
        """Process ids, in order of ranks."""
        return [worker.pid for worker in self._workers]

    def run(self, task: SentTask | None, settings: Sequence[ProcessSettings], is_continuation: bool) -> TaskOutcome:
        """Runs a job in all workers and waits until each has run it, or one has failed.

        Args:
            task: The job, pickled; None for the one that the workers inherited.
            settings: For each worker.
            is_continuation: See :class:`.RunTask`.
        """
        replies: TaskReplies = {}

        def has_failed() -> bool:
            return any(not isinstance(reply, TaskDone) for reply in replies.values())

        self._busy = {worker.rank for worker in self._workers}
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
        """Yields the results of a worker's job, one by one; each is written when it is asked for.

        Args:
            rank: The worker's local rank.
            timeout_s: How long it may take for each before it is killed.

        Raises:
            WorkerDiedError: If the worker dies.
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
                raise worker.death() from None
            if isinstance(result, Shutdown):
                return
            if isinstance(result, TaskFailed):
                raise self._error_from(rank, result)
            yield result
            del result

    def save_state(self, rank: int, path: str, timeout_s: float | None = None) -> str | None:
        """Lets a worker write the state of its stage to a file, where it cannot be pulled.

        Args:
            rank: The worker's local rank.
            path: The file.
            timeout_s: How long it may take.

        Returns:
            None, or why there is no such file.
        """
        worker = self._workers[rank]
        try:
            worker.send(SaveState(path))
            if not worker.poll(timeout_s):
                return f"rank {rank} did not write it in {timeout_s} s"
            reply = worker.receive()
        except (OSError, EOFError):
            return str(worker.death())
        return reply.summary if isinstance(reply, TaskFailed) else None

    def replace(self, rank: int) -> Any:
        """Starts a worker in the place of one that has died; it gets ready while others work."""
        dead = self._workers[rank]
        dead.close()
        worker = self._workers[rank] = self._starter.replace(dead, len(self._workers), self._inherited_task)
        return worker

    def retain(self, workers: Sequence[Worker]) -> None:
        """Ends all others; these have other ranks from here on, in this order."""
        for worker in self._workers:
            if worker not in workers:
                worker.kill()
                worker.close()
        for rank, worker in enumerate(workers):
            worker.rank = rank
        self._workers = list(workers)

    def signal(self, signum: int) -> None:
        """Sends a signal to every worker."""
        for worker in self._workers:
            worker.signal(signum)

    def close(self) -> None:
        """Ends the workers, and waits until they have ended. A second call does no harm."""
        workers, self._workers = self._workers, []
        if self._owner != os.getpid():
            return
        _pools.discard(self)
        self._at_exit.cancel()
        for worker in workers:
            if worker.rank in self._busy:
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
        """The same, when what it was for is garbage: at once, or in a thread.

        Garbage is collected within whatever this process is at. Within a call of Ray Client, which has a lock then, the
        calls that end workers on Ray would wait for that for ever.
        """
        if not self._starter.closes_through_library:
            self.close()
            return
        thread = threading.Thread(target=self.close, daemon=True, name="lightning-strategies-ext end of workers")
        try:
            thread.start()
        except RuntimeError:  # none starts any more when the interpreter ends
            self.close()
        else:
            _closing.append(thread)

    def submit(self, worker: Worker, order: RunTask, task: SentTask | None) -> None:
        """Orders a worker to run a job; None is the one that it inherited."""
        with suppress(OSError):  # it died: who waits for its answer finds out why
            worker.submit(order, task)

    @contextmanager
    def forwarding_sigterm(self) -> Generator[None, None, None]:
        """Lets the workers stop together when this process is asked to, unless the user has seen to that."""
        usual = signal.getsignal(signal.SIGTERM)
        # Ray sets one of its own, which exits, where the user has connected this process to a cluster.
        is_default = usual == signal.SIG_DFL or getattr(usual, "__module__", "").startswith("ray.")
        in_charge = threading.current_thread() is threading.main_thread() and is_default
        if in_charge:
            signal.signal(signal.SIGTERM, lambda signum, frame: self.signal(signum))
        try:
            yield
        finally:
            if in_charge:
                signal.signal(signal.SIGTERM, usual)

    def _collect(
        self,
        replies: TaskReplies,
        until: Callable[[], bool],
        timeout_s: float | None = None,
    ) -> None:
        """Waits for the answers that are still missing, until a condition holds or the time is over."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not until() and len(replies) < len(self._workers):
            missing = [worker for worker in self._workers if worker.rank not in replies]
            left = _POLL_S if deadline is None else min(_POLL_S, deadline - time.monotonic())
            if left < 0:
                return
            wait([what for worker in missing for what in worker.waitables], left)
            for worker in missing:
                reply = worker.next_reply()
                if reply is not None:
                    replies[worker.rank] = reply
                    self._busy.discard(worker.rank)

    def _collect_failures(self, replies: TaskReplies) -> None:
        """After a failure: lets the others fail as well, which tells which was the first; kills those that do not."""

        def nothing_more_is_needed() -> bool:
            return 0 in replies

        self._collect(replies, until=nothing_more_is_needed, timeout_s=GRACE_S)
        self._collect(replies, until=lambda: False, timeout_s=SHORT_GRACE_S)
        for worker in self._workers:
            if worker.rank not in replies:
                log.info("rank %d does not end after another has failed, it is killed", worker.rank)
                worker.kill()

    def _interrupt(self, replies: TaskReplies, interrupt: KeyboardInterrupt) -> TaskOutcome:
        try:
            self.signal(signal.SIGINT)
            self._collect(replies, until=lambda: False, timeout_s=INTERRUPT_GRACE_S)
        except KeyboardInterrupt:  # the user means it
            pass
        return TaskOutcome(interrupt, {rank for rank, reply in replies.items() if _has_results(reply)})

    def error_of(self, replies: TaskReplies) -> BaseException:
        """What the main process should raise for what workers have said, by local rank."""
        deaths = [reply for reply in replies.values() if isinstance(reply, WorkerDiedError)]
        failures = {rank: reply for rank, reply in replies.items() if isinstance(reply, TaskFailed)}
        # Those that a watch has ended had another reason, if there is another.
        stuck = any(getattr(failure.exception, "is_stuck", False) for failure in failures.values())
        ended = (MONITOR_EXIT_CODE, -signal.SIGKILL) if stuck else (MONITOR_EXIT_CODE,)
        deaths = [death for death in deaths if death.exit_code not in ended] or ([] if failures else deaths)
        if deaths:  # what the others say then is, as a rule, that they lost it
            death = deaths[0]
            others = "".join(f"\nThen rank {rank} failed: {failure.summary}" for rank, failure in failures.items())
            error = WorkerDiedError(
                f"{death}{others}", death.error_index, death.error_pid, death.exit_code, death.signal_name
            )
            first = next((failure.first_failure for failure in failures.values() if failure.first_failure), None)
            if first is not None and first.ranks == (death.error_index,):  # how, only the process that started it knows
                first = replace(first, headline=str(death))
            error.first_failure = first
            return error
        # Who has failed because another had, or had to be ended for it, was not the first, even if it is heard first.
        rank = min(failures, key=lambda rank: (failures[rank].is_secondary, failures[rank].time))
        failure = failures[rank]
        exception = failure.exception
        if isinstance(exception, self._reraised_types):
            return exception
        return self._raised_by_all(failures) or self._error_from(rank, failure)

    def _raised_by_all(self, failures: dict[int, TaskFailed]) -> Exception | None:
        """Returns the exception that all ranks raised, of the same class and with the same message; rank 0's one.

        Its cause is the :class:`.WorkerRaisedError` with the traceback.
        """
        exceptions = [failure.exception for _, failure in sorted(failures.items()) if not failure.is_secondary]
        first = exceptions[0] if len(exceptions) == len(self._workers) else None
        if not isinstance(first, Exception):
            return None
        if any(type(other) is not type(first) or str(other) != str(first) for other in exceptions):
            return None
        cause = self._error_from(min(failures), failures[min(failures)])
        cause.__cause__ = None  # it would be its own cause
        first.__cause__ = cause
        return first

    def _error_from(self, rank: int, failure: TaskFailed) -> WorkerRaisedError:
        worker = self._workers[rank]
        headline = f"rank {rank} ({worker.description}) failed: {failure.summary}"
        message = f"{headline}\n\nTrace of rank {rank}:\n{failure.traceback}"
        error = WorkerRaisedError(message, rank, worker.pid)
        error.__cause__ = failure.exception
        error.first_failure = failure.first_failure
        return error


def _has_results(reply: TaskDone | TaskFailed | WorkerDiedError) -> bool:
    return isinstance(reply, TaskDone) or (isinstance(reply, TaskFailed) and reply.has_results)


def wait_until_closed() -> None:
    """Returns when all pools are closed that were garbage."""
    while _closing:
        _closing.pop().join()


def _close_all() -> None:
    wait_until_closed()
    for pool in list(_pools):
        pool.close()
    fork_server.close()
