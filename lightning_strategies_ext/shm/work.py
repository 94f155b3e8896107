"""Handles of operations: what the caller of a collective holds, waits with, and hangs callbacks on."""

import math
import time
from collections import OrderedDict
from collections.abc import Generator
from datetime import timedelta
from threading import Lock
from typing import Any, Protocol

import torch
from torch.distributed import DistBackendError, Work
from torch.futures import Future

#: An operation under way: yields where it has to wait for others.
Progress = Generator[None, None, None]


class Exchange(Protocol):
    """What carries out an operation with other ranks, as far as one can wait for it."""

    @property
    def spin_s(self) -> float:
        """How long to look for others before going to sleep, in seconds."""

    def wait(self, deadline: float) -> None:
        """Sleeps until something came from others; a TimeoutError if nothing did."""


class Completion(Protocol):
    """Completes the operations of a process group: an :class:`.Execution`.

    Attributes:
        futures: Held while a future is created or fulfilled.
        unclaimed: Handles that no thread has waited for yet, where torch loses them.
    """

    futures: Lock
    unclaimed: OrderedDict["ShmWork", None]

    def complete(self, work: "ShmWork", until: float = ...) -> bool:
        """Waits until an operation has ended.

        Args:
            work: The operation.
            until: Time on the monotonic clock, in seconds.

        Returns:
            Whether it has ended by then.
        """


class ShmWork(Work):
    """The handle of an operation that was started.

    Args:
        name: Of the operation, for messages.
        progress: Does the work; yields where others must be waited for. None if it has ended.
        exchange: What to wait with then.
        outputs: What the future of the operation gives: a list of tensors.
        deadline: Until when others may be waited for, on the monotonic clock, in seconds.
        execution: What completes it.

    Attributes:
        state: What is known of how far it is, for messages.
        num_claims: How often C++ code will wait for it: for coalesced operations, once per tensor.
    """

    def __init__(
        self,
        name: str,
        progress: Progress | None,
        exchange: Exchange,
        outputs: Any,
        deadline: float,
        execution: Completion,
    ) -> None:
        super().__init__()
        self.name = name
        self.deadline = deadline
        self.exchange = exchange
        self.state = "it has not ended"
        self.num_claims = 1
        self._progress = progress
        self._outputs = outputs
        self._execution = execution
        self._error: Exception | None = None
        self._end: Future[Any] | None = None
        self._future: Future[Any]
        self._is_told = False

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._progress is None

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._progress is None and self._error is None

    def exception(self) -> Exception | None:
        """Why it has failed, if it has."""
        return self._error

    @property
    def num_bytes(self) -> int:
        """Size of the tensors that it fills."""
        return sum(tensor.nbytes for tensor in self._outputs)

    def result(self) -> list[torch.Tensor]:
        """The tensors that it has filled."""
        return list(self._outputs)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Returns when the tensors are filled.

        Args:
            timeout: How long to wait; 0 is as long as the operation may take. The operation goes on when a wait was too
                short, and can be waited for again.

        Raises:
            torch.distributed.DistBackendError: If the operation has failed, or has not ended after ``timeout``.
        """
        self.num_claims -= 1
        if self.num_claims <= 0:
            self._execution.unclaimed.pop(self, None)
        seconds = timeout.total_seconds()
        if not self._execution.complete(self, time.monotonic() + seconds if seconds > 0 else math.inf):
            raise DistBackendError(f"{self.name}: {self.state} in {timeout}. It goes on, and can be waited for again.")
        self.check()
        return True

    def check(self) -> None:
        """Raises what has gone wrong, if it has ended badly.

        Raises:
            torch.distributed.DistBackendError: That is it.
        """
        if self._error is not None:
            raise self._error

    def synchronize(self) -> None:
        """The same as :meth:`wait`: nothing here runs on a stream."""
        self.wait()

    def get_future(self) -> "Future[Any]":
        """A future of the tensors."""
        with self._execution.futures:
            if self._end is None:
                self._end = Future()
                # Only a future that comes of a callback can fail in a way that C++ code, such as DDP's, understands.
                self._future = self._end.then(self._outcome)
        if self._progress is None:
            self.tell()
        return self._future

    def advance(self) -> bool:
        """Does what can be done now; True when there is nothing left.

        Raises:
            Exception: What the operation has raised.
        """
        assert self._progress is not None
        for _ in self._progress:
            return False
        return True

    def end(self, error: Exception | None) -> None:
        """Marks it as ended."""
        self._error = error
        with self._execution.futures:
            self._progress = None

    def tell(self) -> None:
        """Fulfils the future, if there is one, which calls what others have hung on it."""
        with self._execution.futures:
            if self._end is None or self._is_told:
                return
            self._is_told = True
        self._end.set_result(None)
        if self.num_claims <= 1:
            self._execution.unclaimed.pop(self, None)

    def _outcome(self, end: "Future[Any]") -> Any:
        if self._error is not None:
            raise self._error
        return self._outputs
