"""``ChecksOptions(check_collectives=True)``: calls of ``torch.distributed`` in the user's code are compared, too."""

import re
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_strategies_ext import ChecksOptions, DDPStrategy
from tests.support.models import MLP, loader, make_trainer
from tests.support.ranks import outcomes_of_ranks, run_ranks

CHECKED = ChecksOptions(check_collectives=True)


def matching_calls(rank: int, size: int) -> list[Any]:
    """Calls most collectives, and returns their results."""
    summed = torch.full((2, 3), rank + 1.0)
    dist.all_reduce(summed)
    handle = dist.all_reduce(largest := torch.tensor([rank]), op=dist.ReduceOp.MAX, async_op=True)
    assert handle is not None
    handle.wait()
    sent = torch.tensor([rank + 7])
    dist.broadcast(sent, src=1)
    parts = [torch.empty(2) for _ in range(size)]
    dist.all_gather(parts, torch.full((2,), float(rank)))
    into = torch.empty(size)
    dist.all_gather_into_tensor(into, torch.full((1,), float(rank)))
    gathered = [torch.empty(1) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.full((1,), rank + 0.5), gathered)
    received = torch.empty(1)
    dist.scatter(received, [torch.tensor([part + 0.25]) for part in range(size)] if rank == 0 else None)
    dist.reduce(total := torch.ones(2), dst=1)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, "x" * (rank + 1))  # of different lengths
    dist.barrier()
    roots = [gathered, total] if rank == 1 else [gathered]
    return [summed, largest, sent, parts, into, received, objects, *roots]


class Calls(MLP):
    """A model whose ``training_step`` calls torch.distributed, on rank 1 as the fault states."""

    fault = ""
    results: list[Any]
    seconds = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            start = time.monotonic()
            try:
                self.call_torch(is_faulty=self.global_rank == 1)
            finally:
                self.seconds = time.monotonic() - start
        return self.loss(batch)

    def call_torch(self, is_faulty: bool) -> None:
        rank, size = self.global_rank, self.trainer.world_size
        if self.fault == "":
            self.results = [matching_calls(rank, size) for _ in range(2)]
        elif self.fault == "shape":
            dist.all_reduce(torch.ones(3, 2) if is_faulty else torch.ones(2, 3))
        elif self.fault == "dtype":
            dist.all_reduce(torch.ones(2, dtype=torch.int32) if is_faulty else torch.ones(2))
        elif self.fault == "reduction":
            dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX if is_faulty else dist.ReduceOp.SUM)
        elif self.fault == "root":
            dist.broadcast(torch.ones(2), src=int(is_faulty))
        elif self.fault == "kind":
            dist.broadcast(torch.ones(2), src=0) if is_faulty else dist.all_reduce(torch.ones(2))
        elif self.fault == "lone" and is_faulty:
            dist.all_reduce(torch.ones(2))
        elif self.fault == "group":
            group = dist.new_group([0, 1])
            dist.all_reduce(torch.ones(3 if is_faulty else 2), group=group)


class LoneAtEnd(Calls):
    """A model with a call that only rank 1 makes, after the last collective of the other ranks."""

    def on_train_end(self) -> None:
        if self.global_rank == 1:
            dist.all_reduce(torch.ones(2))


def train(backend: str, fault: str = "", checks: ChecksOptions | None = CHECKED, kind: type[Calls] = Calls) -> Any:
    torch.manual_seed(2)
    model = kind()
    model.fault = fault
    strategy = DDPStrategy(process_group_backend=backend, checks=checks, hang_timeout=20)
    make_trainer(strategy, max_epochs=1).fit(model, loader(32), loader(16))
    return getattr(model, "results", [])


def fault_of_validation(backend: str) -> None:
    class Validates(Calls):
        def validation_step(self, batch: Any, batch_idx: int) -> None:  # under `torch.inference_mode`
            dist.all_reduce(torch.ones(2, 1) if self.global_rank == 1 else torch.ones(1, 2))

    make_trainer(DDPStrategy(process_group_backend=backend, checks=CHECKED)).validate(Validates(), loader(16))


EXPECTED = {
    "shape": ("all_reduce (sum) of a tensor of shape [2, 3] and", "all_reduce (sum) of a tensor of shape [3, 2] and"),
    "dtype": ("all_reduce (sum) of a tensor of shape [2] and dtype float32, at", "dtype int32, at"),
    "reduction": ("all_reduce (sum) of a tensor of shape [2]", "all_reduce (max) of a tensor of shape [2]"),
    "root": ("broadcast with root 0 of a tensor", "broadcast with root 1 of a tensor"),
    "kind": ("all_reduce (sum) of a tensor of shape [2]", "broadcast with root 0 of a tensor of shape [2]"),
    "group": ("all_reduce (sum) of a tensor of shape [2]", "all_reduce (sum) of a tensor of shape [3]"),
}


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_matching_calls_have_the_results_of_unchecked_ones(backend: str) -> None:
    for checked, unchecked in run_ranks(checked_and_unchecked, backend):
        assert repr(checked) == repr(unchecked)
        assert checked[0][0].tolist() == [[3.0] * 3] * 2


def checked_and_unchecked(backend: str) -> list[Any]:
    return [train(backend, checks=checks) for checks in (CHECKED, None)]


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("fault", [*EXPECTED])
def test_every_rank_names_both_calls_and_lines(fault: str, backend: str) -> None:
    for outcome in outcomes_of_ranks(train, backend, fault):
        assert "RankDisagreementError: The ranks do not call the same collectives: " in outcome.error, outcome
        for rank, text in enumerate(EXPECTED[fault]):
            call = re.search(rf"rank {rank} calls torch.distributed's ([^;]*)", outcome.error)
            assert call is not None, outcome.error
            assert text in call[1]
            assert re.search(r"in call_torch \(.*test_check_user_collectives.py:\d+\)", call[1])


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_call_of_one_rank_is_compared_with_the_backward_pass(backend: str) -> None:
    for outcome in outcomes_of_ranks(train, backend, "lone"):
        assert "rank 0 calls exchange of the gradients of batch 1" in outcome.error, outcome
        assert "rank 1 calls torch.distributed's all_reduce (sum) of a tensor of shape [2]" in outcome.error


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_call_in_validation_is_compared(backend: str) -> None:
    for outcome in outcomes_of_ranks(fault_of_validation, backend):
        assert "rank 0 calls torch.distributed's all_reduce (sum) of a tensor of shape [1, 2]" in outcome.error, outcome


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_call_after_the_stage_of_the_others_is_named(backend: str) -> None:
    outcomes = outcomes_of_ranks(partial(train, kind=LoneAtEnd), backend)
    assert "at `all_reduce` in on_train_end (" in outcomes[1].error, outcomes
