"""Functions that run on a thread each and meet: what must happen once for all of them happens on the caller's thread.

A function meets the others by :meth:`Seat.meet`. Once all have come, with the same request, the caller of
:meth:`Lockstep.run` carries it out with what each has brought, and all go on with its result. This is what a collective
is among processes, with a difference: where the functions do not ask for the same, there is an error and not a wait.

Threads take turns, or run at once. With turns, each runs until it meets the others or returns, then the next: what they
do, and what they draw from the process's one random generator, is the same in each run.

What it does not promise: to interrupt a function that computes. It is waited for, also after Ctrl-C.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

_POLL_S = 0.05
_END_S = 1.0


@dataclass
class Call:
    """To a thread: run this."""

    function: Callable[[], Any]


@dataclass
class Returned:
    """From a thread: the function returned. To a thread that waits in :meth:`Seat.meet`: the result."""

    value: Any


@dataclass
class Raised:
    """The same for an exception."""

    exception: BaseException


@dataclass
class Request:
    """From a thread: it waits for the others.

    Attributes:
        name: What it asks for; the same from all.
        act: Carries it out, given what each has brought, in order of seats.
        payload: What this one has brought.
    """

    name: str
    act: Callable[[list[Any]], Any]
    payload: Any


class Close:
    """To a thread: end."""


class AbortedError(BaseException):
    """Unwinds a function whose fellow has failed. Not an ``Exception``: no user code should catch it."""


class Seat:
    """The place of one function.

    Args:
        index: Its number.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.is_running = False
        self.is_meeting = False
        self._thread_id: int | None = None
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._outbox: SimpleQueue[Any] = SimpleQueue()

    def meet(self, name: str, act: Callable[[list[Any]], Any], payload: Any = None) -> Any:
        """Waits for the others and returns what ``act`` returned. Called by the function, on its thread.

        Raises:
            RuntimeError: If another thread calls it, or the function has returned: nobody would come.
            Exception: What ``act`` raised.
        """
        if threading.get_ident() != self._thread_id:
            raise RuntimeError(
                f"{name} was asked for by a replica outside of its step, as the recomputation of a checkpointed"
                " activation does, or a hook that runs in the backward pass. Replicas can meet only within their step."
            )
        self.is_meeting = True
        try:
            self._report(Request(name, act, payload))
            while isinstance(message := self._inbox.get(), Call):
                outcome = _outcome(message.function)
                self.is_meeting = True  # again: the function may have met the others itself
                self._report(outcome)
        finally:
            self.is_meeting = False
        if isinstance(message, Raised):
            raise message.exception
        return message.value

    def resume(self, message: Any) -> None:
        """Lets the thread go on."""
        self.is_running = True
        self._inbox.put(message)

    def wait(self, timeout_s: float | None = None) -> Any:
        """Waits until the function returns, raises or waits for the others."""
        return self._outbox.get(timeout=timeout_s)

    def serve(self) -> None:
        """Runs functions until told to end. The thread's main function."""
        self._thread_id = threading.get_ident()
        while isinstance(message := self._inbox.get(), Call):
            outcome = _outcome(message.function)
            del message  # what it ran may hold a whole model
            self._report(outcome)
            del outcome

    def _report(self, event: Any) -> None:
        self.is_running = False
        self._outbox.put(event)


class Lockstep:
    """Threads that run functions in lockstep. They stay until :meth:`close`.

    Args:
        num_seats: How many functions can run.
        take_turns: Whether they run one after the other.
    """

    def __init__(self, num_seats: int, take_turns: bool) -> None:
        self.seats = [Seat(index) for index in range(num_seats)]
        self.take_turns = take_turns
        self._threads = [
            threading.Thread(target=seat.serve, daemon=True, name=f"replica {seat.index}") for seat in self.seats
        ]
        for thread in self._threads:
            thread.start()

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs a function at each of the first seats and returns what they return.

        Raises:
            RuntimeError: If they do not all ask for the same.
            BaseException: What the first of them raised; the others have ended by then.
        """
        try:
            return self.run_inside(functions)
        except BaseException:
            self._abort()
            raise

    def run_inside(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """The same from within an ``act``, on the threads that wait for it."""
        events = self._resume([Call(function) for function in functions])
        while True:
            for event in events:
                if isinstance(event, Raised):
                    raise event.exception
            if all(isinstance(event, Returned) for event in events):
                return [event.value for event in events]
            requests = [event for event in events if isinstance(event, Request)]
            if len({request.name for request in requests}) > 1 or len(requests) < len(events):
                raise RuntimeError(_divergence(events))
            answer: Returned | Raised
            try:
                answer = Returned(requests[0].act([request.payload for request in requests]))
            except Exception as exception:  # the user's code may handle it
                answer = Raised(exception)
            events = self._resume([answer] * len(events))

    def close(self) -> None:
        """Ends the threads. A second call does no harm."""
        seats, self.seats = self.seats, []
        for seat in seats:
            seat.resume(Close())
        for thread in self._threads:
            if thread is not threading.current_thread():  # which the garbage collector may have chosen
                thread.join(_END_S)

    def _resume(self, messages: Sequence[Any]) -> list[Any]:
        """Lets the first threads go on, and returns what each does next; those after one that raised stay."""
        events: list[Any] = []
        seats = self.seats[: len(messages)]
        if not self.take_turns:
            for seat, message in zip(seats, messages, strict=True):
                seat.resume(message)
            return [_noted(seat.wait(), seat, len(seats)) for seat in seats]
        for seat, message in zip(seats, messages, strict=True):
            seat.resume(message)
            events.append(_noted(seat.wait(), seat, len(seats)))
            if isinstance(events[-1], Raised):
                break
        return events

    def _abort(self) -> None:
        """Waits for those that run and unwinds those that wait."""
        for seat in self.seats:
            while seat.is_running or seat.is_meeting:
                if not seat.is_running:
                    seat.resume(Raised(AbortedError()))
                with suppress(Empty):
                    seat.wait(_POLL_S)
            with suppress(Empty):
                seat.wait(0)


def _outcome(function: Callable[[], Any]) -> Returned | Raised:
    try:
        return Returned(function())
    except BaseException as exception:
        return Raised(exception)


def _noted(event: Any, seat: Seat, num_seats: int) -> Any:
    if isinstance(event, Raised) and hasattr(event.exception, "add_note"):  # Python 3.11
        event.exception.add_note(f"This happened in replica {seat.index} of {num_seats}.")
    return event


def _divergence(events: Sequence[Any]) -> str:
    doing = [
        f"replica {index} " + (f"waits in {event.name}" if isinstance(event, Request) else "has returned")
        for index, event in enumerate(events)
    ]
    return (
        f"The replicas do not take the same path through the step: {', '.join(doing)}. What happens once for the whole"
        " batch (a backward pass, an optimizer's step, a metric's value) must be asked for by all replicas, in the same"
        " order. Let the path not depend on the samples, or use `strategy='ddp_ext'`."
    )
