"""Ranks on GPUs with different numbers of batches: results equal the results of one process with all batches."""

from math import isfinite
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_strategies_ext import DDPStrategy
from tests.gpu.devices import Ranks
from tests.support.uneven_training import (
    BATCH_SIZE,
    KINDS,
    LENGTHS,
    NUM_EPOCHS,
    Manual,
    Model,
    Normalized,
    reference,
    train,
)

pytestmark = pytest.mark.processes

SHORT = {name: lengths for name, lengths in LENGTHS.items() if name != "even"}
CASES = [(mode, name, kind, steps) for mode in ("stop", "join") for name in SHORT for kind in KINDS for steps in (1, 2)]
#: Maximum distance of the weights from training without compression, after ten steps.
COMPRESSIONS = {"bf16": 2e-3, "powersgd": 0.3}


def train_all(where: dict[str, Any]) -> dict[Any, dict[str, Any]]:
    def trained(mode: str, lengths: tuple[int, ...], kind: str, make_model: type[Model], **options: Any) -> Any:
        strategy = DDPStrategy(uneven_inputs=mode, compression=options.pop("compression", None))
        return train(strategy, lengths, kind, make_model, {**where, **options})

    found: dict[Any, dict[str, Any]] = {
        case: trained(case[0], SHORT[case[1]], case[2], Model, accumulate_grad_batches=case[3]) for case in CASES
    }
    for kind in KINDS:
        found["manual", kind] = trained("join", (5, 3), kind, Manual)
        found["batch norm", kind] = trained("join", (3, 5), kind, Normalized)
    for name in COMPRESSIONS:
        found[name] = trained("join", (5, 3), "counted", Model, compression=name)
    return found


@pytest.fixture(scope="module")
def of_ranks(two_ranks: Ranks) -> list[dict[Any, dict[str, Any]]]:
    return two_ranks.run(train_all, timeout_s=280)


def assert_near(weights: dict[str, Tensor], expected: dict[str, Tensor], within: float = 1e-4) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name].cpu(), tensor, rtol=0, atol=within)


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    for name, tensor in first.items():
        assert torch.equal(tensor.cpu(), second[name].cpu()), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_counts_and_logs_are_those_of_the_ranks_that_had_data(case: Any, of_ranks: list[dict[Any, Any]]):
    mode, name, kind, accumulate = case
    counted = [min(SHORT[name]) if mode == "stop" else length for length in SHORT[name]]
    for found in (rank[case] for rank in of_ranks):
        assert_near(found["weights"], reference(mode, SHORT[name], kind, accumulate))
        assert found["global_step"] == NUM_EPOCHS * -(-max(counted) // accumulate)
        assert found["num_validated"] == [2] * (NUM_EPOCHS + 1)  # with the sanity check
        assert all(isfinite(value) for value in found["logged"].values())
        if accumulate == 1:
            assert found["num_seen"] == NUM_EPOCHS * BATCH_SIZE * max(counted)
            assert found["logged"]["num_samples"] == BATCH_SIZE * sum(counted)
    assert_equal(*(rank[case]["weights"] for rank in of_ranks))


@pytest.mark.parametrize("kind", KINDS)
def test_manual_optimization_and_batch_normalization(kind: str, of_ranks: list[dict[Any, Any]]) -> None:
    first, second = of_ranks
    assert_near(first["manual", kind]["weights"], reference("join", (5, 3), kind, num_steps=2))
    assert_equal(first["manual", kind]["weights"], second["manual", kind]["weights"])
    assert_equal(first["batch norm", kind]["weights"], second["batch norm", kind]["weights"])
    assert first["batch norm", kind]["weights"]["1.num_batches_tracked"].item() == 5 * NUM_EPOCHS


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_a_compressed_gradient_counts_once(name: str, of_ranks: list[dict[Any, Any]]) -> None:
    assert_equal(*(rank[name]["weights"] for rank in of_ranks))
    assert_near(of_ranks[0][name]["weights"], reference("join", (5, 3), "counted"), COMPRESSIONS[name])
