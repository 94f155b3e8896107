"""Commits: what is checked before training relies on them."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_strategies_ext.elastic import commit as commit_module
from lightning_strategies_ext.elastic.commit import Commit, SharedState
from lightning_strategies_ext.elastic.commit_state import TensorPlaceholder, pickle_state
from tests.support.elastic_runs import run_workers
from tests.support.elastic_script import Net


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


def test_memory_that_cannot_be_pinned_is_replaced_by_other_memory(monkeypatch):
    empty = torch.empty

    def empty_without_pinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty_without_pinned)
    commit = Commit(1)
    commit._check_fits = lambda placeholders: setattr(commit, "_may_pin", True)  # type: ignore[method-assign]
    placeholder = TensorPlaceholder(0, torch.Size([3]), torch.float32)
    collectives: Any = SimpleNamespace(broadcast_tensors=lambda tensors, src: tensors[0].fill_(2.0))
    commit.receive(collectives, 0, shared_state(placeholders=[placeholder]), True)
    assert commit._tensors[0].tolist() == [2.0] * 3


def leave_memory_for_weights_only(net: Net, at: str) -> None:
    """Lets the first commit fit into memory, but not one with the state of Adam."""
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in net.state_dict().values())
    commit_module.free_memory = lambda: 2 * 2 * num_bytes  # for two ranks


@pytest.mark.processes
def test_too_little_memory_for_the_state_of_optimizers_is_an_error_at_the_first_step():
    run = run_workers(2, leave_memory_for_weights_only, strategy={"commit_every_n_steps": 50})
    assert run.code != 0
    assert "CommitTooLargeError: A commit has 0.0 GiB" in run.output
    assert len(run.having("samples")) == 2  # one batch of each rank
