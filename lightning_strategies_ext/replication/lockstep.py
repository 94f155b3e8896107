"""Runs functions in lockstep. The functions synchronize for actions that run once, on the caller's thread.

A function synchronizes with the other functions in :meth:`Participant.run_once`. After all functions have called it
with the same request, the caller's thread runs the action with the payloads of all functions, and all functions receive
the result. This resembles a collective of processes, but different requests raise an error instead of a deadlock.

The first function runs on the caller's thread, the others run on their own threads, sequentially or concurrently. In
sequential mode, each function runs until it synchronizes or returns, and then the next function runs. The order of
operations, and of draws from the process's random generator, is therefore deterministic. Sequential functions that
never synchronize all run on the caller's thread, because each thread that computes on the CPU has its own OpenMP
threads, which compete for cores.

Limitations: A function that runs on a thread cannot be interrupted. The caller waits for it, also after Ctrl-C.
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
class RunFunction:
    """Message to a thread: a function to run."""

    function: Callable[[], Any]


@dataclass
class Returned:
    """Message from a thread: its function returned. Message to a thread in :meth:`Participant.run_once`: the result."""

    value: Any


@dataclass
class Raised:
    """Message from or to a thread: an exception in place of a return value or a result."""

    exception: BaseException


@dataclass
class OnceRequest:
    """Message from a thread: its function waits for an action.

    Attributes:
        name: Name of the action, equal in all functions.
        act: Action; its argument is the list of payloads of all functions, in order of index.
        payload: Payload of this function.
    """

    name: str
    act: Callable[[list[Any]], Any]
    payload: Any


class StopThread:
    """Message to a thread: exit."""


class AbortedError(BaseException):
    """Unwinds a function after another has failed. Not an ``Exception``, so that user code does not catch it."""


class Participant:
    """Participant in a lockstep: the thread and the state of one function.

    Args:
        lockstep: Lockstep of the function.
        index: Index of the function.
    """

    def __init__(self, lockstep: "Lockstep", index: int) -> None:
        self.index = index
        self.is_running = False
        self.is_waiting = False
        self._lockstep = lockstep
        self._thread_id: int | None = None
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._outbox: SimpleQueue[Any] = SimpleQueue()

    def run_once(self, name: str, act: Callable[[list[Any]], Any], payload: Any = None) -> Any:
        """Waits for the other functions, and returns the result of ``act``. The function calls it, on its thread.

        Args:
            name: Name of the action, equal in all functions.
            act: Action; its argument is the list of payloads of all functions, in order of index.
            payload: Payload of this function.

        Raises:
            RuntimeError: If another thread calls it, or the function has returned.
            Exception: If ``act`` raised it.
        """
        if self._lockstep.is_run_by_caller(self.index):
            return self._lockstep.coordinate(OnceRequest(name, act, payload), self.index)
        if threading.get_ident() != self._thread_id:
            raise RuntimeError(
                f"{name} was requested by a replica outside of its step, as in the recomputation of a checkpointed"
                " activation or in a hook that runs in the backward pass. Replicas can synchronize only within their"
                " step. Exclude it from checkpointing and from such hooks, or use `strategy='ddp_ext'`."
            )
        self.is_waiting = True
        try:
            self._report(OnceRequest(name, act, payload))
            while isinstance(message := self._inbox.get(), RunFunction):
                outcome = _outcome(message.function)
                self.is_waiting = True  # again: the function may have synchronized, too
                self._report(outcome)
        finally:
            self.is_waiting = False
        if isinstance(message, Raised):
            raise message.exception
        return message.value

    def resume(self, message: Any) -> None:
        """Sends a message to the thread, which resumes it."""
        self.is_running = True
        self._inbox.put(message)

    def wait(self, timeout_s: float | None = None) -> Any:
        """Waits until the function returns, raises, or requests an action."""
        return self._outbox.get(timeout=timeout_s)

    def serve(self) -> None:
        """Runs functions until it receives :class:`StopThread`. Main function of the thread."""
        self._thread_id = threading.get_ident()
        while isinstance(message := self._inbox.get(), RunFunction):
            outcome = _outcome(message.function)
            del message  # the function may reference a whole model
            self._report(outcome)
            del outcome

    def _report(self, event: Any) -> None:
        self.is_running = False
        self._outbox.put(event)


@dataclass
class LockstepRound:
    """State of functions that run together.

    Attributes:
        num_functions: Number of functions.
        next_messages: Messages with which the threads resume, in order of index from 1.
        has_synchronized: Whether the functions have synchronized.
        is_acting: Whether an action is running.
        inline: Index of the function that the caller's thread runs.
        running: Indices of the functions whose threads run.
        waiting: Indices of the functions that wait for an action.
    """

    num_functions: int
    next_messages: list[Any] = field(default_factory=list)
    has_synchronized: bool = False
    is_acting: bool = False
    inline: int = 0
    running: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)


class Lockstep:
    """Runs functions in lockstep. Its threads live until :meth:`close`.

    Args:
        num_participants: Maximum number of functions.
        is_sequential: Whether functions run sequentially.
    """

    def __init__(self, num_participants: int, is_sequential: bool) -> None:
        self.participants = [Participant(self, index) for index in range(num_participants)]
        self.is_sequential = is_sequential
        self._threads: list[threading.Thread] = []
        self._rounds: list[LockstepRound] = []  # the innermost last
        self._caller_id: int | None = None
        self._failure: BaseException | None = None

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs functions in lockstep, and returns their results.

        Args:
            functions: Functions, at most one per participant.

        Raises:
            RuntimeError: If the functions request different actions.
            BaseException: If a function raised it; all functions have ended by then.
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

    def run_nested(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs functions in lockstep from within an action, each on the thread that waits for the action."""
        return self._run(functions)

    def is_run_by_caller(self, index: int) -> bool:
        """Returns whether the current thread is the caller's thread, and runs the function with this index."""
        if threading.get_ident() != self._caller_id or not self._rounds:
            return False
        return not self._rounds[-1].is_acting and self._rounds[-1].inline == index

    def coordinate(self, request: OnceRequest, index: int) -> Any:
        """Runs the action that a function on the caller's thread requests, after the others have requested it."""
        current = self._rounds[-1]
        if index > 0:  # the first has returned already
            self._fail(_divergence([Returned(None), *[None] * (index - 1), request]))
        events = [request, *self._collect_events(current)]
        if not all(isinstance(event, OnceRequest) and event.name == request.name for event in events):
            self._fail(_divergence(events))
        current.has_synchronized = current.is_acting = True
        try:
            answer: Returned | Raised = Returned(request.act([event.payload for event in events]))
        except Exception as exception:  # the user's code may handle it
            answer = Raised(exception)
        finally:
            current.is_acting = False
        self._resume_others(current, [answer] * (current.num_functions - 1))
        if isinstance(answer, Raised):
            raise answer.exception
        return answer.value

    def close(self) -> None:
        """Ends the threads. A second call is a no-op."""
        threads, self._threads = self._threads, []
        for participant in self.participants[1:] if threads else ():
            participant.resume(StopThread())
        for thread in threads:
            if thread is not threading.current_thread():  # the garbage collector may run this on any thread
                thread.join(_END_S)

    def _run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        current = LockstepRound(len(functions))
        self._rounds.append(current)
        try:
            self._resume_others(current, [RunFunction(function) for function in functions[1:]])
            values = [self._run_here(current, 0, functions[0])]
            if self.is_sequential and len(self._rounds) == 1 and not current.has_synchronized:
                return values + [self._run_here(current, i, functions[i]) for i in range(1, len(functions))]
            events = [Returned(values[0]), *self._collect_events(current)]
            if not all(isinstance(event, Returned) for event in events):
                self._fail(_divergence(events))
            return [event.value for event in events]
        except Exception:
            self._unwind_others(current)
            raise
        finally:
            self._rounds.pop()

    def _run_here(self, current: LockstepRound, index: int, function: Callable[[], Any]) -> Any:
        current.inline = index
        try:
            return function()
        except AbortedError:
            raise
        except BaseException as exception:
            _add_replica_note(exception, index, current.num_functions)
            raise

    def _resume_others(self, current: LockstepRound, messages: list[Any]) -> None:
        """Sets the next messages of the threads. Sends them immediately, unless functions run sequentially."""
        current.next_messages = messages
        if not self.is_sequential:
            self._start_threads()
            for index in range(1, current.num_functions):
                self._resume(current, index)

    def _collect_events(self, current: LockstepRound) -> list[Any]:
        """Returns the next event of each thread: a return or a request. Aborts all functions if one has failed."""
        events: list[Any] = []
        self._start_threads()
        for index in range(1, current.num_functions):
            if index not in current.running:
                self._resume(current, index)
            event = self._next_event(current, index)
            if isinstance(event, Raised):
                _add_replica_note(event.exception, index, current.num_functions)
                self._fail(event.exception)
            events.append(event)
        return events

    def _unwind_others(self, current: LockstepRound) -> None:
        """Unwinds the functions of the threads in a round that the caller's thread has left with an exception."""
        for index in sorted(current.running):
            self._next_event(current, index)
        for index in sorted(current.waiting):
            while index in current.waiting:
                self._resume(current, index, Raised(AbortedError()))
                self._next_event(current, index)

    def _resume(self, current: LockstepRound, index: int, message: Any = None) -> None:
        current.running.add(index)
        current.waiting.discard(index)
        self.participants[index].resume(message or current.next_messages[index - 1])

    def _next_event(self, current: LockstepRound, index: int) -> Any:
        event = self.participants[index].wait()
        current.running.discard(index)
        if isinstance(event, OnceRequest):
            current.waiting.add(index)
        return event

    def _start_threads(self) -> None:
        if not self._threads:
            self._threads = [
                threading.Thread(target=participant.serve, daemon=True, name=f"replica {participant.index}")
                for participant in self.participants[1:]
            ]
            for thread in self._threads:
                thread.start()

    def _fail(self, failure: BaseException) -> None:
        """Stores the failure and unwinds the functions of the caller's thread."""
        self._failure = failure
        raise AbortedError

    def _abort(self) -> None:
        """Waits for running functions, and unwinds waiting functions."""
        for participant in self.participants[1:]:
            while participant.is_running or participant.is_waiting:
                if not participant.is_running:
                    participant.resume(Raised(AbortedError()))
                with suppress(Empty):
                    participant.wait(_POLL_S)
            with suppress(Empty):
                participant.wait(0)


def _outcome(function: Callable[[], Any]) -> Returned | Raised:
    try:
        return Returned(function())
    except BaseException as exception:
        return Raised(exception)


def _add_replica_note(exception: BaseException, index: int, num_functions: int) -> None:
    note = f"This happened in replica {index} of {num_functions}."
    if hasattr(exception, "add_note") and note not in getattr(exception, "__notes__", ()):  # Python 3.11
        exception.add_note(note)


def _divergence(events: Sequence[Any]) -> RuntimeError:
    doing = [
        f"replica {index} " + (f"waits in {event.name}" if isinstance(event, OnceRequest) else "has returned")
        for index, event in enumerate(events)
        if event is not None
    ]
    return RuntimeError(
        f"The replicas do not take the same path through the step: {', '.join(doing)}. All replicas must request what"
        " happens once for the whole batch (a backward pass, an optimizer's step, a metric's value), in the same"
        " order. Do not let the path depend on the samples, or use `strategy='ddp_ext'`."
    )
