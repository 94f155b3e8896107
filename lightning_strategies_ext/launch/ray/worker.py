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
from lightning_strategies_ext.launch.processes.starter import END_S
from lightning_strategies_ext.launch.protocol import End, Failure, Order, Ping, Seat
from lightning_strategies_ext.launch.ray import cluster, words
from lightning_strategies_ext.launch.ray.actor import Facts
from lightning_strategies_ext.launch.ray.line import Line, Switchboard
from lightning_strategies_ext.launch.ray.messages import Parcel
from lightning_strategies_ext.launch.ray.relay import RelayedSwitchboard

log = logging.getLogger(__name__)

#: After how long it is said that one has not come which was started in the place of another, in seconds.
_SAY_S = 30.0
#: How long Ray may take to say why an actor is gone whose line is broken, in seconds.
_REASON_S = 3.0
#: The same where others go on without it, and do not wait for the reason.
_SHORT_REASON_S = 0.25


class SentParcel:
    """A job in Ray's object store, see :class:`.SentJob`.

    Args:
        parcel: The job.
    """

    def __init__(self, parcel: Parcel) -> None:
        self.reference: Any = ray.put(parcel)

    def close(self) -> None:
        """Lets go of it; workers that were given it have it still."""
        self.reference = None


class RayWorker:
    """See :class:`.Worker`.

    Args:
        rank: Among the pool's workers, as far as that is known.
        number: Which tells it from all others.
        bundle: Its place in the placement group.
        switchboard: Where its line ends.
        options: For Ray, see ``ActorClass.options``.
        actor_class: The class of the actor, as Ray has it.
        may_change: Whether another one, on another host, may take its place in the middle of a job.

    Attributes:
        rank: Among the pool's workers.
        bundle: See above.
        line: Its line.
        facts: Where it is.
        seat: Among the others.
    """

    def __init__(
        self,
        rank: int,
        number: int,
        bundle: int,
        switchboard: Switchboard | RelayedSwitchboard,
        options: dict[str, Any],
        actor_class: Any,
        may_change: bool,
    ) -> None:
        self.rank = rank
        self.bundle = bundle
        self._may_change = may_change
        self.facts: Facts | None = None
        self.seat: Seat | None = None
        self._bell, self._ringing = os.pipe()
        os.set_blocking(self._ringing, False)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._is_open = True
        self._waiting: Future[Any] | None = None
        self._error: BaseException | None = None
        self._steps: Generator[Future[Any], Any, None] | None = None
        self._step: Future[Any] | None = None
        self._order: tuple[Order, SentParcel] | None = None
        self._say_at = math.inf
        self.line: Line = switchboard.expect(number, self._ring)
        self._actor: Any = actor_class.options(**options).remote(switchboard.address, switchboard.secret, number)

    # --- what it is ---

    @property
    def pid(self) -> int:
        """Its process id, on its host; 0 before that is known."""
        return 0 if self.facts is None else self.facts.pid

    @property
    def where(self) -> str:
        """Which process it is, for people."""
        return "not started by Ray so far" if self.facts is None else f"pid {self.pid} on {self.facts.address}"

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of its own: where it meets the others."""
        assert self.seat is not None
        assert self.facts is not None
        variables = {"MASTER_ADDR": self.seat.address, "MASTER_PORT": str(self.seat.port)}
        interface = self.facts.interface
        may_have_others = self.seat.num_hosts > 1 or self._may_change
        if may_have_others and interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
            variables["GLOO_SOCKET_IFNAME"] = interface
        return variables

    # --- what is said ---

    def ask(self, method: str, *args: Any) -> Any:
        """Calls a method of the actor; its answer is a future's."""
        future = getattr(self._actor, method).remote(*args).future()
        future.add_done_callback(lambda future: self._ring())
        return future

    def get_ready(self, steps: Generator["Future[Any]", Any, None]) -> None:
        """Lets it get ready while others work: :meth:`answer` goes on with it, and gives it its order in the end.

        Args:
            steps: Each is waited for, and its result sent in. An exception means that the worker is of no use.
        """
        self._steps, self._step = steps, next(steps)
        self._say_at = time.monotonic() + _SAY_S

    @property
    def has_come(self) -> bool:
        """Whether it is ready for what it is told."""
        return self._steps is None

    def _go_on_to_get_ready(self) -> None:
        while self._steps is not None and self._error is None and self._step is not None and self._step.done():
            try:
                self._step = self._steps.send(self._step.result())
            except StopIteration:
                self._steps = None
                if self._order is not None:
                    (order, job), self._order = self._order, None
                    with suppress(OSError):  # `answer` says why
                        self.give(_as_for(self, order), job)
            except Exception as error:
                self._error = error
        if self.facts is None and time.monotonic() > self._say_at:
            log.warning("Worker %d has not come so far; free in the cluster are %s.", self.rank, cluster.said_of_free())
            self._say_at = math.inf

    def send(self, message: Any) -> None:
        """Sends a message.

        Raises:
            OSError: If the worker is gone.
        """
        if isinstance(message, words.SAID_TO_WORKERS):
            self.line.say(message)
        else:
            self._send(message, None)

    def tell_of_loss(self, world: int) -> None:
        """Says that another worker of its world is gone, whose host may be gone as well.

        Args:
            world: The world's number.
        """
        self.line.tell_of_loss(world)

    def give(self, order: Order, job: SentParcel | None) -> None:
        """Orders it to run a job.

        Raises:
            OSError: If the worker is gone.
        """
        assert job is not None
        if self._steps is None:
            self._send(order, job.reference)
        else:
            self._order = order, job

    def _send(self, message: Any, job: Any) -> None:
        if not self.is_alive():
            raise OSError("the worker is gone")
        try:
            if isinstance(message, End):
                self._actor.end.remote()
                return
            self._waiting = self._actor.answer.remote(message, job).future()
            self._waiting.add_done_callback(lambda future: self._ring())
            if isinstance(message, Order):
                self._actor.go_on.remote()
        except Exception as error:  # Ray may be gone as well
            self._error = error
            raise OSError("the worker is gone") from error

    def has_said(self, timeout_s: float | None) -> bool:
        """Waits until there is something to receive, or the worker is gone; False if neither came in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._has_answer() and self.is_alive():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            self._wait_for_bell(left)
        return True

    def receive(self) -> Any:
        """Waits for a message.

        Raises:
            EOFError: If the worker is gone.
        """
        self.has_said(None)
        if not self._has_answer() and self._waiting is not None:
            wait_until(self._waiting, _REASON_S)
        if not self._has_answer():
            raise EOFError("the worker is gone")
        waiting, self._waiting = self._waiting, None
        assert waiting is not None
        try:
            reply = waiting.result()
        except RayError as error:
            # If it is another one's, the actor is there, and its method has failed: at a class that it lacks, say.
            if isinstance(error, RayTaskError) and not _is_of_ray_itself(error):
                return _failure_of(error)
            self._error = error
            raise EOFError("the worker is gone") from error
        self.line.wait_until_heard(reply.num_bytes_said)
        answer = reply.load()
        if isinstance(answer, Failure):  # hosts have clocks of their own: what is heard first counts as first
            answer = replace(answer, time=time.monotonic())
        return answer

    def _has_answer(self) -> bool:
        return self._waiting is not None and self._waiting.done()

    @property
    def pollable(self) -> list[Any]:
        """What becomes ready when there is an answer, or the worker has died."""
        return [self._bell]

    def answer(self) -> Any:
        """The worker's answer to a job, its death if it died without one, or None for now.

        In a job whose ranks may change also a :class:`.Ready` or :class:`.Arrived`.
        """
        self._drain_bell()
        self._go_on_to_get_ready()
        is_dead = not self.is_alive()
        if self.line.words:
            self._ring()  # there may be more to hear
            return self.line.words.popleft()
        if self._has_answer():
            with suppress(EOFError):
                return self.receive()
        return self.death() if is_dead or self._error is not None else None

    def ping(self) -> None:
        """Asks the worker, which waits for a job, to answer :meth:`is_there`."""
        with suppress(OSError):
            self.send(Ping())

    def is_there(self) -> bool:
        """Waits for the answer to :meth:`ping`; False if the worker ended instead."""
        if self._waiting is None:
            return False
        with suppress(EOFError):
            return isinstance(self.receive(), Ping)
        return False

    # --- how it ends ---

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._is_open and self._error is None and not self.line.closed.is_set()

    def death(self) -> WorkerDiedError:
        """Describes how it ended; waits a moment for Ray to know."""
        if self._error is None and self._waiting is not None:
            wait_until(self._waiting, _SHORT_REASON_S if self._may_change else _REASON_S)
            if self._waiting.done() and isinstance(self._waiting.exception(), RayError):
                self._error = self._waiting.exception()
        message = f"rank {self.rank} ({self.where}) ended, in the middle of its work."
        if isinstance(self._error, RayError):
            message += f" Ray says: {reason_in(self._error)}"
        elif self._error is not None:
            message = f"rank {self.rank} ({self.where}) could not be started: {self._error}"
        return WorkerDiedError(message, self.rank, self.pid, -1)

    def signal(self, signum: int) -> None:
        """Sends it a signal, if it runs."""
        if signum == signal.SIGKILL:
            self.kill()
        elif self.is_alive():
            self.line.signal(signum)

    def wait(self, timeout_s: float) -> None:
        """Waits until it has ended."""
        self.line.closed.wait(timeout_s)

    def kill(self) -> None:
        """Kills it, if it runs."""
        if self._is_open and not self.line.closed.is_set():
            with suppress(Exception):  # Ray may be gone
                ray.kill(self._actor)
            if self.line.has_begun:
                self.wait(END_S)

    def close(self) -> None:
        """Frees what this process holds for it."""
        with suppress(Exception):
            ray.kill(self._actor)  # one that has never connected
        self._actor = self._waiting = self._steps = self._step = self._order = None
        with self._lock:
            if self._is_open:
                self._is_open = False
                os.close(self._bell)
                os.close(self._ringing)

    # --- the bell ---

    def _ring(self) -> None:
        with self._lock:
            if self._is_open:
                with suppress(BlockingIOError):
                    os.write(self._ringing, b"!")

    def _wait_for_bell(self, timeout_s: float | None) -> None:
        if wait([self._bell], 0.5 if timeout_s is None else min(timeout_s, 0.5)):
            self._drain_bell()

    def _drain_bell(self) -> None:
        while self._is_open and wait([self._bell], 0):
            os.read(self._bell, 64)


def _as_for(worker: RayWorker, order: Order) -> Order:
    """An order that was written for another worker, whose variables may have been others."""
    conditions = order.conditions
    return replace(order, conditions=replace(conditions, environment={**conditions.environment, **worker.variables}))


def wait_until(future: "Future[Any]", timeout_s: float) -> None:
    """Waits for a future, and raises nothing."""
    with suppress(Exception):
        future.exception(timeout_s)


def reason_in(error: BaseException) -> str:
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


def _failure_of(error: RayTaskError) -> Failure:
    cause = getattr(error, "cause", None) or error
    lines = str(cause).strip().splitlines()
    summary = ": ".join([type(cause).__qualname__, *lines[:1]])
    return Failure(None, summary, str(error), time.monotonic(), has_results=False, is_consequence=False)
