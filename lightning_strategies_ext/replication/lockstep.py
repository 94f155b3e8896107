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
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

_POLL_S = 0.05
_JOIN_TIMEOUT_S = 1.0


@dataclass
class RunFunction:
    """Message to a thread: a function to run."""

    function: Callable[[], Any]


@dataclass
class Returned:
    """Message from a thread: its function returned. Message to a thread that waits for an action: the result."""

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
        action: Action; its argument is the list of payloads of all functions, in order of index.
        payload: Payload of this function.
        key: Identifier of the object to which the action belongs, equal in all functions.
    """

    name: str
    action: Callable[[list[Any]], Any]
    payload: Any
    key: Hashable = None


class StopThread:
    """Message to a thread: exit."""


#: Messages from a thread.
Event: TypeAlias = Returned | Raised | OnceRequest


class AbortedError(BaseException):
    """Unwinds a function after another function has failed. No ``except Exception`` of user code catches it."""


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
        self._outbox: SimpleQueue[Event] = SimpleQueue()

    def run_once(self, name: str, action: Callable[[list[Any]], Any], payload: Any = None, key: Hashable = None) -> Any:
        """Waits for the other functions, and returns the result of an action. Called by this function, on its thread.

        Args:
            name: Name of the action, equal in all functions.
            action: Action; its argument is the list of payloads of all functions, in order of index.
            payload: Payload of this function.
            key: Identifier of the object to which the action belongs, equal in all functions.

        Raises:
            RuntimeError: If another thread calls this method, or the function has returned.
            Exception: If the action raised it.
        """
        if self._lockstep.is_run_by_caller(self.index):
            return self._lockstep.coordinate(OnceRequest(name, action, payload, key), self.index)
        if threading.get_ident() != self._thread_id:
            raise RuntimeError(
                f"{name} was requested by a replica outside of its step, as in the recomputation of a checkpointed"
                " activation or in a hook that runs in the backward pass. Replicas can synchronize only within their"
                " step. Exclude the operation from checkpointing and from such hooks, or use `strategy='ddp_ext'`."
            )
        self.is_waiting = True
        try:
            self._send(OnceRequest(name, action, payload, key))
            # The action may run a function on each thread that waits for it, see `Lockstep.run_nested`.
            while isinstance(message := self._inbox.get(), RunFunction):
                event = _call(message.function)
                self.is_waiting = True  # the nested function has reset it if it has synchronized, too
                self._send(event)
        finally:
            self.is_waiting = False
        if isinstance(message, Raised):
            raise message.exception
        return message.value

    def resume(self, message: Any) -> None:
        """Sends a message to the thread, which resumes it."""
        self.is_running = not isinstance(message, StopThread)
        self._inbox.put(message)

    def next_event(self, timeout_s: float | None = None) -> Event:
        """Waits until the function returns, raises, or requests an action."""
        return self._outbox.get(timeout=timeout_s)

    def serve(self) -> None:
        """Runs functions until it receives :class:`StopThread`. Main function of the thread."""
        self._thread_id = threading.get_ident()
        while isinstance(message := self._inbox.get(), RunFunction):
            event = _call(message.function)
            del message  # the function may reference a whole model
            self._send(event)
            del event

    def _send(self, event: Event) -> None:
        self.is_running = False
        self._outbox.put(event)


@dataclass
class LockstepRound:
    """State of one call of :meth:`Lockstep.run` or :meth:`Lockstep.run_nested`.

    Attributes:
        num_functions: Number of functions.
        next_messages: Messages with which the threads resume, in order of index from 1.
        has_synchronized: Whether the functions have synchronized.
        is_running_action: Whether an action is running.
        action_exceptions: Exceptions of actions, which do not belong to a single function.
        caller_index: Index of the function that the caller's thread runs.
        running: Indices of the functions whose threads run.
        waiting: Indices of the functions that wait for an action.
    """

    num_functions: int
    next_messages: list[Any] = field(default_factory=list)
    has_synchronized: bool = False
    is_running_action: bool = False
    action_exceptions: list[BaseException] = field(default_factory=list)
    caller_index: int = 0
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
        """Runs functions in lockstep from within an action. Each thread that waits for the action runs one of them."""
        return self._run(functions)

    def is_run_by_caller(self, index: int) -> bool:
        """Returns whether the current thread is the caller's thread, and runs the function with this index."""
        if threading.get_ident() != self._caller_id or not self._rounds:
            return False
        return not self._rounds[-1].is_running_action and self._rounds[-1].caller_index == index

    def coordinate(self, request: OnceRequest, index: int) -> Any:
        """Runs the action that a function on the caller's thread requests, after the others have requested it."""
        current = self._rounds[-1]
        self._check_not_failed()
        if index > 0:  # runs on the caller's thread only after function 0 has returned without this request
            self._fail(_divergence_error([Returned(None), *[None] * (index - 1), request]))
        events: list[Event] = [request, *self._collect_events(current)]
        payloads = [
            event.payload
            for event in events
            if isinstance(event, OnceRequest) and (event.name, event.key) == (request.name, request.key)
        ]
        if len(payloads) < len(events):
            self._fail(_divergence_error(events))
        current.has_synchronized = current.is_running_action = True
        try:
            reply: Returned | Raised = Returned(request.action(payloads))
        except Exception as exception:  # the user's code may handle it
            reply = Raised(exception)
            current.action_exceptions.append(exception)
        finally:
            current.is_running_action = False
        self._resume_others(current, [reply] * (current.num_functions - 1))
        if isinstance(reply, Raised):
            raise reply.exception
        return reply.value

    def close(self) -> None:
        """Stops the threads. A second call is a no-op."""
        threads, self._threads = self._threads, []
        for participant in self.participants[1:] if threads else ():
            participant.resume(StopThread())
        for thread in threads:
            if thread is not threading.current_thread():  # the garbage collector may run this on any thread
                thread.join(_JOIN_TIMEOUT_S)

    def _run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        current = LockstepRound(len(functions))
        self._rounds.append(current)
        try:
            self._resume_others(current, [RunFunction(function) for function in functions[1:]])
            values = [self._run_on_caller(current, 0, functions[0])]
            if self.is_sequential and len(self._rounds) == 1 and not current.has_synchronized:
                return values + [self._run_on_caller(current, i, functions[i]) for i in range(1, len(functions))]
            events: list[Event] = [Returned(values[0]), *self._collect_events(current)]
            values = [event.value for event in events if isinstance(event, Returned)]
            if len(values) < len(events):
                self._fail(_divergence_error(events))
            return values
        except Exception:
            self._unwind_others(current)
            raise
        finally:
            self._rounds.pop()

    def _run_on_caller(self, current: LockstepRound, index: int, function: Callable[[], Any]) -> Any:
        current.caller_index = index
        try:
            value = function()
        except AbortedError:
            raise
        except BaseException as exception:
            _add_replica_note(exception, index, current)
            raise
        self._check_not_failed()
        return value

    def _resume_others(self, current: LockstepRound, messages: list[Any]) -> None:
        """Sets the next messages of the threads. Sends them immediately, unless functions run sequentially."""
        current.next_messages = messages
        if not self.is_sequential:
            self._start_threads()
            for index in range(1, current.num_functions):
                self._resume(current, index)

    def _collect_events(self, current: LockstepRound) -> list[Event]:
        """Returns the next event of each thread: a return or a request. Aborts all functions if one has failed."""
        events: list[Event] = []
        self._start_threads()
        for index in range(1, current.num_functions):
            if index not in current.running:
                self._resume(current, index)
            event = self._next_event(current, index)
            if isinstance(event, Raised):
                _add_replica_note(event.exception, index, current)
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

    def _next_event(self, current: LockstepRound, index: int) -> Event:
        event = self.participants[index].next_event()
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
        """Stores the failure of all functions, and unwinds those on the caller's thread."""
        self._failure = failure
        raise AbortedError

    def _check_not_failed(self) -> None:
        """Unwinds further if a function has caught the error that unwinds it, as a bare ``except`` does."""
        if self._failure is not None:
            raise AbortedError

    def _abort(self) -> None:
        """Waits for running functions, unwinds waiting functions, and drops their events."""
        for participant in self.participants[1:]:
            while participant.is_running or participant.is_waiting:
                if not participant.is_running:
                    participant.resume(Raised(AbortedError()))
                with suppress(Empty):
                    participant.next_event(_POLL_S)
            with suppress(Empty):
                participant.next_event(0)


def _call(function: Callable[[], Any]) -> Returned | Raised:
    try:
        return Returned(function())
    except BaseException as exception:
        return Raised(exception)


def _add_replica_note(exception: BaseException, index: int, current: LockstepRound) -> None:
    if any(exception is raised for raised in current.action_exceptions):
        return  # an action runs once for all functions
    note = f"This happened in replica {index} of {current.num_functions}."
    if hasattr(exception, "add_note") and note not in getattr(exception, "__notes__", ()):  # Python 3.11
        exception.add_note(note)


def _divergence_error(events: Sequence[Event | None]) -> RuntimeError:
    """Creates the error for functions with different events; None for a function that the message leaves out."""
    states = [
        f"replica {index} " + (f"waits in {event.name}" if isinstance(event, OnceRequest) else "has returned")
        for index, event in enumerate(events)
        if event
    ]
    names = {event.name if isinstance(event, OnceRequest) else None for event in events}
    if len(names) == 1:
        states.append("each of another object")
    return RuntimeError(
        f"The replicas do not take the same path through the step: {', '.join(states)}. All replicas must request the"
        " operations that run once for the whole batch (a backward pass, an optimizer's step, a metric's value), in the"
        " same order. Make the path independent of the samples, or use `strategy='ddp_ext'`."
    )
