"""Main process's side of a worker on Ray. Calls of its actor and its link carry messages and detect its exit."""

import logging
import math
import os
import re
import signal
import threading
import time
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

import ray
from ray.exceptions import RayError, RaySystemError, RayTaskError
from typing_extensions import override

from lightning_strategies_ext.exceptions import WorkerDiedError
from lightning_strategies_ext.launch.processes.worker_interface import EXIT_TIMEOUT_S, SentTask, Worker, WorkerState
from lightning_strategies_ext.launch.protocol import (
    LinkMessageToWorker,
    MessageToWorker,
    PeerLost,
    Ping,
    Pong,
    RunTask,
    SendSignal,
    Shutdown,
    TaskFailed,
    WorkerRankInfo,
)
from lightning_strategies_ext.launch.ray import cluster
from lightning_strategies_ext.launch.ray.actor import WorkerHostInfo
from lightning_strategies_ext.launch.ray.link_relay import RelayedLinkServer
from lightning_strategies_ext.launch.ray.payloads import RayPayload
from lightning_strategies_ext.launch.ray.worker_link import LinkServer, WorkerLink

log = logging.getLogger(__name__)

#: Seconds after which a warning is logged that a replacement worker has not started.
_WARN_AFTER_S = 30.0
#: Seconds to wait for Ray's reason for the exit of an actor whose link is closed.
_REASON_S = 3.0
#: The same if the other workers continue without the worker.
_SHORT_REASON_S = 0.25


class SentPayload(SentTask):
    """A task in Ray's object store."""

    def __init__(self, payload: RayPayload) -> None:
        self.reference: Any = ray.put(payload)

    @override
    def close(self) -> None:
        self.reference = None


class RayWorker(Worker):
    """A worker on Ray.

    Args:
        rank: Index among the pool's workers; preliminary until all ranks are assigned.
        number: Number of the worker, unique for its link server.
        bundle: Index of the worker's bundle in the placement group.
        link_server: Server of the worker's link.
        options: Ray's options of the actor, see ``ActorClass.options``.
        actor_class: Ray's class of the actor.
        is_elastic: Whether a worker on another host may replace this one while a task runs.

    Attributes:
        rank: Index among the pool's workers.
        bundle: Index of the worker's bundle in the placement group.
        link: Link to the worker.
        info: Information about the worker and its host; None until the worker has started.
        rank_info: Rank info of the worker; None until it is assigned.
    """

    def __init__(
        self,
        rank: int,
        number: int,
        bundle: int,
        link_server: LinkServer | RelayedLinkServer,
        options: dict[str, Any],
        actor_class: Any,
        is_elastic: bool,
    ) -> None:
        self.rank = rank
        self.bundle = bundle
        self._is_elastic = is_elastic
        self.info: WorkerHostInfo | None = None
        self.rank_info: WorkerRankInfo | None = None
        self._wakeup_fd, self._wakeup_writer = os.pipe()
        os.set_blocking(self._wakeup_writer, False)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._is_open = True
        self._waiting: Future[Any] | None = None
        self._error: BaseException | None = None
        self._steps: Generator[Future[Any], Any, None] | None = None
        self._step: Future[Any] | None = None
        self._unsent_task: tuple[RunTask, SentPayload] | None = None
        self._warn_at = math.inf
        self.link: WorkerLink = link_server.expect(number, self._wake_up)
        self._actor: Any = actor_class.options(**options).remote(link_server.address, link_server.secret, number)

    # --- description ---

    @property
    @override
    def pid(self) -> int:
        """Process id of the worker on its host; 0 until the worker has started."""
        return 0 if self.info is None else self.info.pid

    @property
    @override
    def description(self) -> str:
        return "not started by Ray so far" if self.info is None else f"pid {self.pid} on {self.info.address}"

    @property
    @override
    def environment(self) -> dict[str, str]:
        assert self.rank_info is not None
        assert self.info is not None
        variables = {"MASTER_ADDR": self.rank_info.main_address, "MASTER_PORT": str(self.rank_info.main_port)}
        interface = self.info.interface
        may_span_hosts = self.rank_info.num_nodes > 1 or self._is_elastic
        if may_span_hosts and interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
            variables["GLOO_SOCKET_IFNAME"] = interface
        return variables

    # --- messages ---

    def call(self, method: str, *args: Any) -> Any:
        """Calls a method of the actor, and returns a future of its result."""
        future = getattr(self._actor, method).remote(*args).future()
        future.add_done_callback(lambda future: self._wake_up())
        return future

    def start_up(self, steps: Generator["Future[Any]", Any, None]) -> None:
        """Sets the worker up while others run: :meth:`next_reply` continues the setup, and submits the task at its end.

        Args:
            steps: Generator that yields futures, and receives their results. If it raises, the worker has failed.
        """
        self._steps, self._step = steps, next(steps)
        self._warn_at = time.monotonic() + _WARN_AFTER_S

    @property
    @override
    def is_connected(self) -> bool:
        return self._steps is None

    def _advance_startup(self) -> None:
        while self._steps is not None and self._error is None and self._step is not None and self._step.done():
            try:
                self._step = self._steps.send(self._step.result())
            except StopIteration:
                self._steps = None
                self.enter(WorkerState.IDLE)
                if self._unsent_task is not None:
                    (order, task), self._unsent_task = self._unsent_task, None
                    with suppress(OSError):  # `next_reply` returns the error
                        self.submit(_task_for(self, order), task)
            except Exception as error:
                self._error = error
        if self.info is None and time.monotonic() > self._warn_at:
            log.warning(
                "Worker %d has not started. Free resources in Ray: %s.", self.rank, cluster.free_resources_text()
            )
            self._warn_at = math.inf

    @override
    def send(self, message: MessageToWorker) -> None:
        if isinstance(message, LinkMessageToWorker):
            self.link.send(message)
        else:
            self._send(message, None)

    @override
    def notify_peer_loss(self, world: int) -> None:
        self.link.send(PeerLost(world))

    @override
    def _submit(self, order: RunTask, task: SentPayload | None) -> None:
        assert task is not None
        if self.state is WorkerState.STARTING:
            self._unsent_task = order, task
        else:
            self._send(order, task.reference)

    def _send(self, message: Any, task: Any) -> None:
        if not self.is_alive():
            raise OSError("the worker has exited")
        try:
            if isinstance(message, Shutdown):
                self._actor.end.remote()
                return
            self._waiting = self._actor.handle.remote(message, task).future()
            self._waiting.add_done_callback(lambda future: self._wake_up())
            if isinstance(message, RunTask):
                self._actor.finish_reply.remote()
        except Exception as error:  # Ray may have exited too
            self._error = error
            raise OSError("the worker has exited") from error

    @override
    def poll(self, timeout_s: float | None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._has_reply() and self.is_alive():
            remaining_s = None if deadline is None else deadline - time.monotonic()
            if remaining_s is not None and remaining_s <= 0:
                return False
            self._wait_for_wakeup(remaining_s)
        return True

    @override
    def receive(self) -> Any:
        self.poll(None)
        if not self._has_reply() and self._waiting is not None:
            wait_until(self._waiting, _REASON_S)
        if not self._has_reply():
            raise EOFError("the worker has exited")
        waiting, self._waiting = self._waiting, None
        assert waiting is not None
        try:
            actor_reply = waiting.result()
        except RayError as error:
            # If the error is not Ray's own, the actor runs, and its method has failed, for example for lack of a class.
            if isinstance(error, RayTaskError) and not _is_of_ray_itself(error):
                return _failure_of(error)
            self._error = error
            raise EOFError("the worker has exited") from error
        self.link.wait_for_output(actor_reply.num_output_bytes)
        reply = actor_reply.load()
        if isinstance(reply, TaskFailed):  # hosts have different clocks: the failure received first is the first
            reply = replace(reply, time=time.monotonic())
        return reply

    def _has_reply(self) -> bool:
        return self._waiting is not None and self._waiting.done()

    @property
    @override
    def waitables(self) -> list[Any]:
        return [self._wakeup_fd]

    @override
    def _next_reply(self) -> Any:
        self._drain_wakeups()
        self._advance_startup()
        is_dead = not self.is_alive()
        if self.link.messages:
            self._wake_up()  # there may be more messages
            return self.link.messages.popleft()
        if self._has_reply():
            with suppress(EOFError):
                return self.receive()
        return self.exit_error() if is_dead or self._error is not None else None

    @override
    def ping(self) -> None:
        with suppress(OSError):
            self.send(Ping())

    @override
    def is_responsive(self) -> bool:
        if self._waiting is None:
            return False
        with suppress(EOFError):
            return isinstance(self.receive(), Pong)
        return False

    # --- exit ---

    @override
    def is_alive(self) -> bool:
        return self._is_open and self._error is None and not self.link.closed.is_set()

    @override
    def exit_error(self) -> WorkerDiedError:
        if self._error is None and self._waiting is not None:
            wait_until(self._waiting, _SHORT_REASON_S if self._is_elastic else _REASON_S)
            if self._waiting.done() and isinstance(self._waiting.exception(), RayError):
                self._error = self._waiting.exception()
        message = f"rank {self.rank} ({self.description}) exited in the middle of its work."
        if isinstance(self._error, RayError):
            message += f" Ray reports: {reason_from_ray(self._error)}"
        elif self._error is not None:
            message = f"rank {self.rank} ({self.description}) could not be started: {self._error}"
        return WorkerDiedError(message, self.rank, self.pid, -1)

    @override
    def signal(self, signum: int) -> None:
        if signum == signal.SIGKILL:
            self.kill()
        elif self.is_alive():
            self.link.send(SendSignal(signum))

    @override
    def wait(self, timeout_s: float) -> None:
        self.link.closed.wait(timeout_s)

    @override
    def kill(self) -> None:
        if self._is_open and not self.link.closed.is_set():
            self._kill_actor()
            if self.link.is_connected:
                self.wait(EXIT_TIMEOUT_S)

    @override
    def close(self) -> None:
        self.enter(WorkerState.EXITED)
        self._kill_actor()  # it may never have connected
        self._actor = self._waiting = self._steps = self._step = self._unsent_task = None
        with self._lock:
            if self._is_open:
                self._is_open = False
                os.close(self._wakeup_fd)
                os.close(self._wakeup_writer)

    def _kill_actor(self) -> None:
        if ray.is_initialized():  # otherwise Ray would start a cluster for the call
            with suppress(Exception):  # Ray may have exited
                ray.kill(self._actor)

    # --- wakeups ---

    def _wake_up(self) -> None:
        with self._lock:
            if self._is_open:
                with suppress(BlockingIOError):
                    os.write(self._wakeup_writer, b"!")

    def _wait_for_wakeup(self, timeout_s: float | None) -> None:
        if wait([self._wakeup_fd], 0.5 if timeout_s is None else min(timeout_s, 0.5)):
            self._drain_wakeups()

    def _drain_wakeups(self) -> None:
        while self._is_open and wait([self._wakeup_fd], 0):
            os.read(self._wakeup_fd, 64)


def _task_for(worker: RayWorker, order: RunTask) -> RunTask:
    """Returns a message that was written for the replaced worker, with this worker's environment variables."""
    settings = order.settings
    return replace(order, settings=replace(settings, environment={**settings.environment, **worker.environment}))


def wait_until(future: "Future[Any]", timeout_s: float) -> None:
    """Waits for a future without raising its exception."""
    with suppress(Exception):
        future.exception(timeout_s)


def reason_from_ray(error: BaseException) -> str:
    """Returns Ray's reason for the exit of an actor, without its advice and numbers."""
    text = str(error).strip()
    found = re.search(r"Worker exit detail: (.*?)(?: Some common causes|$)", text, re.DOTALL)
    reason = (text.splitlines()[-1] if found is None else found.group(1)).strip().rstrip(".") + "."
    if found is not None and "connection error" in reason:
        reason += " The worker was killed or crashed; the kernel kills processes if memory runs out."
    return reason


def _is_of_ray_itself(error: RayTaskError) -> bool:
    """Whether a method failed because Ray's daemon on its host has exited, which also terminates the actor."""
    return isinstance(getattr(error, "cause", None), RaySystemError)


def _failure_of(error: RayTaskError) -> TaskFailed:
    cause = getattr(error, "cause", None) or error
    lines = str(cause).strip().splitlines()
    summary = ": ".join([type(cause).__qualname__, *lines[:1]])
    return TaskFailed(None, summary, str(error), time.monotonic(), has_results=False, is_secondary=False)
