"""A pool of worker processes on this host: started once, given one job after the other, watched all the time.

Whatever happens to a worker, :meth:`WorkerPool.run` returns: with the workers' results, or with one exception that says
which rank failed first and why, and then no worker is left in a state that nobody knows.
"""

import atexit
import logging
import multiprocessing
import multiprocessing.spawn
import os
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any, Literal

import psutil
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from lightning_strategies_ext.launch import fork_server
from lightning_strategies_ext.launch.channel import Channel, Packed
from lightning_strategies_ext.launch.worker import (
    Conditions,
    Done,
    End,
    Failure,
    Job,
    Order,
    Pull,
    RngState,
    Start,
    command,
    serve,
)

log = logging.getLogger(__name__)

WorkerStartMethod = Literal["spawn", "fork", "forkserver"]

#: How long ranks may take to fail as well after one has failed, in seconds, before they are killed.
GRACE_S = 5.0
#: The same once rank 0 has failed: nothing is expected of the others then.
SHORT_GRACE_S = 1.0
#: How long ranks may take to stop together after Ctrl-C, in seconds.
INTERRUPT_GRACE_S = 10.0
#: How long an idle worker may take to end, in seconds.
END_S = 3.0
_POLL_S = 0.5

_pools: "weakref.WeakSet[WorkerPool]" = weakref.WeakSet()


class WorkerRaisedError(ProcessRaisedException):
    """A worker raised an exception; ``__cause__`` is that exception where it could be sent.

    Attributes:
        error_index: The local rank of the worker.
        error_pid: Its process id.
    """


class WorkerDiedError(ProcessExitedException):
    """A worker ended in the middle of its work: killed, out of memory, crashed.

    Attributes:
        error_index: The local rank of the worker.
        error_pid: Its process id.
        exit_code: Its exit code, negative for a signal; -1 where it is not known.
    """


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
    """Worker processes, one per device of this host.

    Args:
        num_workers: How many.
        start_method: "spawn" starts Python anew for each; "fork" forks this process; "forkserver" forks a process
            that has imported torch and Lightning.
        passed_through: Exceptions of a worker that this process should raise as they are.
        inherited: A job that workers get by being forked ("fork" only), for what cannot be pickled.
    """

    def __init__(
        self,
        num_workers: int,
        start_method: WorkerStartMethod,
        passed_through: tuple[type[BaseException], ...] = (),
        inherited: Job | None = None,
    ) -> None:
        if not _pools:
            atexit.unregister(_close_all)
            atexit.register(_close_all)  # after multiprocessing's own, which waits for children: ours runs before it
        self._owner = os.getpid()
        self._passed_through = passed_through
        self._workers: list[_Worker] = []
        self._busy: set[int] = set()  # local ranks whose answer is missing
        _pools.add(self)
        preparation = None
        if start_method != "fork":
            preparation = multiprocessing.spawn.get_preparation_data("lightning-strategies-ext worker")
            preparation["authkey"] = bytes(preparation["authkey"])
        try:
            for rank in range(num_workers):
                self._workers.append(_Worker(rank, start_method, inherited))
            for worker in self._workers:
                with suppress(OSError):  # it died at once: `run` finds out why
                    worker.channel.send(Start(worker.rank, num_workers, preparation))
        except BaseException:
            self.close()
            raise

    @property
    def is_usable(self) -> bool:
        """Whether all workers are there, waiting for a job."""
        return bool(self._workers) and self._owner == os.getpid() and all(worker.is_alive() for worker in self._workers)

    @property
    def pids(self) -> list[int]:
        """Process ids, in order of local ranks."""
        return [worker.pid for worker in self._workers]

    def run(self, job: Packed | None, conditions: Sequence[Conditions], continues: bool) -> Outcome:
        """Runs a job in all workers and waits until each has run it, or one has failed.

        Args:
            job: The job, pickled; None for the one that the workers inherited.
            conditions: For each worker.
            continues: See :class:`.Order`.
        """
        answers: dict[int, Done | Failure | WorkerDiedError] = {}
        self._busy = {worker.rank for worker in self._workers}
        try:
            with self._forwarding_sigterm():
                for worker, condition in zip(self._workers, conditions, strict=True):
                    with suppress(OSError):
                        worker.channel.send(Order(condition, continues, is_inherited=job is None))
                        if job is not None:
                            job.send(worker.channel)
                self._collect(answers, until=lambda: any(not isinstance(answer, Done) for answer in answers.values()))
                if len(answers) < len(self._workers) or any(
                    not isinstance(answer, Done) for answer in answers.values()
                ):
                    self._settle(answers)
        except KeyboardInterrupt as interrupt:
            return self._interrupt(answers, interrupt)
        has_results = {rank for rank, answer in answers.items() if _has_results(answer)}
        rng = [answer.rng for _, answer in sorted(answers.items()) if isinstance(answer, Done)]
        if len(rng) == len(self._workers):
            return Outcome(None, has_results, rng)
        return Outcome(self._error(answers), has_results)

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
                worker.channel.send(Pull())
                if not wait([worker.channel.socket], timeout_s):
                    worker.kill()
                result = worker.channel.receive()
            except (OSError, EOFError):
                raise worker.death() from None
            if isinstance(result, End):
                return
            if isinstance(result, Failure):
                raise self._raised(rank, result)
            yield result
            del result

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
        for worker in workers:
            if worker.rank in self._busy:
                worker.kill()
            with suppress(OSError):
                worker.channel.send(End())
        deadline = time.monotonic() + END_S
        for worker in workers:
            worker.wait(max(0.0, deadline - time.monotonic()))
            worker.kill()
            worker.close()

    @contextmanager
    def _forwarding_sigterm(self) -> Generator[None, None, None]:
        """Lets the workers stop together when this process is asked to, unless the user has seen to that."""
        in_charge = (
            threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        )
        if in_charge:
            signal.signal(signal.SIGTERM, lambda signum, frame: self.signal(signum))
        try:
            yield
        finally:
            if in_charge:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _collect(
        self,
        answers: "dict[int, Done | Failure | WorkerDiedError]",
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

    def _settle(self, answers: "dict[int, Done | Failure | WorkerDiedError]") -> None:
        """After a failure: lets the others fail as well, which tells which was the first; kills those that do not."""

        def nothing_more_is_needed() -> bool:
            return 0 in answers

        self._collect(answers, until=nothing_more_is_needed, timeout_s=GRACE_S)
        self._collect(answers, until=lambda: False, timeout_s=SHORT_GRACE_S)
        for worker in self._workers:
            if worker.rank not in answers:
                log.info("rank %d does not end after another has failed, it is killed", worker.rank)
                worker.kill()

    def _interrupt(
        self, answers: "dict[int, Done | Failure | WorkerDiedError]", interrupt: KeyboardInterrupt
    ) -> Outcome:
        try:
            self.signal(signal.SIGINT)
            self._collect(answers, until=lambda: False, timeout_s=INTERRUPT_GRACE_S)
        except KeyboardInterrupt:  # the user means it
            pass
        return Outcome(interrupt, {rank for rank, answer in answers.items() if _has_results(answer)})

    def _error(self, answers: "dict[int, Done | Failure | WorkerDiedError]") -> BaseException:
        deaths = [answer for answer in answers.values() if isinstance(answer, WorkerDiedError)]
        if deaths:  # what the others say then is that they lost it
            return deaths[0]
        failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, Failure)}
        rank = min(failures, key=lambda rank: failures[rank].time)
        failure = failures[rank]
        exception = failure.exception
        if isinstance(exception, self._passed_through):
            return exception
        return self._raised(rank, failure)

    def _raised(self, rank: int, failure: Failure) -> WorkerRaisedError:
        pid = self._workers[rank].pid
        last_line = failure.trace.strip().splitlines()[-1]
        message = f"rank {rank} (pid {pid}) failed: {last_line}\n\nTrace of rank {rank}:\n{failure.trace}"
        error = WorkerRaisedError(message, rank, pid)
        error.__cause__ = failure.exception
        return error


class _Worker:
    """One worker process, as the main process sees it."""

    def __init__(self, rank: int, start_method: WorkerStartMethod, inherited: Job | None) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        with theirs:
            start = {"spawn": self._spawn, "fork": self._fork, "forkserver": self._fork_from_server}[start_method]
            self.pid, self._exit_code = start(theirs, inherited)
        self._process: psutil.Process | None = None
        with suppress(psutil.NoSuchProcess):
            self._process = psutil.Process(self.pid)
        self._pidfd: int | None = None
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):
                self._pidfd = os.pidfd_open(self.pid)

    def _spawn(self, theirs: socket.socket, inherited: Job | None) -> tuple[int, Callable[[], int | None]]:
        process = subprocess.Popen(
            command(theirs, os.getpid()),
            pass_fds=[theirs.fileno()],
            env=fork_server.environment(),
            start_new_session=True,
        )
        return process.pid, process.poll

    def _fork(self, theirs: socket.socket, inherited: Job | None) -> tuple[int, Callable[[], int | None]]:
        process = multiprocessing.get_context("fork").Process(
            target=_serve_in_own_session, args=(theirs, os.getpid(), inherited)
        )
        process.start()
        assert process.pid is not None
        return process.pid, lambda: process.exitcode

    def _fork_from_server(self, theirs: socket.socket, inherited: Job | None) -> tuple[int, Callable[[], int | None]]:
        server = fork_server.get()
        pid = server.fork(theirs)
        return pid, lambda: server.exit_code(pid)

    @property
    def pollable(self) -> list[Any]:
        """What becomes ready when there is an answer, or the worker has died."""
        return [self.channel] if self._pidfd is None else [self.channel, self._pidfd]

    def answer(self) -> "Done | Failure | WorkerDiedError | None":
        """The worker's answer to a job, its death if it died without one, or None for now."""
        is_dead = not self.is_alive()  # asked first: a worker that answers and then dies has answered
        if wait([self.channel.socket], 0):
            with suppress(EOFError, OSError):
                return self.channel.receive()  # type: ignore[no-any-return]
        return self.death() if is_dead else None

    def is_alive(self) -> bool:
        """Whether the process runs."""
        if self._pidfd is not None:
            return not wait([self._pidfd], 0)
        with suppress(psutil.NoSuchProcess):
            return self._process is not None and self._process.status() != psutil.STATUS_ZOMBIE
        return False

    def death(self) -> WorkerDiedError:
        """Describes how the worker ended; waits a moment for it to have ended."""
        self.wait(1.0)
        code = self._exit_code()
        name = None
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            how = f"was killed by {name}"
            if name == "SIGKILL":
                how += "; the kernel does that when memory runs out"
        else:
            how = "ended" if code is None else f"ended with exit code {code}"
        message = f"rank {self.rank} (pid {self.pid}) {how}, in the middle of its work."
        return WorkerDiedError(message, self.rank, self.pid, -1 if code is None else code, name)

    def signal(self, signum: int) -> None:
        """Sends it a signal, if it runs."""
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def wait(self, timeout_s: float) -> None:
        """Waits until the process has ended."""
        if self._pidfd is not None:
            wait([self._pidfd], timeout_s)
            return
        deadline = time.monotonic() + timeout_s
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)

    def kill(self) -> None:
        """Kills the process, if it runs. The workers of its dataloaders notice within five seconds and end."""
        self.signal(signal.SIGKILL)
        self.wait(END_S)

    def close(self) -> None:
        """Frees what this process holds for it."""
        self._exit_code()  # reaps it
        with suppress(OSError):
            self.channel.socket.shutdown(socket.SHUT_RDWR)
        self.channel.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def _serve_in_own_session(theirs: socket.socket, main_pid: int, inherited: Job | None) -> None:
    os.setsid()
    serve(theirs, main_pid, inherited)


def _has_results(answer: "Done | Failure | WorkerDiedError") -> bool:
    return isinstance(answer, Done) or (isinstance(answer, Failure) and answer.has_results)


def _close_all() -> None:
    for pool in list(_pools):
        pool.close()
    fork_server.close()
