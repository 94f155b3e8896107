"""Ctrl-C during an operation: the operation ends, so that no other thread waits for it indefinitely."""

import time
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import DistBackendError

from lightning_strategies_ext.shm.executor import OperationExecutor
from lightning_strategies_ext.shm.links import MismatchFoundError
from lightning_strategies_ext.shm.work import ShmWork


def interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


def find_a_mismatch() -> Generator[None, None, None]:
    raise MismatchFoundError("calls broadcast")
    yield


def succeed() -> Generator[None, None, None]:
    yield from ()


def in_the_reply(executor: OperationExecutor) -> ShmWork:
    waitable: Any = SimpleNamespace(poll_s=0.0, reply_to_mismatch=interrupt)
    return ShmWork("all_reduce", find_a_mismatch(), waitable, [torch.ones(1)], time.monotonic() + 60, executor)


def before_the_operation(executor: OperationExecutor) -> ShmWork:
    work = after_the_operation(executor)
    executor._try_to_finish = interrupt  # type: ignore[method-assign]
    return work


def after_the_operation(executor: OperationExecutor) -> ShmWork:
    waitable: Any = SimpleNamespace(poll_s=0.0)
    work = ShmWork("all_reduce", succeed(), waitable, [torch.ones(1)], time.monotonic() + 60, executor)
    work.end = lambda error: interrupt() if error is None else ShmWork.end(work, error)  # type: ignore[method-assign]
    return work


@pytest.mark.parametrize("make_work", [in_the_reply, before_the_operation, after_the_operation])
def test_an_interrupted_operation_has_ended_with_an_error(make_work: Callable[[OperationExecutor], ShmWork]):
    rounds: Any = SimpleNamespace(abort=lambda reason: None, leave=lambda: None, close=lambda: None)
    executor = OperationExecutor(rounds)
    work = make_work(executor)
    with pytest.raises(KeyboardInterrupt):
        executor.start(work, is_asynchronous=False)
    assert work.is_completed()
    assert executor.current_work is None
    with pytest.raises(DistBackendError, match="KeyboardInterrupt"):
        work.wait()
    executor.close()
