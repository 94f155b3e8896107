"""Elastic pool: workers may exit while a task runs; the other ranks continue, and a restarted worker joins them.

Ranks train in one *world* after another. The main process assigns the ranks of the next world: first to the running
workers that have left the last world, in their order, then to restarted workers that are ready to join. A worker that
has exited is restarted at once; the other workers do not wait for it, unless too few of them remain. A worker may also
leave its world with an exception, such as that of a SIGTERM, and the other workers continue as well.

Limitations: the pool detects the exit of a worker, but not a hang.
"""

import logging
import signal
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import wait
from typing import Any

from lightning_strategies_ext import host_store
from lightning_strategies_ext._system.connections import serve_store
from lightning_strategies_ext.exceptions import JoinError, WorkerDiedError, WorkerRaisedError
from lightning_strategies_ext.host_store import HostStore
from lightning_strategies_ext.launch.processes.pool import GRACE_S, INTERRUPT_GRACE_S, TaskOutcome, WorkerPool
from lightning_strategies_ext.launch.processes.process_settings import ProcessSettings
from lightning_strategies_ext.launch.processes.worker_interface import SentTask, Worker
from lightning_strategies_ext.launch.protocol import (
    JoinedWorld,
    JoinPending,
    MessageToWorker,
    RankAssignment,
    ReadyToJoin,
    RunTask,
    Shutdown,
    TaskDone,
    TaskFailed,
    WorldMembers,
)

log = logging.getLogger(__name__)

_POLL_S = 0.5
#: Number of worlds in a row, left because of an error although no worker has exited, after which the task fails.
_MAX_RESETS_WITHOUT_EXIT = 3
_world_numbers = count()


@dataclass(frozen=True)
class RestartPolicy:
    """Limits for exits of workers, beyond which an elastic task fails.

    Attributes:
        min_workers: Minimum number of workers of a world; fewer workers wait for restarted ones.
        max_restarts: Maximum number of restarts within ``window_s``.
        window_s: Time window of ``max_restarts``, in seconds.
        wait_timeout_s: Seconds that fewer than ``min_workers`` workers wait for restarted ones; None for no limit, if
            nothing can prevent these from starting.
        leaves_by: Types of exceptions with which a worker leaves its world while the other workers continue.
    """

    min_workers: int
    max_restarts: int
    window_s: float
    wait_timeout_s: float | None = None
    leaves_by: tuple[type[BaseException], ...] = (JoinError,)


def run_elastic(
    pool: WorkerPool,
    task: SentTask,
    settings: Sequence[ProcessSettings],
    is_continuation: bool,
    restart_policy: RestartPolicy,
) -> TaskOutcome:
    """Runs a task whose ranks may change. The workers cannot run another task afterwards.

    Args:
        pool: The workers.
        task: The task.
        settings: Settings of each worker.
        is_continuation: Whether the task continues where an earlier one ended.
        restart_policy: Limits for exits of workers.
    """
    run = _ElasticRun(pool, task, settings, is_continuation, restart_policy)
    error: BaseException | None
    try:
        with pool.forwarding_sigterm():
            error = run.run()
    except KeyboardInterrupt as interrupt:
        error = interrupt
        run.interrupt()
    return run.outcome(error)


class _ElasticRun:
    """One elastic task, with the workers of its worlds."""

    def __init__(
        self,
        pool: WorkerPool,
        task: SentTask,
        settings: Sequence[ProcessSettings],
        is_continuation: bool,
        restart_policy: RestartPolicy,
    ) -> None:
        self._pool = pool
        self._task = task
        self._settings = settings
        self._is_continuation = is_continuation
        self._restart_policy = restart_policy
        # This process serves the store, so that the store survives the exit of any worker.
        self._store = host_store.serve() if pool.address is None else serve_store(pool.address)
        self._number = -1  # of the newest world
        self._world: list[Worker] = []
        self._forming: list[Worker] | None = None
        self._joining = list(pool.workers)  # in no world yet
        self._ready: list[Worker] = []
        self._joined: dict[Worker, Any] = {}
        self._replies: dict[Worker, TaskDone | TaskFailed] = {}
        self._leaving: dict[Worker, TaskFailed] = {}  # until the other workers are ready to continue without them
        self._left: set[Worker] = set()  # were in `_leaving` before
        self._exiting: dict[Worker, float] = {}  # those of `_left` to restart once they have exited, with deadlines
        self._exit_errors: list[WorkerDiedError] = []  # since the last world began
        self._leave_reason: str | None = None  # why ranks have left the last world without an agreement
        self._num_resets_without_exit = 0
        self._restarted_at: deque[float] = deque()
        self._too_few_since: float | None = None
        self._has_notified_of_joining = False
        for worker in pool.workers:
            pool.submit(worker, RunTask(settings[worker.rank], is_continuation), task)

    def run(self) -> BaseException | None:
        """Waits until all ranks of a world have run the task, or it has failed; returns the error or None."""
        while True:
            error = self._next_events() or self._form_world()
            if error is not None:
                return self._collect_errors(error)
            if self._remaining and all(worker in self._replies for worker in self._remaining):
                return None

    @property
    def _remaining(self) -> list[Worker]:
        """Workers of the newest world, without those that are leaving it."""
        return [worker for worker in self._world if worker not in self._leaving]

    def outcome(self, error: BaseException | None) -> TaskOutcome:
        """Returns the outcome, by ranks of the newest world; kills the workers that are not in it."""
        alive = [worker for worker in self._remaining if worker.is_alive()]
        world = [worker for worker in self._world if worker in alive or worker in self._replies]
        replies = [self._replies.get(worker) for worker in world]
        self._pool.retain(world)
        has_results = {
            rank
            for rank, reply in enumerate(replies)
            if isinstance(reply, TaskDone) or (isinstance(reply, TaskFailed) and reply.has_results)
        }
        rng = [reply.rng for reply in replies if isinstance(reply, TaskDone)] if error is None else []
        return TaskOutcome(error, has_results, rng)

    def interrupt(self) -> None:
        """Stops all ranks together after Ctrl-C. A second Ctrl-C takes effect at once."""
        with suppress(KeyboardInterrupt):
            self._pool.signal(signal.SIGINT)
            self._collect_replies(INTERRUPT_GRACE_S)

    # --- events ---

    def _next_events(self) -> BaseException | None:
        self._restart_exited()
        done = {*self._replies, *self._leaving, *self._left}
        active = [worker for worker in self._pool.workers if worker not in done]
        wait([waitable for worker in active for waitable in worker.waitables], _POLL_S)
        for worker in active:
            reply = worker.next_reply()
            if isinstance(reply, ReadyToJoin):
                self._on_ready(worker, reply)
            elif isinstance(reply, JoinedWorld):
                self._on_joined(worker, reply)
            elif isinstance(reply, WorkerDiedError):
                error = self._on_worker_exit(worker, reply)
                if error is not None:
                    return error
            elif (
                self._world
                and isinstance(reply, TaskFailed)
                and isinstance(reply.exception, self._restart_policy.leaves_by)
            ):
                self._leaving[worker] = reply
                self._remove_from_next_world(worker)
            elif reply is not None:
                self._replies[worker] = reply
                if isinstance(reply, TaskFailed):
                    return self._pool.error_of({worker.rank: reply})
        return None

    def _on_ready(self, worker: Worker, reply: ReadyToJoin) -> None:
        self._ready.append(worker)
        if reply.reason is not None:
            log.info("Worker %d has left its world: %s", worker.rank, reply.reason)
            self._leave_reason = self._leave_reason or f"worker {worker.rank}: {reply.reason}"

    def _on_joined(self, worker: Worker, reply: JoinedWorld) -> None:
        if self._forming is None:  # a worker of that world has exited since
            self._send(worker, WorldMembers(None))
            return
        self._joined[worker] = reply.member
        if len(self._joined) == len(self._forming):
            self._world, self._forming = self._forming, None
            self._joining = [worker for worker in self._joining if worker not in self._world]
            members = [self._joined[worker] for worker in self._world]
            self._joined.clear()
            self._exit_errors.clear()
            self._leave_reason = None
            self._has_notified_of_joining = False
            for member in self._world:
                self._send(member, WorldMembers(members))

    def _on_worker_exit(self, worker: Worker, exit_error: WorkerDiedError) -> BaseException | None:
        self._exit_errors.append(exit_error)
        was_in_world = worker in self._world
        if was_in_world:
            self._world.remove(worker)
        self._remove_from_next_world(worker)
        if any(other in self._replies for other in self._world):  # they have finished, and this worker has not
            return exit_error
        if not self._remaining:
            return _with_reason(exit_error, "No other worker has a state to continue from. Resume from a checkpoint.")
        if was_in_world:
            for other in self._remaining:
                other.notify_peer_loss(self._number)
        if self._num_restarts_left() <= 0:
            max_restarts, window_s = self._restart_policy.max_restarts, self._restart_policy.window_s
            limit = f"`max_restarts={max_restarts}` within {window_s:.0f} s (`restart_window`)"
            reason = f"The worker is not restarted, because {limit} is reached. Fix the cause, or raise the limit."
            return _with_reason(exit_error, reason)
        log.warning(
            "%s The other workers continue; restarting worker %d (%s).%s",
            exit_error,
            worker.rank,
            self._restart(worker).description,
            "" if was_in_world else " It had not joined them yet.",
        )
        return None

    def _remove_from_next_world(self, worker: Worker) -> None:
        for group in (self._joining, self._ready):
            if worker in group:
                group.remove(worker)
        if self._forming is not None and worker in self._forming:
            self._forming = None
            for other in self._joined:
                if other is not worker:
                    self._send(other, WorldMembers(None))
            self._joined.clear()

    def _num_restarts_left(self) -> int:
        now = time.monotonic()
        while self._restarted_at and now - self._restarted_at[0] > self._restart_policy.window_s:
            self._restarted_at.popleft()
        return self._restart_policy.max_restarts - len(self._restarted_at) - len(self._exiting)

    def _restart(self, worker: Worker) -> Worker:
        """Starts a worker that replaces one that has exited."""
        self._restarted_at.append(time.monotonic())
        replacement: Worker = self._pool.replace(worker.rank)
        self._joining.append(replacement)
        order = RunTask(self._settings[worker.rank], self._is_continuation, is_joining=True)
        self._pool.submit(replacement, order, self._task)
        return replacement

    def _restart_exited(self) -> None:
        for worker, deadline in list(self._exiting.items()):
            if worker.is_alive() and time.monotonic() < deadline:
                continue
            worker.kill()
            del self._exiting[worker]
            log.warning("Worker %d is restarted (%s).", worker.rank, self._restart(worker).description)

    def _release_leaving(self) -> BaseException | None:
        """Lets the other workers continue without those that are leaving.

        Returns:
            The exception of a leaving worker if too few others remain, else None.
        """
        leaving, remaining = self._leaving, self._remaining
        can_join = [worker for worker, failure in leaving.items() if not isinstance(failure.exception, JoinError)]
        restarted = can_join[: max(0, self._num_restarts_left())]
        num_expected = sum(map(len, (remaining, self._joining, self._exiting, restarted)))
        if not remaining or num_expected < self._restart_policy.min_workers:
            self._replies.update(leaving)
            return self._pool.error_of({worker.rank: failure for worker, failure in leaving.items()})
        self._world, self._leaving = remaining, {}
        for worker, failure in leaving.items():
            self._left.add(worker)
            self._send(worker, Shutdown())
            if worker in restarted:
                self._exiting[worker] = time.monotonic() + INTERRUPT_GRACE_S
            consequence = "is restarted once it has exited" if worker in restarted else "is not restarted"
            message = "The other workers continue without worker %d, which %s. Reason: %s"
            log.warning(message, worker.rank, consequence, failure.summary)
        return None

    def _form_world(self) -> BaseException | None:
        if self._forming is not None:
            return None
        if self._number < 0:
            if len(self._ready) == len(self._joining):
                self._form(self._joining)
            return None
        joining = [worker for worker in self._joining if worker in self._ready]
        are_ready = all(worker in self._ready for worker in self._remaining)
        have_left = bool(self._leaving)
        if have_left and (are_ready or self._remaining == self._world):
            error = self._release_leaving()
            if error is not None:
                return error
        if not are_ready:
            if joining and not self._has_notified_of_joining:
                self._send(self._remaining[0], JoinPending())
                self._has_notified_of_joining = True
            return None
        candidates = [*self._world, *joining]
        if len(candidates) >= self._restart_policy.min_workers:
            is_without_exit = self._leave_reason and not self._exit_errors and not have_left
            self._num_resets_without_exit = self._num_resets_without_exit + 1 if is_without_exit else 0
            if self._num_resets_without_exit == _MAX_RESETS_WITHOUT_EXIT:
                return RuntimeError(
                    f"The workers failed to form a new world {_MAX_RESETS_WITHOUT_EXIT} times in a row, although none"
                    f" of them exited. Last reason: {self._leave_reason}"
                )
            self._form(candidates)
            return None
        return self._check_wait_timeout(len(candidates))

    def _check_wait_timeout(self, num_workers: int) -> BaseException | None:
        """Returns an error if fewer than ``min_workers`` workers have waited for too long, else None."""
        wait_timeout_s, now = self._restart_policy.wait_timeout_s, time.monotonic()
        self._too_few_since = self._too_few_since or now
        if wait_timeout_s is None or now - self._too_few_since < wait_timeout_s:
            return None
        missing = [worker for worker in self._joining if worker not in self._ready]
        awaited = " and ".join(f"worker {worker.rank} ({worker.description})" for worker in missing)
        causes = "".join(f"\n{error}" for error in self._exit_errors)
        return RuntimeError(
            f"Only {num_workers} of `min_workers={self._restart_policy.min_workers}` workers are running, and {awaited}"
            f" did not start within {wait_timeout_s:.0f} s (`timeout`).{causes}"
        )

    def _form(self, world: Sequence[Worker]) -> None:
        self._number = next(_world_numbers)
        self._too_few_since = None
        self._forming = list(world)
        self._ready = [worker for worker in self._ready if worker not in world]
        store = self._store.name if isinstance(self._store, HostStore) else (self._store.host, self._store.port)
        for rank, worker in enumerate(world):
            self._send(worker, RankAssignment(rank, len(world), self._number, store))

    def _collect_errors(self, error: BaseException) -> BaseException:
        """Waits for the other workers to fail as well, and returns the exception of the first failure."""
        replies = self._collect_replies(GRACE_S)
        for exit_error in self._exit_errors:  # none from before the newest world, which would not be the cause
            replies.setdefault(exit_error.error_index, exit_error)
        return self._pool.error_of(replies) if isinstance(error, WorkerRaisedError) else error

    def _collect_replies(self, timeout_s: float) -> dict[int, TaskDone | TaskFailed | WorkerDiedError]:
        """Waits for missing replies, and kills workers that do not reply. Workers that wait for a rank receive none.

        Returns:
            Replies of the workers, by their index in the pool.
        """
        deadline = time.monotonic() + timeout_s
        replies: dict[int, TaskDone | TaskFailed | WorkerDiedError] = {
            worker.rank: reply for worker, reply in self._replies.items()
        }
        missing = [
            worker
            for worker in self._pool.workers
            if worker not in {*self._replies, *self._leaving, *self._left} and worker.is_connected and worker.is_alive()
        ]
        while missing and time.monotonic() < deadline:
            for worker in set(missing).intersection(self._ready):
                self._ready.remove(worker)
                self._send(worker, RankAssignment(None))
            wait([waitable for worker in missing for waitable in worker.waitables], _POLL_S)
            for worker in list(missing):
                reply = worker.next_reply()
                if isinstance(reply, ReadyToJoin):
                    self._ready.append(worker)
                elif isinstance(reply, JoinedWorld):
                    self._send(worker, WorldMembers(None))
                elif reply is not None:
                    missing.remove(worker)
                    replies[worker.rank] = reply
                    if not isinstance(reply, WorkerDiedError):
                        self._replies[worker] = reply
        for worker in missing:
            worker.kill()
        return replies

    def _send(self, worker: Worker, message: MessageToWorker) -> None:
        with suppress(OSError):  # it has exited: `next_reply` returns the reason
            worker.send(message)


def _with_reason(error: WorkerDiedError, reason: str) -> WorkerDiedError:
    """Returns the error with the reason why the other workers do not continue."""
    exit_code, signal_name = error.exit_code, error.signal_name
    return WorkerDiedError(f"{error}\n{reason}", error.error_index, error.error_pid, exit_code, signal_name)
