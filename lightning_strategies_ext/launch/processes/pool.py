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
from lightning_strategies_ext.launch.processes.conditions import Conditions, RngState
from lightning_strategies_ext.launch.processes.starter import END_S, SentJob, Starter, Worker
from lightning_strategies_ext.launch.processes.worker import Job
from lightning_strategies_ext.launch.protocol import Done, End, Failure, Order, Pull, Save

log = logging.getLogger(__name__)

#: How long ranks may take to fail as well after one has failed, in seconds, before they are killed.
GRACE_S = 5.0
#: The same once rank 0 has failed: nothing is expected of the others then.
SHORT_GRACE_S = 1.0
#: How long ranks may take to stop together after Ctrl-C, in seconds.
INTERRUPT_GRACE_S = 10.0
_POLL_S = 0.5

#: What each worker has said to a job, by local rank.
Answers = dict[int, Done | Failure | WorkerDiedError]

_pools: "weakref.WeakSet[WorkerPool]" = weakref.WeakSet()
#: Threads in which pools are closed.
_closing: list[threading.Thread] = []


@dataclass
class Outcome:
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
        passed_through: Exceptions of a worker that this process should raise as they are.
        inherited: A job that workers get by being forked, for what cannot be pickled.
    """

    def __init__(
        self,
        num_workers: int,
        starter: Starter,
        passed_through: tuple[type[BaseException], ...] = (),
        inherited: Job | None = None,
    ) -> None:
        if not _pools:
            atexit.unregister(_close_all)
            atexit.register(_close_all)  # after multiprocessing's own, which waits for children: ours runs before it
        # A process that multiprocessing itself has started waits for its children before it comes to `atexit`.
        self._at_exit = Finalize(None, self.close, exitpriority=0)
        self._owner = os.getpid()
        self._passed_through = passed_through
        self._workers: list[Any] = []  # of the starter's class
        self._busy: set[int] = set()  # local ranks whose answer is missing
        _pools.add(self)
        self._starter = starter
        self._inherited = inherited
        try:
            for rank in range(num_workers):
                self._workers.append(starter.start(rank, num_workers, inherited))
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
        return all(worker.is_there() for worker in self._workers)

    @property
    def workers(self) -> list[Any]:
        """The workers, each a :class:`.Worker`, in order of ranks."""
        return self._workers

    @property
    def address(self) -> str | None:
        """See :attr:`.Starter.address`."""
        return self._starter.address

    @property
    def pids(self) -> list[int]:
        """Process ids, in order of ranks."""
        return [worker.pid for worker in self._workers]

    def run(self, job: SentJob | None, conditions: Sequence[Conditions], continues: bool) -> Outcome:
        """Runs a job in all workers and waits until each has run it, or one has failed.

        Args:
            job: The job, pickled; None for the one that the workers inherited.
            conditions: For each worker.
            continues: See :class:`.Order`.
        """
        answers: Answers = {}

        def has_failed() -> bool:
            return any(not isinstance(answer, Done) for answer in answers.values())

        self._busy = {worker.rank for worker in self._workers}
        try:
            with self.forwarding_sigterm():
                for worker, condition in zip(self._workers, conditions, strict=True):
                    self.give(worker, Order(condition, continues, is_inherited=job is None), job)
                self._collect(answers, until=has_failed)
                if has_failed():
                    self._settle(answers)
        except KeyboardInterrupt as interrupt:
            return self._interrupt(answers, interrupt)
        has_results = {rank for rank, answer in answers.items() if _has_results(answer)}
        rng = [answer.rng for _, answer in sorted(answers.items()) if isinstance(answer, Done)]
        if len(rng) == len(self._workers):
            return Outcome(None, has_results, rng)
        return Outcome(self.error_of(answers), has_results)

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
                worker.send(Pull())
                if not worker.has_said(timeout_s):
                    worker.kill()
                result = worker.receive()
            except (OSError, EOFError):
                raise worker.death() from None
            if isinstance(result, End):
                return
            if isinstance(result, Failure):
                raise self._raised(rank, result)
            yield result
            del result

    def save(self, rank: int, path: str, timeout_s: float | None = None) -> str | None:
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
            worker.send(Save(path))
            if not worker.has_said(timeout_s):
                return f"rank {rank} did not write it in {timeout_s} s"
            answer = worker.receive()
        except (OSError, EOFError):
            return str(worker.death())
        return answer.summary if isinstance(answer, Failure) else None

    def replace(self, rank: int) -> Any:
        """Starts a worker in the place of one that has died; it gets ready while others work."""
        dead = self._workers[rank]
        dead.close()
        worker = self._workers[rank] = self._starter.replace(dead, len(self._workers), self._inherited)
        return worker

    def keep(self, workers: Sequence[Worker]) -> None:
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
                worker.send(End())
        deadline = time.monotonic() + END_S
        for worker in workers:
            worker.wait(max(0.0, deadline - time.monotonic()))
            worker.kill()
            worker.close()
        self._starter.close()

    def close_as_garbage(self) -> None:
        """The same, when what it was for is garbage: at once, or in a thread.

        Garbage is collected within whatever this process is at. Within a call of Ray Client, which has a lock then, the
        calls that end workers on Ray would wait for that for ever.
        """
        if not self._starter.ends_by_calls:
            self.close()
            return
        thread = threading.Thread(target=self.close, daemon=True, name="lightning-strategies-ext end of workers")
        try:
            thread.start()
        except RuntimeError:  # none starts any more when the interpreter ends
            self.close()
        else:
            _closing.append(thread)

    def give(self, worker: Worker, order: Order, job: SentJob | None) -> None:
        """Orders a worker to run a job; None is the one that it inherited."""
        with suppress(OSError):  # it died: who waits for its answer finds out why
            worker.give(order, job)

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
        answers: Answers,
        until: Callable[[], bool],
        timeout_s: float | None = None,
    ) -> None:
        """Waits for the answers that are still missing, until a condition holds or the time is over."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not until() and len(answers) < len(self._workers):
            missing = [worker for worker in self._workers if worker.rank not in answers]
            left = _POLL_S if deadline is None else min(_POLL_S, deadline - time.monotonic())
            if left < 0:
                return
            wait([what for worker in missing for what in worker.pollable], left)
            for worker in missing:
                answer = worker.answer()
                if answer is not None:
                    answers[worker.rank] = answer
                    self._busy.discard(worker.rank)

    def _settle(self, answers: Answers) -> None:
        """After a failure: lets the others fail as well, which tells which was the first; kills those that do not."""

        def nothing_more_is_needed() -> bool:
            return 0 in answers

        self._collect(answers, until=nothing_more_is_needed, timeout_s=GRACE_S)
        self._collect(answers, until=lambda: False, timeout_s=SHORT_GRACE_S)
        for worker in self._workers:
            if worker.rank not in answers:
                log.info("rank %d does not end after another has failed, it is killed", worker.rank)
                worker.kill()

    def _interrupt(self, answers: Answers, interrupt: KeyboardInterrupt) -> Outcome:
        try:
            self.signal(signal.SIGINT)
            self._collect(answers, until=lambda: False, timeout_s=INTERRUPT_GRACE_S)
        except KeyboardInterrupt:  # the user means it
            pass
        return Outcome(interrupt, {rank for rank, answer in answers.items() if _has_results(answer)})

    def error_of(self, answers: Answers) -> BaseException:
        """What the main process should raise for what workers have said, by local rank."""
        deaths = [answer for answer in answers.values() if isinstance(answer, WorkerDiedError)]
        failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, Failure)}
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
            first = next((failure.first for failure in failures.values() if failure.first), None)
            if first is not None and first.ranks == (death.error_index,):  # how, only the process that started it knows
                first = replace(first, headline=str(death))
            error.first_failure = first
            return error
        # Who has failed because another had, or had to be ended for it, was not the first, even if it is heard first.
        rank = min(failures, key=lambda rank: (failures[rank].is_consequence, failures[rank].time))
        failure = failures[rank]
        exception = failure.exception
        if isinstance(exception, self._passed_through):
            return exception
        return self._raised_by_all(failures) or self._raised(rank, failure)

    def _raised_by_all(self, failures: dict[int, Failure]) -> Exception | None:
        """Returns the exception that all ranks raised, of the same class and with the same message; rank 0's one.

        Its cause is the :class:`.WorkerRaisedError` with the traceback.
        """
        exceptions = [failure.exception for _, failure in sorted(failures.items()) if not failure.is_consequence]
        first = exceptions[0] if len(exceptions) == len(self._workers) else None
        if not isinstance(first, Exception):
            return None
        if any(type(other) is not type(first) or str(other) != str(first) for other in exceptions):
            return None
        cause = self._raised(min(failures), failures[min(failures)])
        cause.__cause__ = None  # it would be its own cause
        first.__cause__ = cause
        return first

    def _raised(self, rank: int, failure: Failure) -> WorkerRaisedError:
        worker = self._workers[rank]
        message = f"rank {rank} ({worker.where}) failed: {failure.summary}\n\nTrace of rank {rank}:\n{failure.trace}"
        error = WorkerRaisedError(message, rank, worker.pid)
        error.__cause__ = failure.exception
        error.first_failure = failure.first
        return error


def _has_results(answer: Done | Failure | WorkerDiedError) -> bool:
    return isinstance(answer, Done) or (isinstance(answer, Failure) and answer.has_results)


def wait_until_closed() -> None:
    """Returns when all pools are closed that were garbage."""
    while _closing:
        _closing.pop().join()


def _close_all() -> None:
    wait_until_closed()
    for pool in list(_pools):
        pool.close()
    fork_server.close()
