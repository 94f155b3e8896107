"""Exchanges that take several collectives, one after another beside the backward pass, in the same order on all ranks.

A collective that is begun when another ends, by whatever thread sees that, is begun in another order on each rank;
ranks then add up what does not belong together, or wait for ever.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future

from lightning_strategies_ext._system.gpu_sync import side_stream


class _Given(NamedTuple):
    work: Callable[[], None]
    tensor: Tensor
    future: Future[Any]


class InOrder:
    """Carries out what it is given, one after another: on CPUs in a thread, on GPUs in a stream.

    Args:
        device: Of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = side_stream(device) if device.type == "cuda" else None
        self._works: SimpleQueue[_Given | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None], tensor: Tensor) -> Future[Tensor]:
        """Carries out ``work`` after all that was given before, and returns at once.

        Args:
            work: Waits for its collectives itself.
            tensor: What it writes to, and the value of the future.

        Returns:
            A future that has what ``work`` raises, if it does.
        """
        if self._stream is not None:
            return self._in_stream(self._stream, work, tensor)
        future: Future[Any] = Future()
        if self._thread is None:
            self._thread = threading.Thread(target=_carry_out, args=(self._works,), name="exchanges", daemon=True)
            self._thread.start()
        self._works.put(_Given(work, tensor, future))
        return future.then(_value)

    def close(self) -> None:
        """Ends the thread when all is carried out; nothing may be given afterwards. A second call does no harm."""
        if self._thread is not None:
            self._works.put(None)

    def _in_stream(self, stream: Any, work: Callable[[], None], tensor: Tensor) -> Future[Tensor]:
        # NCCL's collectives wait in the stream, and this thread goes on. Buckets come in the same order on all ranks.
        future: Future[Tensor] = Future(devices=[self._device])
        stream.wait_stream(torch.cuda.current_stream(self._device))
        tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            work()
            future.set_result(tensor)
        return future


def _carry_out(works: "SimpleQueue[_Given | None]") -> None:
    while (given := works.get()) is not None:
        result: Tensor | Exception = given.tensor
        try:
            given.work()
        except Exception as error:
            result = error
        given.future.set_result(result)
        del given, result  # or they live until the next one comes


def _value(done: Future[Any]) -> Tensor:
    # What is raised here reaches whoever waits in C++, as DDP does; what `set_exception` was given does not.
    value = done.value()
    if isinstance(value, Exception):
        raise value
    result: Tensor = value
    return result
