"""Ordered execution of exchanges with several collectives each, concurrently with the backward pass.

If each collective were started by the thread that observes the end of the previous one, the order would differ between
ranks. Ranks would then sum unrelated tensors, or wait indefinitely.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future

from lightning_strategies_ext._system.gpu_sync import side_stream


class _QueuedWork(NamedTuple):
    work: Callable[[], None]
    tensor: Tensor
    future: Future[Any]


class OrderedExecutor:
    """Executes submitted work in order: on CPUs in a thread, on GPUs in a stream.

    Args:
        device: Device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = side_stream(device) if device.type == "cuda" else None
        self._works: SimpleQueue[_QueuedWork | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None], tensor: Tensor) -> Future[Tensor]:
        """Executes ``work`` after all work that was submitted before; returns at once.

        Args:
            work: Callable that starts its collectives and waits for them.
            tensor: Tensor that ``work`` writes to, and the value of the future.

        Returns:
            Future with the tensor, or with the exception that ``work`` raises.
        """
        if self._stream is not None:
            return self._in_stream(self._stream, work, tensor)
        future: Future[Any] = Future()
        if self._thread is None:
            self._thread = threading.Thread(target=_run, args=(self._works,), name="exchanges", daemon=True)
            self._thread.start()
        self._works.put(_QueuedWork(work, tensor, future))
        return future.then(_value)

    def close(self) -> None:
        """Ends the thread after all submitted work; no work may be submitted afterwards. A second call is a no-op."""
        if self._thread is not None:
            self._works.put(None)

    def _in_stream(self, stream: Any, work: Callable[[], None], tensor: Tensor) -> Future[Tensor]:
        # NCCL's collectives wait in the stream, and this thread continues. Buckets have the same order on all ranks.
        future: Future[Tensor] = Future(devices=[self._device])
        stream.wait_stream(torch.cuda.current_stream(self._device))
        tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            work()
            future.set_result(tensor)
        return future


def _run(works: "SimpleQueue[_QueuedWork | None]") -> None:
    while (given := works.get()) is not None:
        result: Tensor | Exception = given.tensor
        try:
            given.work()
        except Exception as error:
            result = error
        given.future.set_result(result)
        del given, result  # otherwise they stay alive until the next work


def _value(done: Future[Any]) -> Tensor:
    # An exception that is raised here reaches a waiting thread in C++, such as DDP's; an exception from `set_exception`
    # does not.
    value = done.value()
    if isinstance(value, Exception):
        raise value
    result: Tensor = value
    return result
