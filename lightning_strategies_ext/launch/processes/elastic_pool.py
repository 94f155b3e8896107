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
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from lightning_strategies_ext import host_store
from lightning_strategies_ext._system.connections import serve_store
from lightning_strategies_ext.elastic.membership import Member
from lightning_strategies_ext.exceptions import JoinError, WorkerDiedError, WorkerRaisedError
from lightning_strategies_ext.host_store import HostStore
from lightning_strategies_ext.launch.processes.pool import (
    GRACE_S,
    INTERRUPT_GRACE_S,
    TaskOutcome,
    WorkerPool,
    add_to_error,
)
from lightning_strategies_ext.launch.processes.process_settings import ProcessSettings
from lightning_strategies_ext.launch.processes.worker_interface import SentTask, TaskReply, Worker, WorkerState
from lightning_strategies_ext.launch.protocol import (
    JoinedWorld,
    JoinPending,
    RankAssignment,
    ReadyToJoin,
    RunTask,
    Shutdown,
    TaskFailed,
    WorldMembers,
)

log = logging.getLogger(__name__)

#: States of workers that have not replied to the task.
_ACTIVE = (WorkerState.STARTING, WorkerState.RUNNING)
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
    """Runs a task like :meth:`.WorkerPool.run`, but its ranks may change, within the limits of the restart policy.

    The workers cannot run another task afterwards.
    """
    return _ElasticRun(pool, task, settings, is_continuation, restart_policy).run()


class _TaskError(Exception):
    """Raised if the task fails. The cause is the given exception, or an earlier failure of another worker."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


@dataclass(eq=False)
class _ElasticRun:
    """One elastic task.

    A worker joins, and sends :class:`.ReadyToJoin`. It receives its rank in the next world, replies
    :class:`.JoinedWorld`, and is in that world as soon as all workers of the world have replied. The worker stays there
    until it exits or leaves with an exception. To change to the next world, it sends :class:`.ReadyToJoin` again.
    """

    pool: WorkerPool
    task: SentTask
    settings: Sequence[ProcessSettings]
    is_continuation: bool
    policy: RestartPolicy
    number: int = -1  # number of the newest world
    world: list[Worker] = field(default_factory=list)  # workers of the newest world
    forming: list[Worker] = field(default_factory=list)  # workers of the next world, once it has ranks
    members: dict[Worker, Member] = field(default_factory=dict)  # the workers of `forming` that have joined
    ready: set[Worker] = field(default_factory=set)
    leaving: list[Worker] = field(default_factory=list)  # until the others are ready to continue
    exiting: dict[Worker, float] = field(default_factory=dict)  # have left; deadlines for their exit
    exit_errors: list[WorkerDiedError] = field(default_factory=list)  # since the newest world began
    leave_reason: str | None = None  # why ranks have left the newest world without an agreement
    num_resets_without_exit: int = 0
    restarted_at: deque[float] = field(default_factory=deque)
    below_min_workers_since: float | None = None
    has_notified_of_joining: bool = False

    def __post_init__(self) -> None:
        # This process serves the store, so that the store survives the exit of any worker.
        address = self.pool.starter.address
        self.store = host_store.serve() if address is None else serve_store(address)
        for worker in self.pool.workers:
            worker.submit(RunTask(self.settings[worker.rank], self.is_continuation), self.task)

    def run(self) -> TaskOutcome:
        """Waits until all ranks of a world have run the task, or it has failed; kills the workers outside that world.

        Returns:
            The outcome, by ranks of the newest world.
        """
        error: BaseException | None = None
        try:
            with self.pool.forwarding_sigterm():
                error = self._wait()
        except KeyboardInterrupt as interrupt:
            error = interrupt
            with suppress(KeyboardInterrupt):  # a second Ctrl-C ends the wait
                self.pool.signal(signal.SIGINT)
                self._collect_replies(INTERRUPT_GRACE_S)
        have_replied = WorkerState.IDLE, WorkerState.FAILED
        self.pool.retain([worker for worker in self.remaining if worker.state in have_replied or worker.is_alive()])
        return self.pool.outcome(error)

    def _wait(self) -> BaseException | None:
        try:
            while not self.remaining or any(worker.state is not WorkerState.IDLE for worker in self.remaining):
                self._handle_messages()
                self._form_world()
        except _TaskError as failed:
            return self._first_error(failed.error)
        return None

    @property
    def remaining(self) -> list[Worker]:
        """Workers of the newest world, without those that are leaving it."""
        return [worker for worker in self.world if worker not in self.leaving]

    @property
    def joining(self) -> list[Worker]:
        """Workers that have been in no world so far."""
        return [worker for worker in self.pool.workers if worker.state in _ACTIVE and worker not in self.world]

    # --- messages ---

    def _handle_messages(self) -> None:
        self._restart_exited()
        for worker, message in self.pool.next_replies(_ACTIVE):
            if isinstance(message, ReadyToJoin):
                self._on_ready(worker, message)
            elif isinstance(message, JoinedWorld):
                self._on_joined(worker, message)
            elif isinstance(message, WorkerDiedError):
                self._on_exit(worker, message)
            elif isinstance(message, TaskFailed):
                if not self.world or not isinstance(message.exception, self.policy.leaves_by):
                    raise _TaskError(self.pool.error_of({worker.rank: message}))
                self.leaving.append(worker)
                self._remove_from_next_world(worker)

    def _on_ready(self, worker: Worker, message: ReadyToJoin) -> None:
        self.ready.add(worker)
        if message.reason is not None:
            log.info("Worker %d has left its world: %s", worker.rank, message.reason)
            self.leave_reason = self.leave_reason or f"worker {worker.rank}: {message.reason}"

    def _on_joined(self, worker: Worker, message: JoinedWorld) -> None:
        if worker not in self.forming:  # a worker of that world has exited since
            worker.send(WorldMembers(None))
            return
        self.members[worker] = message.member
        if len(self.members) == len(self.forming):
            self.world, self.forming = self.forming, []
            members = [self.members[worker] for worker in self.world]
            self.members.clear()
            self.exit_errors.clear()
            self.leave_reason = None
            self.has_notified_of_joining = False
            for member in self.world:
                member.send(WorldMembers(members))

    def _on_exit(self, worker: Worker, exit_error: WorkerDiedError) -> None:
        self.exit_errors.append(exit_error)
        was_in_world = worker in self.world
        if was_in_world:
            self.world.remove(worker)
        self._remove_from_next_world(worker)
        if any(other.state is WorkerState.IDLE for other in self.world):  # others have finished the task
            raise _TaskError(exit_error)
        if not self.remaining:
            reason = "No other worker has a state to continue from. Resume from a checkpoint."
            raise _TaskError(add_to_error(exit_error, f"\n{reason}"))
        if was_in_world:
            for other in self.remaining:
                other.notify_peer_loss(self.number)
        if self._num_remaining_restarts() <= 0:
            max_restarts, window_s = self.policy.max_restarts, self.policy.window_s
            limit = f"`max_restarts={max_restarts}` within {window_s:.0f} s (`restart_window`)"
            reason = f"The worker is not restarted, because {limit} is reached. Fix the cause, or raise the limit."
            raise _TaskError(add_to_error(exit_error, f"\n{reason}"))
        log.warning(
            "%s The other workers continue; restarting worker %d (%s).%s",
            exit_error,
            worker.rank,
            self._restart(worker).description,
            "" if was_in_world else " It had not joined them yet.",
        )

    def _remove_from_next_world(self, worker: Worker) -> None:
        self.ready.discard(worker)
        if worker in self.forming:
            for other in self.members:
                if other is not worker:
                    other.send(WorldMembers(None))
            self.forming = []
            self.members.clear()

    # --- restarts ---

    def _num_remaining_restarts(self) -> int:
        now = time.monotonic()
        while self.restarted_at and now - self.restarted_at[0] > self.policy.window_s:
            self.restarted_at.popleft()
        return self.policy.max_restarts - len(self.restarted_at) - len(self.exiting)

    def _restart(self, worker: Worker) -> Worker:
        """Starts a worker that replaces one that has exited."""
        self.restarted_at.append(time.monotonic())
        replacement = self.pool.replace(worker.rank)
        run_task = RunTask(self.settings[worker.rank], self.is_continuation, is_joining=True)
        replacement.submit(run_task, self.task)
        return replacement

    def _restart_exited(self) -> None:
        for worker, deadline in list(self.exiting.items()):
            if worker.is_alive() and time.monotonic() < deadline:
                continue
            worker.kill()
            del self.exiting[worker]
            log.warning("Worker %d is restarted (%s).", worker.rank, self._restart(worker).description)

    def _release_leaving(self) -> None:
        """Lets the other workers continue without those that are leaving, unless too few others remain."""
        remaining = self.remaining
        failures = {worker: worker.reply for worker in self.leaving if isinstance(worker.reply, TaskFailed)}
        can_join = [worker for worker, failure in failures.items() if not isinstance(failure.exception, JoinError)]
        restarted = can_join[: max(0, self._num_remaining_restarts())]
        num_expected = sum(map(len, (remaining, self.joining, self.exiting, restarted)))
        self.leaving = []
        if not remaining or num_expected < self.policy.min_workers:
            raise _TaskError(self.pool.error_of({worker.rank: failure for worker, failure in failures.items()}))
        self.world = remaining
        for worker, failure in failures.items():
            worker.reply = None  # the task does not fail because of it
            worker.send(Shutdown())
            if worker in restarted:
                self.exiting[worker] = time.monotonic() + INTERRUPT_GRACE_S
            consequence = "is restarted once it has exited" if worker in restarted else "is not restarted"
            message = "The other workers continue without worker %d, which %s. Reason: %s"
            log.warning(message, worker.rank, consequence, failure.summary)

    # --- the next world ---

    def _form_world(self) -> None:
        """Assigns the ranks of the next world if its workers are ready."""
        if self.forming:
            return
        joining = [worker for worker in self.joining if worker in self.ready]
        if self.number < 0:
            if len(joining) == len(self.pool.workers):
                self._assign_ranks(joining)
            return
        are_ready = self.ready.issuperset(self.remaining)
        are_any_leaving = bool(self.leaving)
        if are_any_leaving and (are_ready or self.remaining == self.world):
            self._release_leaving()
        if not are_ready:
            if joining and not self.has_notified_of_joining:
                self.remaining[0].send(JoinPending())
                self.has_notified_of_joining = True
            return
        candidates = [*self.world, *joining]
        if len(candidates) < self.policy.min_workers:
            self._check_wait_timeout(len(candidates))
            return
        is_without_exit = self.leave_reason and not self.exit_errors and not are_any_leaving
        self.num_resets_without_exit = self.num_resets_without_exit + 1 if is_without_exit else 0
        if self.num_resets_without_exit == _MAX_RESETS_WITHOUT_EXIT:
            message = (
                f"The workers failed to form a new world {_MAX_RESETS_WITHOUT_EXIT} times in a row, although none of"
                f" them exited. Last reason: {self.leave_reason}"
            )
            raise _TaskError(RuntimeError(message))
        self._assign_ranks(candidates)

    def _check_wait_timeout(self, num_workers: int) -> None:
        """Fails if fewer than ``min_workers`` workers have waited for too long."""
        timeout_s, now = self.policy.wait_timeout_s, time.monotonic()
        self.below_min_workers_since = self.below_min_workers_since or now
        if timeout_s is not None and now - self.below_min_workers_since >= timeout_s:
            missing = [worker for worker in self.joining if worker not in self.ready]
            awaited = " and ".join(f"worker {worker.rank} ({worker.description})" for worker in missing)
            message = (
                f"Only {num_workers} of `min_workers={self.policy.min_workers}` workers are running, and {awaited} did"
                f" not start within {timeout_s:.0f} s (`timeout`)."
            )
            raise _TaskError(RuntimeError("\n".join([message, *map(str, self.exit_errors)])))

    def _assign_ranks(self, world: list[Worker]) -> None:
        self.number = next(_world_numbers)
        self.below_min_workers_since = None
        self.forming = world
        self.ready.difference_update(world)
        store = self.store.name if isinstance(self.store, HostStore) else (self.store.host, self.store.port)
        for rank, worker in enumerate(world):
            worker.send(RankAssignment(rank, len(world), self.number, store))

    # --- the end ---

    def _first_error(self, error: BaseException) -> BaseException:
        """Waits for the other workers to fail as well, and returns the exception of the first failure."""
        self._collect_replies(GRACE_S)
        # Exits before the newest world are excluded, because they cannot be the cause.
        replies: dict[int, TaskReply] = {}
        for exit_error in self.exit_errors:
            replies.setdefault(exit_error.error_index, exit_error)
        for rank, reply in self.pool.replies.items():
            is_later_exit = rank in replies and isinstance(reply, WorkerDiedError)  # the replacement exited, too
            if self.pool.workers[rank] not in self.leaving and not is_later_exit:
                replies[rank] = reply
        return self.pool.error_of(replies) if isinstance(error, WorkerRaisedError) else error

    def _collect_replies(self, timeout_s: float) -> None:
        """Waits for missing replies, and kills workers that do not reply. Workers that wait for a rank receive none."""
        for worker in self.ready:
            if worker.state is WorkerState.RUNNING:
                worker.send(RankAssignment(None))
        self.ready.clear()
        self.pool.collect_replies(timeout_s, on_message=self._refuse_rank)
        self.pool.kill_running()

    def _refuse_rank(self, worker: Worker, message: Any) -> None:
        if isinstance(message, ReadyToJoin):
            worker.send(RankAssignment(None))
        elif isinstance(message, JoinedWorld):
            worker.send(WorldMembers(None))
