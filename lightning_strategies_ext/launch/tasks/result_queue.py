"""Queue of Lightning 1.5's spawn hooks, which transfers items from a worker to the main process."""

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import Empty
from typing import Any

import torch


class ResultQueue:
    """A first-in, first-out queue, which the first worker sends to the main process after the stage."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self._items = deque(items)

    def put(self, item: Any) -> None:
        """Appends an item that can be pickled; tensors are sent through shared memory."""
        self._items.append(item)

    def get(self) -> Any:
        """Removes and returns the oldest item, without waiting: the queue arrives with all its items.

        Raises:
            queue.Empty: If the queue is empty.
        """
        if not self._items:
            raise Empty("`get` was called more often in the main process than `put` in the worker.")
        return self._items.popleft()

    def empty(self) -> bool:
        """Whether the queue is empty."""
        return not self._items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


def put_metrics(trainer: Any, queue: ResultQueue) -> None:
    """Puts ``trainer.callback_metrics`` into the queue, as NumPy arrays (bfloat16 as float32)."""
    metrics = {name: value.detach().cpu() for name, value in trainer.callback_metrics.items()}
    queue.put({name: (v.float() if v.dtype == torch.bfloat16 else v).numpy() for name, v in metrics.items()})


def get_metrics(trainer: Any, queue: ResultQueue) -> None:
    """Updates ``trainer.callback_metrics`` from :func:`put_metrics`, as tensors."""
    trainer.callback_metrics.update({name: torch.as_tensor(value) for name, value in queue.get().items()})


def fill_queue(trainer: Any, queue: ResultQueue) -> None:
    """Calls the LightningModule's ``add_to_queue`` if it has one, else the strategy's."""
    _call("add_to_queue", put_metrics, trainer, queue)


def read_queue(trainer: Any, queue: ResultQueue) -> None:
    """Calls the LightningModule's ``get_from_queue`` if it has one, else the strategy's."""
    _call("get_from_queue", get_metrics, trainer, queue)


def _call(name: str, default: Callable[..., None], trainer: Any, queue: ResultQueue) -> None:
    module_method: Callable[..., None] | None = getattr(trainer.lightning_module, name, None)
    if module_method is None:
        getattr(trainer.strategy, name, default)(trainer, queue)
    elif len(inspect.signature(module_method).parameters) > 1:
        module_method(trainer, queue)
    else:
        module_method(queue)
