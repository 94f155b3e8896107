"""``uneven_inputs=...`` on ranks of both engines, with different numbers of batches.

The reference is a loop in one process that averages the gradients of the ranks that have data, batch by batch.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from math import isfinite
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.nn import functional

from lightning_strategies_ext import DDPSpawnStrategy, DDPStrategy, HorovodStrategy, UnevenInputsError
from tests.support.horovod_ranks import run_horovod, try_horovod
from tests.support.ranks import outcomes_of_ranks, run_ranks
from tests.support.uneven_training import (
    BATCH_SIZE,
    KINDS,
    LENGTHS,
    NUM_EPOCHS,
    Manual,
    Model,
    Normalized,
    batch_of,
    loader,
    reference,
    strategy_of,
    train,
)

ENGINES = ["horovod", "shm"]
POST_LOCAL_SGD = {
    "ddp_comm_state": PostLocalSGDState(None, None, 1),
    "ddp_comm_hook": post_localSGD_hook,
    "model_averaging_period": 2,
}
CASES = {
    (mode, name, kind, accumulate): {"accumulate_grad_batches": accumulate}
    for mode in ("stop", "join")
    for name in LENGTHS
    for kind in KINDS
    for accumulate in (1, 2)
}
CASES |= {
    ("error", "even", kind, accumulate): {"accumulate_grad_batches": accumulate}
    for kind in KINDS
    for accumulate in (1, 3)
}


class AddsUp(Model):
    """Manual optimization with a step after three batches, and with exchanges after the second and the third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        with self.trainer.strategy.block_backward_sync() if batch_idx % 3 == 0 else nullcontext():
            self.manual_backward(loss)
        if batch_idx % 3 == 2:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def on_train_epoch_end(self) -> None:
        pass


class LaterEven(Model):
    """A model that has the same number of batches on all ranks in its second epoch."""

    def train_dataloader(self) -> Any:
        return loader(self.global_rank, 4, "counted") if self.current_epoch else super().train_dataloader()


def train_all(engine: str, directory: str) -> dict[Any, Any]:
    """Trains all cases on this rank."""

    def trained(mode: str, *args: Any) -> dict[str, Any]:
        return train(strategy_of(engine, mode), *args)

    results: dict[Any, Any] = {
        case: trained(case[0], LENGTHS[case[1]], case[2], Model, options) for case, options in CASES.items()
    }
    for kind in KINDS:
        results["manual", kind] = trained("join", (5, 3), kind, Manual)
        saving = ModelCheckpoint(directory, f"{kind}-{{step}}", every_n_train_steps=2, save_top_k=-1)
        options = {"enable_checkpointing": True, "callbacks": [saving], "val_check_interval": 2, "max_epochs": 1}
        results["checkpoints", kind] = trained("join", (6, 3), kind, Model, options)
    for kind in KINDS:
        results["batch norm", kind] = trained("join", (3, 5), kind, Normalized)
    for length in (4, 5):
        results["adds up", length] = trained("join", (length, 6), "counted", AddsUp, {"max_epochs": 1})
    results["later even"] = trained("join", (5, 3), "counted", LaterEven, {"reload_dataloaders_every_n_epochs": 1})
    results["half epochs"] = trained("join", (6, 3), "counted", Model, {"val_check_interval": 0.5, "max_epochs": 1})
    results["not reached"] = trained("error", (5, 7), "counted", Model, {"max_steps": 4})
    return results


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def ranks(engine: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run(engine, train_all, str(tmp_path_factory.mktemp("checkpoints")))


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_are_those_of_the_ranks_that_had_data(ranks, case):
    mode, name, kind, accumulate = case
    for result in (rank[case] for rank in ranks):
        assert_equal(result["weights"], reference(mode, LENGTHS[name], kind, accumulate))
        num_batches = min(LENGTHS[name]) if mode == "stop" else max(LENGTHS[name])
        assert result["global_step"] == NUM_EPOCHS * -(-num_batches // accumulate)
        assert result["lr"] == pytest.approx(0.1 * 0.5**NUM_EPOCHS)
        assert result["num_validated"] == [2] * (NUM_EPOCHS + 1)  # with the sanity check
        assert all(isfinite(value) for value in result["logged"].values())  # also in steps without data
    assert all(torch.equal(ranks[0][case]["weights"][key], value) for key, value in ranks[1][case]["weights"].items())


@pytest.mark.processes
def test_an_end_that_training_does_not_reach_is_no_error(ranks):
    for rank in ranks:
        assert rank["not reached"]["global_step"] == 4
        assert len(rank["not reached"]["steps"]) == 4


@pytest.mark.processes
@pytest.mark.parametrize("case", [case for case in CASES if case[3] == 1], ids=str)
def test_each_batch_is_logged_and_counted_once(engine, ranks, case):
    mode, name, _, _ = case
    counted = [min(LENGTHS[name]) if mode == "stop" else length for length in LENGTHS[name]]
    firsts = [[batch_of(rank, index)[0] for index in range(count)] for rank, count in enumerate(counted)]
    whole = torch.cat([batch for batches in firsts for batch in batches])
    for result in (rank[case] for rank in ranks):
        # Before each validation, DDP broadcasts the buffers of the first rank with data, and Horovod those of rank 0.
        assert result["num_seen"] == NUM_EPOCHS * BATCH_SIZE * (counted[0] if engine == "horovod" else max(counted))
        assert result["logged"]["num_samples"] == len(whole)
        assert result["logged"]["largest"] == pytest.approx(whole.max().item())
        assert result["logged"]["feature_epoch"] == pytest.approx(whole[:, 0].mean().item(), abs=1e-5)
        assert len(result["steps"]) == NUM_EPOCHS * max(counted)
        for index, (mean, total, least) in enumerate(result["steps"][: max(counted)]):
            present = [batches[index][:, 0].mean().item() for batches in firsts if index < len(batches)]
            assert mean == pytest.approx(sum(present) / len(present), abs=1e-5)
            assert total == len(present)
            assert least == pytest.approx(min(present), abs=1e-5)


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_shadow_steps_do_not_count_for_batch_normalization(engine, ranks, kind):
    results = [rank["batch norm", kind]["weights"] for rank in ranks]
    tracked = [weights["1.num_batches_tracked"].item() / NUM_EPOCHS for weights in results]
    assert tracked == ([3, 3] if engine == "horovod" else [5, 5])
    assert torch.equal(results[0]["1.running_mean"], results[1]["1.running_mean"])


@pytest.mark.processes
def test_an_epoch_in_which_ranks_are_even_again(engine, ranks):
    for result in ranks:
        assert result["later even"]["num_seen"] == (5 + 4) * BATCH_SIZE
        assert_equal(result["later even"]["weights"], reference("join", (5, 3), "counted", later=(4, 4)))


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_manual_optimization_joins(ranks, kind):
    for rank in ranks:
        assert_equal(rank["manual", kind]["weights"], reference("join", (5, 3), kind, num_steps=2))


@pytest.mark.processes
@pytest.mark.parametrize("length", [4, 5])
def test_gradients_that_have_been_exchanged_count_once(ranks, length):
    """Rank 0 has its last batch as the first or second of the last three batches."""
    model = AddsUp()
    (optimizer,), _ = model.configure_optimizers()

    def gradients(rank: int, index: int) -> list[Tensor]:
        has_data = index < (length, 6)[rank]
        features, labels = batch_of(rank, index)
        loss = functional.cross_entropy(model.net(features), labels) * float(has_data)
        return list(torch.autograd.grad(loss, list(model.net.parameters())))

    for first in (0, 3):
        parts = [gradients(rank, index) for rank in (0, 1) for index in range(first, first + 3)]
        for number, parameter in enumerate(model.net.parameters()):
            a0, a1, a2, b0, b1, b2 = (part[number] for part in parts)
            parameter.grad = (a0 + a1 + b0 + b1) / 2 + (a2 + b2) / (2 if length > first + 2 else 1)
        optimizer.step()
    for rank in ranks:
        for name, value in model.net.state_dict().items():
            torch.testing.assert_close(rank["adds up", length]["weights"][name], value)


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_validation_and_checkpoints_continue_after_a_rank_has_joined(ranks, kind):
    for rank in ranks:
        assert rank["checkpoints", kind]["num_validated"] == [2, 2, 2, 2]
        assert rank["checkpoints", kind]["global_step"] == 6
    assert all(rank["half epochs"]["num_validated"] == [2, 2, 2] for rank in ranks)


def fail(engine: str, lengths: tuple[int, ...], kind: str, accumulate: int) -> None:
    train(strategy_of(engine, "error"), lengths, kind, Model, {"accumulate_grad_batches": accumulate})


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "lengths", "accumulate", "expected_texts"),
    [
        ("counted", (5, 3), 1, ["rank 0: 5", "rank 1: 3"]),
        ("streamed", (5, 3), 2, ["rank 1 after 3"]),
        ("streamed", (2, 3), 1, ["rank 0 after 2"]),
    ],
)
def test_by_default_all_ranks_get_an_error_that_names_the_rank_without_batches(
    engine, kind, lengths, accumulate, expected_texts
):
    start = time.monotonic()
    texts = texts_of_errors(engine, fail, lengths, kind, accumulate)
    assert time.monotonic() - start < 120  # Lightning's strategy waits for half an hour
    assert any(all(part in text for part in (*expected_texts, "uneven_inputs='stop'")) for text in texts), texts


def train_one_short(engine: str, kind: str) -> None:
    train(strategy_of(engine, "join"), (5, 3), kind, Model, {"max_epochs": 1})


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "expected_texts"), [("counted", "rank 0: 5, rank 1: 3"), ("streamed", "rank 1 ran out 2 batches")]
)
def test_the_log_names_the_rank_with_fewer_batches_and_the_difference(kind, expected_texts):
    output = "".join(outcome.output for outcome in outcomes_of_ranks(train_one_short, "shm", kind))
    assert output.count(expected_texts) == 1, output


def train_three(engine: str) -> Any:
    return [train(strategy_of(engine, "join"), (4, 1, 2), kind, Model)["weights"] for kind in KINDS]


@pytest.mark.processes
@pytest.mark.parametrize("engine", [*ENGINES, "gloo"])
def test_three_ranks_that_run_out_one_after_the_other(engine):
    for rank in run(engine, train_three, num_ranks=3):
        for kind, weights in zip(KINDS, rank, strict=True):
            assert_equal(weights, reference("join", (4, 1, 2), kind))


class Draws(Model):
    """A model whose step fetches the batches."""

    def training_step(self, dataloader_iter: Any) -> Tensor:
        (features, labels), _, _ = next(dataloader_iter)
        return functional.cross_entropy(self.net(features), labels)

    def on_train_epoch_end(self) -> None:
        pass


def train_drawing(engine: str) -> list[Any]:
    steps = [train(strategy_of(engine, "error"), (3, 3), kind, Draws)["global_step"] for kind in KINDS]
    refused = []
    for mode, kind in (("stop", "counted"), ("join", "streamed")):
        try:
            train(strategy_of(engine, mode), (3, 2), kind, Draws)
        except UnevenInputsError as error:
            refused.append(str(error))
    return [steps, refused]


@pytest.mark.processes
def test_dataloader_iter_steps_train_and_refuse_uneven_inputs():
    for steps, refused in run("horovod", train_drawing):
        assert steps == [3 * NUM_EPOCHS] * 2
        assert [name in text for name, text in zip(("'stop'", "'join'"), refused, strict=True)] == [True, True]
        assert all("dataloader_iter" in text for text in refused)


def train_without_data(engine: str) -> None:
    train(strategy_of(engine, "join"), (2, 0), "streamed", Model)


@pytest.mark.processes
def test_a_rank_without_any_batch_is_an_error(engine):
    assert any("no training batch at all" in text for text in texts_of_errors(engine, train_without_data))


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (HorovodStrategy, {"uneven_inputs": "wait"}, "uneven_inputs='wait'"),
        (HorovodStrategy, {"uneven_inputs": "join", "op": "adasum"}, "op='adasum'"),
        (HorovodStrategy, {"uneven_inputs": "join", "process_set": object()}, "process_set"),
        (DDPStrategy, {"uneven_inputs": "wait"}, "uneven_inputs='wait'"),
        (DDPSpawnStrategy, {"uneven_inputs": None}, "uneven_inputs=None"),
        (DDPStrategy, {"uneven_inputs": "join", **POST_LOCAL_SGD}, "model_averaging_period=2"),
        (DDPStrategy, {"uneven_inputs": "join", "process_group": object()}, "process_group"),
    ],
)
def test_invalid_arguments_are_refused_at_construction(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def run(engine: str, function: Callable[..., Any], *args: Any, num_ranks: int = 2) -> list[Any]:
    """Calls a function with the engine's name and the arguments on all ranks."""
    if engine == "horovod":
        return run_horovod("horovodrun", function, engine, *args, num_ranks=num_ranks)
    return run_ranks(function, engine, *args, world_size=num_ranks)


def texts_of_errors(engine: str, function: Callable[..., Any], *args: Any) -> list[str]:
    """Returns the texts of the ranks' errors about uneven inputs."""
    if engine == "horovod":
        _, outcomes = try_horovod("horovodrun", function, engine, *args)
        return [outcome.text for outcome in outcomes.values() if outcome.name == "UnevenInputsError"]
    errors = [outcome.error or "" for outcome in outcomes_of_ranks(function, engine, *args)]
    assert all(errors), errors
    return [error for error in errors if "UnevenInputsError: " in error]


def assert_equal(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-6)
