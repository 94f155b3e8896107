"""A worker on Ray as the main process sees it: asked by calls of its actor, watched by them and by its line."""

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

from lightning_strategies_ext.exceptions import WorkerDiedError
from lightning_strategies_ext.launch.processes.worker_interface import EXIT_TIMEOUT_S
from lightning_strategies_ext.launch.protocol import Ping, RunTask, Shutdown, TaskFailed, WorkerRankInfo
from lightning_strategies_ext.launch.ray import cluster, control_messages
from lightning_strategies_ext.launch.ray.actor import WorkerHostInfo
from lightning_strategies_ext.launch.ray.link_relay import RelayedLinkServer
from lightning_strategies_ext.launch.ray.payloads import RayPayload
from lightning_strategies_ext.launch.ray.worker_link import LinkServer, WorkerLink

log = logging.getLogger(__name__)

#: After how long it is said that one has not come which was started in the place of another, in seconds.
_WARN_AFTER_S = 30.0
#: How long Ray may take to say why an actor is gone whose line is broken, in seconds.
_REASON_S = 3.0
#: The same where others go on without it, and do not wait for the reason.
_SHORT_REASON_S = 0.25


class SentPayload:
    """A job in Ray's object store, see :class:`.SentTask`.

    Args:
        payload: The job.
    """

    def __init__(self, payload: RayPayload) -> None:
        self.reference: Any = ray.put(payload)

    def close(self) -> None:
        """Lets go of it; workers that were given it have it still."""
        self.reference = None


class RayWorker:
    """See :class:`.Worker`.

    Args:
        rank: Among the pool's workers, as far as that is known.
        number: Which tells it from all others.
        bundle: Its place in the placement group.
        link_server: Where its line ends.
        options: For Ray, see ``ActorClass.options``.
        actor_class: The class of the actor, as Ray has it.
        is_elastic: Whether another one, on another host, may take its place in the middle of a job.

    Attributes:
        rank: Among the pool's workers.
        bundle: See above.
        link: Its line.
        info: Where it is.
        rank_info: Among the others.
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
        self._order: tuple[RunTask, SentPayload] | None = None
        self._warn_at = math.inf
        self.link: WorkerLink = link_server.expect(number, self._wake_up)
        self._actor: Any = actor_class.options(**options).remote(link_server.address, link_server.secret, number)

    # --- what it is ---

    @property
    def pid(self) -> int:
        """Its process id, on its host; 0 before that is known."""
        return 0 if self.info is None else self.info.pid

    @property
    def description(self) -> str:
        """Which process it is, for people."""
        return "not started by Ray so far" if self.info is None else f"pid {self.pid} on {self.info.address}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of its own: where it meets the others."""
        assert self.rank_info is not None
        assert self.info is not None
        variables = {"MASTER_ADDR": self.rank_info.main_address, "MASTER_PORT": str(self.rank_info.main_port)}
        interface = self.info.interface
        may_have_others = self.rank_info.num_nodes > 1 or self._is_elastic
        if may_have_others and interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
            variables["GLOO_SOCKET_IFNAME"] = interface
        return variables

    # --- what is said ---

    def call(self, method: str, *args: Any) -> Any:
        """Calls a method of the actor; its answer is a future's."""
        future = getattr(self._actor, method).remote(*args).future()
        future.add_done_callback(lambda future: self._wake_up())
        return future

    def start_up(self, steps: Generator["Future[Any]", Any, None]) -> None:
        """Lets it get ready while others work: :meth:`next_reply` goes on with it, and gives it its order in the end.

        Args:
            steps: Each is waited for, and its result sent in. An exception means that the worker is of no use.
        """
        self._steps, self._step = steps, next(steps)
        self._warn_at = time.monotonic() + _WARN_AFTER_S

    @property
    def is_connected(self) -> bool:
        """Whether it is ready for what it is told."""
        return self._steps is None

    def _advance_startup(self) -> None:
        while self._steps is not None and self._error is None and self._step is not None and self._step.done():
            try:
                self._step = self._steps.send(self._step.result())
            except StopIteration:
                self._steps = None
                if self._order is not None:
                    (order, task), self._order = self._order, None
                    with suppress(OSError):  # `next_reply` says why
                        self.submit(_task_for(self, order), task)
            except Exception as error:
                self._error = error
        if self.info is None and time.monotonic() > self._warn_at:
            log.warning(
                "Worker %d has not come so far; free in the cluster are %s.", self.rank, cluster.free_resources_text()
            )
            self._warn_at = math.inf

    def send(self, message: Any) -> None:
        """Sends a message.

        Raises:
            OSError: If the worker is gone.
        """
        if isinstance(message, control_messages.MESSAGES_TO_WORKERS):
            self.link.send(message)
        else:
            self._send(message, None)

    def notify_peer_loss(self, world: int) -> None:
        """Says that another worker of its world is gone, whose host may be gone as well.

        Args:
            world: The world's number.
        """
        self.link.notify_peer_loss(world)

    def submit(self, order: RunTask, task: SentPayload | None) -> None:
        """Orders it to run a job.

        Raises:
            OSError: If the worker is gone.
        """
        assert task is not None
        if self._steps is None:
            self._send(order, task.reference)
        else:
            self._order = order, task

    def _send(self, message: Any, task: Any) -> None:
        if not self.is_alive():
            raise OSError("the worker is gone")
        try:
            if isinstance(message, Shutdown):
                self._actor.end.remote()
                return
            self._waiting = self._actor.handle.remote(message, task).future()
            self._waiting.add_done_callback(lambda future: self._wake_up())
            if isinstance(message, RunTask):
                self._actor.finish_reply.remote()
        except Exception as error:  # Ray may be gone as well
            self._error = error
            raise OSError("the worker is gone") from error

    def poll(self, timeout_s: float | None) -> bool:
        """Waits until there is something to receive, or the worker is gone; False if neither came in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._has_reply() and self.is_alive():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            self._wait_for_wakeup(left)
        return True

    def receive(self) -> Any:
        """Waits for a message.

        Raises:
            EOFError: If the worker is gone.
        """
        self.poll(None)
        if not self._has_reply() and self._waiting is not None:
            wait_until(self._waiting, _REASON_S)
        if not self._has_reply():
            raise EOFError("the worker is gone")
        waiting, self._waiting = self._waiting, None
        assert waiting is not None
        try:
            actor_reply = waiting.result()
        except RayError as error:
            # If it is another one's, the actor is there, and its method has failed: at a class that it lacks, say.
            if isinstance(error, RayTaskError) and not _is_of_ray_itself(error):
                return _failure_of(error)
            self._error = error
            raise EOFError("the worker is gone") from error
        self.link.wait_for_output(actor_reply.num_output_bytes)
        reply = actor_reply.load()
        if isinstance(reply, TaskFailed):  # hosts have clocks of their own: what is heard first counts as first
            reply = replace(reply, time=time.monotonic())
        return reply

    def _has_reply(self) -> bool:
        return self._waiting is not None and self._waiting.done()

    @property
    def waitables(self) -> list[Any]:
        """What becomes ready when there is an answer, or the worker has died."""
        return [self._wakeup_fd]

    def next_reply(self) -> Any:
        """The worker's answer to a job, its death if it died without one, or None for now.

        In a job whose ranks may change also a :class:`.ReadyToJoin` or :class:`.JoinedWorld`.
        """
        self._drain_wakeups()
        self._advance_startup()
        is_dead = not self.is_alive()
        if self.link.messages:
            self._wake_up()  # there may be more to hear
            return self.link.messages.popleft()
        if self._has_reply():
            with suppress(EOFError):
                return self.receive()
        return self.exit_error() if is_dead or self._error is not None else None

    def ping(self) -> None:
        """Asks the worker, which waits for a job, to answer :meth:`is_responsive`."""
        with suppress(OSError):
            self.send(Ping())

    def is_responsive(self) -> bool:
        """Waits for the answer to :meth:`ping`; False if the worker ended instead."""
        if self._waiting is None:
            return False
        with suppress(EOFError):
            return isinstance(self.receive(), Ping)
        return False

    # --- how it ends ---

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._is_open and self._error is None and not self.link.closed.is_set()

    def exit_error(self) -> WorkerDiedError:
        """Describes how it ended; waits a moment for Ray to know."""
        if self._error is None and self._waiting is not None:
            wait_until(self._waiting, _SHORT_REASON_S if self._is_elastic else _REASON_S)
            if self._waiting.done() and isinstance(self._waiting.exception(), RayError):
                self._error = self._waiting.exception()
        message = f"rank {self.rank} ({self.description}) ended, in the middle of its work."
        if isinstance(self._error, RayError):
            message += f" Ray says: {reason_from_ray(self._error)}"
        elif self._error is not None:
            message = f"rank {self.rank} ({self.description}) could not be started: {self._error}"
        return WorkerDiedError(message, self.rank, self.pid, -1)

    def signal(self, signum: int) -> None:
        """Sends it a signal, if it runs."""
        if signum == signal.SIGKILL:
            self.kill()
        elif self.is_alive():
            self.link.signal(signum)

    def wait(self, timeout_s: float) -> None:
        """Waits until it has ended."""
        self.link.closed.wait(timeout_s)

    def kill(self) -> None:
        """Kills it, if it runs."""
        if self._is_open and not self.link.closed.is_set():
            with suppress(Exception):  # Ray may be gone
                ray.kill(self._actor)
            if self.link.is_connected:
                self.wait(EXIT_TIMEOUT_S)

    def close(self) -> None:
        """Frees what this process holds for it."""
        with suppress(Exception):
            ray.kill(self._actor)  # one that has never connected
        self._actor = self._waiting = self._steps = self._step = self._order = None
        with self._lock:
            if self._is_open:
                self._is_open = False
                os.close(self._wakeup_fd)
                os.close(self._wakeup_writer)

    # --- the bell ---

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
    """An order that was written for another worker, whose variables may have been others."""
    settings = order.settings
    return replace(order, settings=replace(settings, environment={**settings.environment, **worker.environment}))


def wait_until(future: "Future[Any]", timeout_s: float) -> None:
    """Waits for a future, and raises nothing."""
    with suppress(Exception):
        future.exception(timeout_s)


def reason_from_ray(error: BaseException) -> str:
    """What Ray says of an actor that is gone, without the advice and the numbers."""
    text = str(error).strip()
    found = re.search(r"Worker exit detail: (.*?)(?: Some common causes|$)", text, re.DOTALL)
    said = (text.splitlines()[-1] if found is None else found.group(1)).strip().rstrip(".") + "."
    if found is not None and "connection error" in said:
        said += " It was killed or has crashed; the kernel kills when memory runs out."
    return said


def _is_of_ray_itself(error: RayTaskError) -> bool:
    """Whether it is the end of Ray's daemon on the host that a method met, and will end the actor with it."""
    return isinstance(getattr(error, "cause", None), RaySystemError)


def _failure_of(error: RayTaskError) -> TaskFailed:
    cause = getattr(error, "cause", None) or error
    lines = str(cause).strip().splitlines()
    summary = ": ".join([type(cause).__qualname__, *lines[:1]])
    return TaskFailed(None, summary, str(error), time.monotonic(), has_results=False, is_secondary=False)
