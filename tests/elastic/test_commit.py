"""Commits, without processes: what is checked before training relies on them."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_strategies_ext.elastic.commit import Commit, SharedState, pickle_state


def shared_state(**values: Any) -> SharedState:
    """Returns the shared state of a commit at step 0, without tensors."""
    return SharedState(
        **{
            "batches": 0,
            "step": 0,
            "world_size": 2,
            "first_world_size": 2,
            "checkpoint": {},
            "modes": {},
            "parameters": {},
            "omitted": {},
            "placeholders": [],
            "totals": None,
            "settings": {},
            "tuned": {},
            **values,
        }
    )


class OnGPU(Tensor):
    """A tensor of the CPU that claims to be on a GPU."""

    device = torch.device("cuda", 1)  # type: ignore[assignment]

    def detach(self) -> Any:
        return SimpleNamespace(cpu=lambda: torch.tensor([5.0]))


def test_tensors_of_a_gpu_are_pickled_as_tensors_of_the_cpu():
    metrics = {"metric": {"total": torch.zeros(1).as_subclass(OnGPU), "items": [torch.ones(1)]}}
    loaded = pickle.loads(pickle_state(metrics))
    assert loaded == {"metric": {"total": torch.tensor([5.0]), "items": [torch.ones(1)]}}
    assert type(loaded["metric"]["total"]) is Tensor


def test_state_that_cannot_be_pickled_is_an_error_at_the_first_commit():
    shared = shared_state(checkpoint={"callbacks": {"Own": {"function": lambda: None}}})
    with pytest.raises(RuntimeError, match="cannot be passed to new or restarted ranks"):
        Commit(1)._write(shared, [])
