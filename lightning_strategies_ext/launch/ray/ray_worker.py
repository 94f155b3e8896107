"""Main process's side of a worker on Ray. Calls of its actor and its link carry messages and detect its exit."""

import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from math import inf
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
    RunTask,
    SendSignal,
    Shutdown,
    TaskFailed,
    WorkerHostInfo,
    WorkerRankInfo,
)
from lightning_strategies_ext.launch.ray.actor import ActorReply, RayPayload
from lightning_strategies_ext.launch.ray.worker_link import LinkServer, RelayedLinkServer, WorkerLink

log = logging.getLogger(__name__)

#: Seconds after which a warning is logged that a replacement worker has not started.
_WARN_AFTER_S = 30.0
#: Seconds to wait for Ray's reason for the exit of an actor whose link is closed.
_REASON_S = 3.0
#: Shorter time if the other workers continue without the worker.
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
        self._wakeup, self._wakeup_sender = socket.socketpair()
        self._wakeup_sender.setblocking(False)
        self._lock = threading.Lock()  # after `close`, the descriptors of the sockets may belong to other files
        self._is_open = True
        self._waiting: Future[Any] | None = None
        self._error: BaseException | None = None
        self._steps: Generator[Future[Any], Any, None] | None = None
        self._unsent_task: tuple[RunTask, SentPayload] | None = None
        self._warn_at = inf
        self.link: WorkerLink = link_server.expect(number, self._wake_up)
        self._actor: Any = actor_class.options(**options).remote(link_server.address, link_server.secret, number)

    @property
    @override
    def description(self) -> str:
        return "not started by Ray so far" if self.info is None else f"{super().description} on {self.info.address}"

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

    # --- startup ---

    def start_up(self, steps: Generator["Future[Any]", Any, None]) -> None:
        """Sets the worker up while others run: :meth:`next_reply` continues the setup, and submits the task at its end.

        Args:
            steps: Generator that yields futures, and receives their results. If it raises, the worker has failed.
        """
        self._steps, self._waiting = steps, next(steps)
        self._warn_at = time.monotonic() + _WARN_AFTER_S

    def _continue_startup(self, steps: Generator["Future[Any]", Any, None], step: "Future[Any]") -> Any:
        try:
            self._waiting = steps.send(step.result())
        except StopIteration:
            self._steps = None
            self.enter(WorkerState.IDLE)
            if self._unsent_task is not None:
                (order, task), self._unsent_task = self._unsent_task, None
                settings = order.settings  # of the replaced worker, with its environment variables
                environment = {**settings.environment, **self.environment}
                self.submit(replace(order, settings=replace(settings, environment=environment)), task)
        except Exception as error:
            self._error = error
            return self._exit_error()
        return None

    # --- messages ---

    def call(self, method: str, *args: Any) -> Any:
        """Calls a method of the actor, and returns a future of its result."""
        future = getattr(self._actor, method).remote(*args).future()
        future.add_done_callback(lambda future: self._wake_up())
        return future

    @override
    def _send(self, message: MessageToWorker, task: "SentPayload | None") -> None:
        if isinstance(message, LinkMessageToWorker):
            self.link.send(message)
        elif isinstance(message, RunTask) and self.state is WorkerState.STARTING:
            assert task is not None
            self._unsent_task = message, task
        elif self.is_alive():
            try:
                if isinstance(message, Shutdown):
                    self._actor.end.remote()
                    return
                self._waiting = self.call("handle", message, None if task is None else task.reference)
                if isinstance(message, RunTask):
                    self._actor.finish_reply.remote()
            except Exception as error:  # Ray may have exited too
                self._error = error

    @override
    def notify_peer_loss(self, world: int) -> None:
        self.link.send(PeerLost(world))

    @property
    @override
    def waitables(self) -> list[Any]:
        return [self._wakeup]

    def _wake_up(self) -> None:
        with self._lock:
            if self._is_open:
                with suppress(BlockingIOError):
                    self._wakeup_sender.send(b"!")

    @override
    def _next_message(self) -> Any:
        with suppress(BlockingIOError):
            self._wakeup.recv(1 << 16, socket.MSG_DONTWAIT)
        if self.info is None and time.monotonic() > self._warn_at:
            log.warning("Worker %d has not started. Free resources in Ray: %s.", self.rank, free_resources_text())
            self._warn_at = inf
        has_exited = not self.is_alive()  # checked first: the worker may reply and then exit
        if self.state is not WorkerState.RUNNING:
            self.link.messages.clear()  # arrived after the reply to the task, over the other connection
        elif self.link.messages:
            self._wake_up()  # there may be more messages
            return self.link.messages.popleft()
        if has_exited and self._error is None and self._waiting is not None:
            has_little_time = self._is_elastic and self.state is WorkerState.RUNNING
            wait_until(self._waiting, _SHORT_REASON_S if has_little_time else _REASON_S)
        if self._waiting is not None and self._waiting.done():
            done, self._waiting = self._waiting, None
            return self._message_of(done) if self._steps is None else self._continue_startup(self._steps, done)
        return self._exit_error() if has_exited else None

    def _message_of(self, reply: "Future[ActorReply]") -> Any:
        try:
            actor_reply = reply.result()
        except RayError as error:
            # If the error is not Ray's own, the actor runs, and its method has failed, for example for lack of a class.
            if isinstance(error, RayTaskError) and not _is_ray_error(error):
                return _failure_of(error)
            self._error = error
            return self._exit_error()
        self.link.wait_for_output(actor_reply.num_output_bytes)
        message = actor_reply.payload.load(is_only_read=actor_reply.is_only_read)
        if isinstance(message, TaskFailed):  # clocks of hosts differ, so the failure received first counts as the first
            message = replace(message, time=time.monotonic())
        return message

    # --- exit ---

    @override
    def is_alive(self) -> bool:
        return self._is_open and self._error is None and not self.link.closed.is_set()

    def _exit_error(self) -> WorkerDiedError:
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
            if self.link.connection is not None:
                self.wait(EXIT_TIMEOUT_S)

    @override
    def close(self) -> None:
        self.enter(WorkerState.EXITED)
        self._kill_actor()  # it may never have connected
        self._actor = self._waiting = self._steps = self._unsent_task = None
        with self._lock:
            self._is_open = False
            self._wakeup.close()
            self._wakeup_sender.close()

    def _kill_actor(self) -> None:
        if ray.is_initialized():  # otherwise Ray would start a cluster for the call
            with suppress(Exception):  # Ray may have exited
                ray.kill(self._actor)


def wait_until(future: "Future[Any]", timeout_s: float) -> None:
    """Waits for a future without raising its exception."""
    with suppress(Exception):
        future.exception(timeout_s)


def free_resources_text() -> str:
    """Returns the free resources of the cluster as text."""
    free = ray.available_resources()
    hidden = ("node:", "memory", "object_store", "bundle_group")
    shown = {name: amount for name, amount in free.items() if not name.startswith(hidden) and "_group_" not in name}
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(shown.items())) or "nothing"


def reason_from_ray(error: BaseException) -> str:
    """Returns Ray's reason for the exit of an actor, without its advice and numbers."""
    text = str(error).strip()
    found = re.search(r"Worker exit detail: (.*?)(?: Some common causes|$)", text, re.DOTALL)
    reason = (text.splitlines()[-1] if found is None else found.group(1)).strip().rstrip(".") + "."
    if found is not None and "connection error" in reason:
        reason += " The worker was killed or crashed; the kernel kills processes if memory runs out."
    return reason


def _is_ray_error(error: RayTaskError) -> bool:
    """Whether a method failed because Ray's daemon on its host has exited, which also terminates the actor."""
    return isinstance(getattr(error, "cause", None), RaySystemError)


def _failure_of(error: RayTaskError) -> TaskFailed:
    cause = getattr(error, "cause", None) or error
    lines = str(cause).strip().splitlines()
    summary = ": ".join([type(cause).__qualname__, *lines[:1]])
    return TaskFailed(None, summary, str(error), time.monotonic(), has_results=False, is_secondary=False)
