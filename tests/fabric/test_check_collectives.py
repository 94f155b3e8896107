"""Fabric with ``check_collectives=True``: ranks that call different collectives raise an error with both calls."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric

from lightning_strategies_ext import ChecksOptions, RankDisagreementError
from lightning_strategies_ext.fabric.ddp import DDPStrategy
from lightning_strategies_ext.fabric.horovod import HorovodStrategy
from tests.support.horovod_ranks import try_horovod
from tests.support.models import MLP, assert_same_bits, dataset, state_of
from tests.support.ranks import outcomes_of_ranks, run_ranks

CHECKED = ChecksOptions(check_collectives=True)


def train(backend: str, fault: str = "", checks: ChecksOptions | None = CHECKED, has_stopped: bool = False) -> Any:
    strategy = DDPStrategy(process_group_backend=backend, checks=checks, hang_timeout=20)
    fabric = Fabric(strategy=strategy, devices=2, accelerator="cpu")
    fabric.launch()
    fabric.seed_everything(11, verbose=False)
    module = MLP()
    model, optimizer = fabric.setup(module.net, torch.optim.SGD(module.net.parameters(), lr=0.1))
    batches = fabric.setup_dataloaders(torch.utils.data.DataLoader(dataset(), batch_size=4))
    if has_stopped:
        with strategy.coordinated_stop():
            pass
    for index, (features, labels) in enumerate(batches):
        loss = torch.nn.functional.cross_entropy(model(features), labels)
        if index == 1:
            call_torch(fault, is_faulty=fabric.global_rank == 1)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    fabric.all_reduce(loss.detach())
    return state_of(module)


def call_torch(fault: str, is_faulty: bool) -> None:
    if fault == "lone":
        if is_faulty:
            dist.all_reduce(torch.ones(2))
    else:
        dist.all_reduce(reduced := torch.ones(3 if fault == "shape" and is_faulty else 2))
        assert reduced.tolist() == [2.0, 2.0]


def checked_and_unchecked(backend: str) -> list[Any]:
    return [train(backend), train(backend, checks=None)]


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_matching_calls_train_as_without_the_option(backend: str) -> None:
    for checked, unchecked in run_ranks(checked_and_unchecked, backend):
        assert_same_bits(checked, unchecked)


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_every_rank_names_both_calls(backend: str) -> None:
    for outcome in outcomes_of_ranks(train, backend, "shape"):
        assert "RankDisagreementError: The ranks do not call the same collectives: " in outcome.error, outcome
        for rank, size in enumerate((2, 3)):
            text = f"all_reduce (sum) of a tensor of shape [{size}] and dtype float32, at `all_reduce` in call_torch ("
            assert f"rank {rank} calls torch.distributed's {text}" in outcome.error


@pytest.mark.processes
@pytest.mark.parametrize("has_stopped", [False, True])
def test_a_call_of_one_rank_is_compared_with_the_backward_pass(has_stopped: bool) -> None:
    for outcome in outcomes_of_ranks(train, "gloo", "lone", CHECKED, has_stopped):
        assert "RankDisagreementError: The ranks do not call the same collectives: rank 0 " in outcome.error, outcome
        assert "at `backward` in" in outcome.error
        assert "at `all_reduce` in call_torch (" in outcome.error


def error_over_horovod() -> str:
    fabric = Fabric(strategy=HorovodStrategy(checks=CHECKED), devices=2, accelerator="cpu")
    fabric.launch()
    with pytest.raises(RankDisagreementError) as caught:
        fabric.all_gather(torch.ones(2)) if fabric.global_rank == 0 else fabric.barrier()
    return str(caught.value)


@pytest.mark.processes
def test_every_rank_of_horovod_names_both_calls() -> None:
    _, outcomes = try_horovod("horovodrun", error_over_horovod)
    for message in outcomes.values():
        # Horovod gathers tensors whose first dimensions differ.
        assert "rank 0 calls all_gather of a tensor of shape [0] and dtype float32, at `all_gather` in" in message
        assert "rank 1 calls barrier, at `barrier` in" in message


def test_fabric_rejects_checks_of_losses_and_epochs():
    with pytest.raises(ValueError, match="Fabric supports only the field `check_collectives`"):
        DDPStrategy(checks=ChecksOptions(nonfinite_loss="error"))
