"""Handles of operations, with which the caller of a collective waits and adds callbacks."""

import math
import time
from collections import OrderedDict
from collections.abc import Generator, Sequence
from datetime import timedelta
from threading import Lock
from typing import Any, Protocol

import torch
from torch.distributed import DistBackendError, Work
from torch.futures import Future

from lightning_strategies_ext.shm.links import MismatchFoundError

#: Generator that executes an operation; yields whenever other ranks are not ready yet.
OperationSteps = Generator[None, None, None]


class Waitable(Protocol):
    """Object that executes an operation with other ranks, and waits for them."""

    @property
    def poll_s(self) -> float:
        """Time for which the caller polls before it sleeps, in seconds."""

    def wait(self, deadline: float) -> None:
        """Sleeps until data has arrived from other ranks; raises TimeoutError if none arrives by the deadline."""

    def reply_to_mismatch(self, found: MismatchFoundError) -> DistBackendError:
        """Returns the error of the operation after another rank has found a mismatch, see :class:`.Comparison`."""


class Completion(Protocol):
    """Completes the operations of a process group: an :class:`.OperationExecutor`.

    Attributes:
        futures_lock: Lock that is held while a future is created or fulfilled.
        unwaited: Handles that no thread has waited for yet, if torch drops their Python part.
    """

    futures_lock: Lock
    unwaited: OrderedDict["ShmWork", None]

    def complete(self, work: "ShmWork", until: float = ...) -> bool:
        """Waits until an operation has ended.

        Args:
            work: The operation.
            until: Time on the monotonic clock, in seconds.

        Returns:
            Whether it has ended by then.
        """


class ShmWork(Work):
    """Handle of an operation.

    Args:
        name: Name of the operation, for messages.
        progress: Generator that executes the operation; None if it has ended.
        waitable: Object that waits for other ranks.
        outputs: Tensors that the operation fills, and its future returns as a list.
        deadline: Time on the monotonic clock until which the operation waits for other ranks, in seconds.
        executor: Object that completes the operation.

    Attributes:
        status_text: Progress of the operation, for messages.
        num_expected_waits: Number of times that C++ code will wait for it: for coalesced operations, once per tensor.
    """

    def __init__(
        self,
        name: str,
        progress: OperationSteps | None,
        waitable: Waitable,
        outputs: Any,
        deadline: float,
        executor: Completion,
    ) -> None:
        super().__init__()
        self.name = name
        self.deadline = deadline
        self.waitable = waitable
        self.status_text = "it did not complete"
        self.num_expected_waits = 1
        self._progress = progress
        self._outputs = outputs
        self._executor = executor
        self._error: Exception | None = None
        self._end: Future[Any] | None = None
        self._future: Future[Any]
        self._is_future_fulfilled = False

    def is_completed(self) -> bool:
        """Returns whether the operation has ended, successfully or not."""
        return self._progress is None

    def is_success(self) -> bool:
        """Returns whether the operation has ended successfully."""
        return self._progress is None and self._error is None

    def exception(self) -> Exception | None:
        """Returns the error of the operation, or None."""
        return self._error

    @property
    def num_bytes(self) -> int:
        """Size of the outputs, in bytes."""
        return sum(tensor.nbytes for tensor in self._outputs)

    def result(self) -> list[torch.Tensor]:
        """Returns the outputs."""
        return list(self._outputs)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits until the outputs are filled.

        Args:
            timeout: Timeout of the wait; 0 for that of the operation. If the wait times out, the operation continues,
                and the caller can wait again.

        Raises:
            torch.distributed.DistBackendError: If the operation has failed, or has not ended within ``timeout``.
        """
        self.num_expected_waits -= 1
        if self.num_expected_waits <= 0:
            self._executor.unwaited.pop(self, None)
        seconds = timeout.total_seconds()
        if not self._executor.complete(self, time.monotonic() + seconds if seconds > 0 else math.inf):
            raise DistBackendError(
                f"{self.name}: {self.status_text} within {timeout}. It continues; wait for it again."
            )
        self.raise_if_failed()
        return True

    def raise_if_failed(self) -> None:
        """Raises the error of the operation, if it has failed.

        Raises:
            torch.distributed.DistBackendError: If the operation has failed.
        """
        if self._error is not None:
            raise self._error

    def synchronize(self) -> None:
        """Does the same as :meth:`wait`: operations of this group do not run on a stream."""
        self.wait()

    def get_future(self) -> "Future[Any]":
        """Returns a future of the outputs."""
        with self._executor.futures_lock:
            if self._end is None:
                self._end = Future()
                # C++ code, such as that of DDP, understands only errors of futures that `then` has returned.
                self._future = self._end.then(self._outcome)
        if self._progress is None:
            self.fulfill_future()
        return self._future

    def advance(self) -> bool:
        """Executes the operation until it has to wait. Returns whether it has ended.

        Raises:
            Exception: If the operation has failed.
        """
        assert self._progress is not None
        for _ in self._progress:
            return False
        return True

    def end(self, error: Exception | None) -> None:
        """Marks the operation as ended, with its error or None."""
        self._error = error
        with self._executor.futures_lock:
            self._progress = None

    def fulfill_future(self) -> None:
        """Fulfills the future, if there is one, which runs its callbacks."""
        with self._executor.futures_lock:
            if self._end is None or self._is_future_fulfilled:
                return
            self._is_future_fulfilled = True
        self._end.set_result(None)
        if self.num_expected_waits <= 1:
            self._executor.unwaited.pop(self, None)

    def _outcome(self, end: "Future[Any]") -> Any:
        if self._error is not None:
            raise self._error
        return self._outputs


def work_per_tensor(work: Any, outputs: Sequence[torch.Tensor]) -> Any:
    """Returns the handle of a coalesced operation, for which C++ code waits once per tensor."""
    work.num_expected_waits = len(outputs)
    return work
