"""Copies from a GPU are awaited once; a tensor subclass simulates the GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_strategies_ext._system.gpu_sync import copy_to_host


class OnGPU(Tensor):
    is_cuda = True


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records allocations and waits. A CPU has no pinned memory."""
    events: list[str] = []
    empty_like = torch.empty_like

    def recorded(tensor: Tensor, *, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        events.append("pinned" if pin_memory else "not pinned")
        return empty_like(tensor.as_subclass(Tensor), **kwargs)

    monkeypatch.setattr(torch, "empty_like", recorded)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("wait"))
    return events


def test_copies_of_a_gpu_are_in_pinned_memory_and_waited_for_together(events: list[str]) -> None:
    tensors = [torch.full((2,), float(number)).as_subclass(OnGPU) for number in range(3)]
    first = copy_to_host(tensors, [None, None, None], may_pin=True)
    assert events == ["pinned", "pinned", "pinned", "wait"]
    assert [each.tolist() for each in first] == [[0, 0], [1, 1], [2, 2]]
    events.clear()
    again = copy_to_host(tensors[::-1], first, may_pin=True)
    assert events == ["wait"]
    assert all(one is other for one, other in zip(first, again, strict=True))
    assert [each.tolist() for each in again] == [[2, 2], [1, 1], [0, 0]]


def test_copies_need_no_pinned_memory_and_those_of_the_host_no_waiting(events: list[str]) -> None:
    copy_to_host([torch.ones(2).as_subclass(OnGPU)], [None], may_pin=False)
    assert events == ["not pinned", "wait"]
    events.clear()
    (copied,) = copy_to_host([torch.ones(2, requires_grad=True)], [None], may_pin=True)
    assert events == []
    assert copied.tolist() == [1, 1]
    assert not copied.requires_grad
