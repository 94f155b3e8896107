"""Functions that run in lockstep and meet: what must happen once for all of them happens once, on the caller's thread.

A function meets the others by :meth:`Seat.meet`. Once all have come, with the same request, the caller's thread carries
it out with what each has brought, and all go on with its result. This is what a collective is among processes, with a
difference: where the functions do not ask for the same, there is an error and not a wait.

The first function runs on the caller's thread, the others on threads of their own. They take turns, or run at once.
With turns, each runs until it meets the others or returns, then the next: what they do, and what they draw from the
process's one random generator, is the same in each run. Functions that take turns and never meet all run on the
caller's thread: each thread that computes on the CPU has a team of OpenMP threads, and teams get in each other's way.

What it does not promise: to interrupt a function that computes on a thread. It is waited for, also after Ctrl-C.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
        lockstep: What it belongs to.
        index: Its number.
    """

    def __init__(self, lockstep: "Lockstep", index: int) -> None:
        self.index = index
        self.is_running = False
        self.is_meeting = False
        self._lockstep = lockstep
        self._thread_id: int | None = None
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._outbox: SimpleQueue[Any] = SimpleQueue()

    def meet(self, name: str, act: Callable[[list[Any]], Any], payload: Any = None) -> Any:
        """Waits for the others and returns what ``act`` returned. Called by the function, on its thread.

        Raises:
            RuntimeError: If another thread calls it, or the function has returned: nobody would come.
            Exception: What ``act`` raised.
        """
        if self._lockstep.is_run_by_caller(self.index):
            return self._lockstep.lead(Request(name, act, payload), self.index)
        if threading.get_ident() != self._thread_id:
            raise RuntimeError(
                f"{name} was asked for by a replica outside of its step, as the recomputation of a checkpointed"
                " activation does, or a hook that runs in the backward pass. Replicas can meet only within their step."
                " Leave it out of what is checkpointed and of such hooks, or use `strategy='ddp_ext'`."
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


@dataclass
class Round:
    """Functions that run together now.

    Attributes:
        num_functions: How many.
        next_messages: What the threads are to be told before anything else is heard of them; empty if they were.
        has_synchronized: Whether the participants have synchronized.
        is_acting: Whether what they have met for is being carried out.
        inline: The seat whose function the caller's thread runs now.
        unheard: The seats whose threads run.
        waiting: The seats whose functions wait for the others.
    """

    num_functions: int
    next_messages: list[Any] = field(default_factory=list)
    has_synchronized: bool = False
    is_acting: bool = False
    inline: int = 0
    unheard: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)


class Lockstep:
    """Runs functions in lockstep. Its threads stay until :meth:`close`.

    Args:
        num_seats: How many functions can run.
        take_turns: Whether they run one after the other.
    """

    def __init__(self, num_seats: int, take_turns: bool) -> None:
        self.seats = [Seat(self, index) for index in range(num_seats)]
        self.take_turns = take_turns
        self._threads: list[threading.Thread] = []
        self._rounds: list[Round] = []  # the innermost last
        self._caller_id: int | None = None
        self._failure: BaseException | None = None

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs a function at each of the first seats and returns what they return.

        Raises:
            RuntimeError: If they do not all ask for the same.
            BaseException: What the first of them raised; the others have ended by then.
        """
        self._caller_id = threading.get_ident()
        try:
            return self._run(functions)
        except AbortedError:
            failure = self._failure
            assert failure is not None
            self._abort()
            raise failure from None
        except BaseException:
            self._abort()
            raise
        finally:
            self._failure = self._caller_id = None
            self._rounds.clear()

    def run_inside(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """The same from within an ``act``, each on the thread that waits for it."""
        return self._run(functions)

    def is_run_by_caller(self, index: int) -> bool:
        """Whether the calling thread is the caller's, and runs the function of this seat."""
        if threading.get_ident() != self._caller_id or not self._rounds:
            return False
        return not self._rounds[-1].is_acting and self._rounds[-1].inline == index

    def lead(self, request: Request, index: int) -> Any:
        """Waits for the others on behalf of a function that the caller's thread runs."""
        current = self._rounds[-1]
        if index > 0:  # the first has returned already
            self._fail(_divergence([Returned(None), *[None] * (index - 1), request]))
        events = [request, *self._hear_others(current)]
        if not all(isinstance(event, Request) and event.name == request.name for event in events):
            self._fail(_divergence(events))
        current.has_synchronized = current.is_acting = True
        try:
            answer: Returned | Raised = Returned(request.act([event.payload for event in events]))
        except Exception as exception:  # the user's code may handle it
            answer = Raised(exception)
        finally:
            current.is_acting = False
        self._tell_others(current, [answer] * (current.num_functions - 1))
        if isinstance(answer, Raised):
            raise answer.exception
        return answer.value

    def close(self) -> None:
        """Ends the threads. A second call does no harm."""
        threads, self._threads = self._threads, []
        for seat in self.seats[1:] if threads else ():
            seat.resume(Close())
        for thread in threads:
            if thread is not threading.current_thread():  # which the garbage collector may have chosen
                thread.join(_END_S)

    def _run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        current = Round(len(functions))
        self._rounds.append(current)
        try:
            self._tell_others(current, [Call(function) for function in functions[1:]])
            values = [self._run_here(current, 0, functions[0])]
            if self.take_turns and len(self._rounds) == 1 and not current.has_synchronized:
                return values + [self._run_here(current, i, functions[i]) for i in range(1, len(functions))]
            events = [Returned(values[0]), *self._hear_others(current)]
            if not all(isinstance(event, Returned) for event in events):
                self._fail(_divergence(events))
            return [event.value for event in events]
        except Exception:
            self._unwind_others(current)
            raise
        finally:
            self._rounds.pop()

    def _run_here(self, current: Round, index: int, function: Callable[[], Any]) -> Any:
        current.inline = index
        try:
            return function()
        except AbortedError:
            raise
        except BaseException as exception:
            _note(exception, index, current.num_functions)
            raise

    def _tell_others(self, current: Round, messages: list[Any]) -> None:
        """Lets the threads go on: at once, or when it is their turn."""
        current.next_messages = messages
        if not self.take_turns:
            self._start_threads()
            for index in range(1, current.num_functions):
                self._resume(current, index)

    def _hear_others(self, current: Round) -> list[Any]:
        """Returns what each of the threads does next: it returns or meets. If one has failed, all do."""
        events: list[Any] = []
        self._start_threads()
        for index in range(1, current.num_functions):
            if index not in current.unheard:
                self._resume(current, index)
            event = self._hear(current, index)
            if isinstance(event, Raised):
                _note(event.exception, index, current.num_functions)
                self._fail(event.exception)
            events.append(event)
        return events

    def _unwind_others(self, current: Round) -> None:
        """Ends what the threads run in a round that the caller's thread has left with an exception."""
        for index in sorted(current.unheard):
            self._hear(current, index)
        for index in sorted(current.waiting):
            while index in current.waiting:
                self._resume(current, index, Raised(AbortedError()))
                self._hear(current, index)

    def _resume(self, current: Round, index: int, message: Any = None) -> None:
        current.unheard.add(index)
        current.waiting.discard(index)
        self.seats[index].resume(message or current.next_messages[index - 1])

    def _hear(self, current: Round, index: int) -> Any:
        event = self.seats[index].wait()
        current.unheard.discard(index)
        if isinstance(event, Request):
            current.waiting.add(index)
        return event

    def _start_threads(self) -> None:
        if not self._threads:
            self._threads = [
                threading.Thread(target=seat.serve, daemon=True, name=f"replica {seat.index}")
                for seat in self.seats[1:]
            ]
            for thread in self._threads:
                thread.start()

    def _fail(self, failure: BaseException) -> None:
        """Unwinds what the caller's thread runs."""
        self._failure = failure
        raise AbortedError

    def _abort(self) -> None:
        """Waits for threads that run and unwinds those that wait."""
        for seat in self.seats[1:]:
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


def _note(exception: BaseException, index: int, num_functions: int) -> None:
    note = f"This happened in replica {index} of {num_functions}."
    if hasattr(exception, "add_note") and note not in getattr(exception, "__notes__", ()):  # Python 3.11
        exception.add_note(note)


def _divergence(events: Sequence[Any]) -> RuntimeError:
    doing = [
        f"replica {index} " + (f"waits in {event.name}" if isinstance(event, Request) else "has returned")
        for index, event in enumerate(events)
        if event is not None
    ]
    return RuntimeError(
        f"The replicas do not take the same path through the step: {', '.join(doing)}. What happens once for the whole"
        " batch (a backward pass, an optimizer's step, a metric's value) must be asked for by all replicas, in the same"
        " order. Let the path not depend on the samples, or use `strategy='ddp_ext'`."
    )
