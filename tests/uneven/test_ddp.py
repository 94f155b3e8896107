"""``uneven_inputs`` with DDP: its arguments, communication hooks, buffers, and workers of ``fit``.

The gradients of two ranks, and their mean, are bitwise identical to those of the reference in one process.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional

from lightning_strategies_ext import DDPSpawnStrategy
from tests.support.ranks import run_ranks
from tests.support.uneven_training import BATCH_SIZE, KINDS, Model, batch_of, reference, strategy_of, train

pytestmark = pytest.mark.processes

LENGTHS = (3, 6)
EPOCH = {"max_epochs": 1}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "unused parameters are found": {"find_unused_parameters": True},
    "gradients are kept twice": {"gradient_as_bucket_view": False},
    "small buckets": {"bucket_cap_mb": 1e-4},
    "buffers differ": {"broadcast_buffers": False},
}
HOOKS = {
    "all-reduce": {"ddp_comm_hook": default_hooks.allreduce_hook},
    "bf16": {"ddp_comm_hook": default_hooks.bf16_compress_hook},
    "compressed to bf16": {"compression": "bf16"},
    "wrapped in fp16": {
        "ddp_comm_hook": default_hooks.allreduce_hook,
        "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper,
    },
}
#: Tolerance of the weights after 12 steps: such hooks round each gradient to 8 or 11 bits.
TOLERANCES = {"all-reduce": 0.0, "bf16": 2e-3, "compressed to bf16": 2e-3, "wrapped in fp16": 2e-4}


class Branches(Model):
    """A model with a layer that only the last batch of rank 0 uses; rank 0 repeats this batch three times."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(6, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch, self.trainer.global_rank == 0 and batch_idx >= LENGTHS[0] - 1)

    def loss(self, batch: Any, is_last: bool) -> Tensor:
        features, labels = batch
        outputs = self.net(features)
        return functional.cross_entropy(outputs + self.branch(features) if is_last else outputs, labels)

    def on_train_epoch_end(self) -> None:
        self.branch_weights = self.branch.weight.detach().clone()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


class Heads(Model):
    """A model with a second head for every third batch of a rank; windows have three batches."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch, self.trainer.global_rank, batch_idx)

    def loss(self, batch: Any, rank: int, index: int) -> Tensor:
        features, labels = batch
        return functional.cross_entropy((self.head if (index + rank) % 3 == 0 else self.net)(features), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


HEADS_LENGTHS = ((10, 6), (4, 9), (5, 9))


def train_all() -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for kind in KINDS:
        for name, arguments in ARGUMENTS.items():
            for accumulate in (1, 2):
                strategy = strategy_of("shm", "join", **arguments)
                options = {"accumulate_grad_batches": accumulate}
                results[name, kind, accumulate] = train(strategy, LENGTHS, kind, Model, options)["weights"]
        for name, hook in HOOKS.items():
            results[name, kind] = train(strategy_of("shm", "join", **hook), LENGTHS, kind, Model)["weights"]
    results["static graph"] = train(strategy_of("shm", "join", static_graph=True), LENGTHS, "counted", Model)["weights"]
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=4)
    strategy = strategy_of("shm", "join", ddp_comm_hook=powerSGD_hook.powerSGD_hook, ddp_comm_state=state)
    results["PowerSGD"] = train(strategy, LENGTHS, "counted", Model)["weights"]
    for name in ("powersgd", "topk"):
        strategy = strategy_of("shm", "join", compression=name)
        results[name] = train(strategy, LENGTHS, "counted", Model)["weights"]
    branches = Branches()
    strategy = strategy_of("shm", "join", find_unused_parameters=True)
    train(strategy, LENGTHS, "counted", lambda: branches, EPOCH)
    results["branches"] = branches.branch_weights
    for lengths in HEADS_LENGTHS:
        for arguments in ({}, {"gradient_as_bucket_view": False}):
            strategy = strategy_of("shm", "join", find_unused_parameters=True, **arguments)
            options = {"accumulate_grad_batches": 3, **EPOCH}
            model = Heads()
            train(strategy, lengths, "counted", lambda model=model: model, options)
            weights = {name: value.detach().clone() for name, value in model.named_parameters()}
            results["heads", lengths, not arguments] = weights
    mixed = {"precision": "bf16-mixed", "gradient_clip_val": 0.5}
    results["bf16-mixed"] = train(strategy_of("shm", "join"), LENGTHS, "counted", Model, mixed)["weights"]
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return run_ranks(train_all)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_weights_are_those_of_one_process(ranks, name, kind, accumulate):
    for rank in ranks:
        for key, value in reference("join", LENGTHS, kind, accumulate).items():
            assert torch.equal(rank[name, kind, accumulate][key], value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_averages_over_the_ranks_that_have_data(ranks, name, kind):
    for key, value in reference("join", LENGTHS, kind).items():
        torch.testing.assert_close(ranks[0][name, kind][key], value, rtol=0, atol=TOLERANCES[name])
        assert torch.equal(ranks[0][name, kind][key], ranks[1][name, kind][key])


def test_a_static_graph_joins(ranks):
    for key, value in reference("join", LENGTHS, "counted").items():
        assert torch.equal(ranks[0]["static graph"][key], value)


@pytest.mark.parametrize("name", ["PowerSGD", "powersgd", "topk", "bf16-mixed"])
def test_rounding_exchanges_come_close_and_keep_ranks_equal(ranks, name):
    for key, value in reference("join", LENGTHS, "counted").items():
        assert torch.equal(ranks[0][name][key], ranks[1][name][key])
        torch.testing.assert_close(ranks[0][name][key], value, rtol=0, atol=0.3)


def test_parameters_that_only_ranks_without_data_use_are_unchanged(ranks):
    model = Branches()
    optimizer = model.configure_optimizers()
    for index in range(max(LENGTHS)):
        optimizer.zero_grad()
        present = [rank for rank, length in enumerate(LENGTHS) if index < length]
        for rank in present:
            (model.loss(batch_of(rank, index), rank == 0 and index == LENGTHS[0] - 1) / len(present)).backward()
        optimizer.step()
    for rank in ranks:
        torch.testing.assert_close(rank["branches"], model.branch.weight.detach())


@pytest.mark.parametrize("is_view", [True, False])
@pytest.mark.parametrize("lengths", HEADS_LENGTHS)
def test_gradients_of_a_rank_without_data_in_a_window_are_discarded(ranks, lengths, is_view):
    model = Heads()
    optimizer = model.configure_optimizers()
    for first in range(0, max(lengths), 3):
        optimizer.zero_grad()
        indices = range(first, min(first + 3, max(lengths)))
        num_present = sum(length > first for length in lengths)
        for index in indices:
            for rank, length in enumerate(lengths):
                if index < length:
                    (model.loss(batch_of(rank, index), rank, index) / num_present / 3).backward()
        optimizer.step()
    for rank in ranks:
        for name, value in model.named_parameters():
            torch.testing.assert_close(rank["heads", lengths, is_view][name], value.detach())


@pytest.mark.parametrize("kind", KINDS)
def test_workers_that_fit_starts_join_and_all_results_are_returned(kind):
    with DDPSpawnStrategy(uneven_inputs="join") as strategy:
        result = train(strategy, (5, 3), kind, Model)
    for key, value in reference("join", (5, 3), kind).items():
        assert torch.equal(result["weights"][key], value)
    assert result["logged"]["num_samples"] == 8 * BATCH_SIZE
    assert result["num_seen"] == 2 * 5 * BATCH_SIZE
