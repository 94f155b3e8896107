"""The promises of ``HorovodStrategy(uneven_inputs=...)``, on real ranks that have different numbers of batches.

The reference is a loop in one process that averages the gradients of the ranks that have data, batch by batch.
"""

import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MeanMetric, SumMetric

from lightning_strategies_ext import HorovodStrategy, UnevenInputsError
from tests.support.horovod_ranks import run_horovod, try_horovod

BATCH_SIZE = 4
NUM_EPOCHS = 2
#: Batches of rank 0 and of rank 1.
LENGTHS = {"second is short": (5, 3), "first is short": (3, 7), "even": (4, 4)}
KINDS = ["counted", "streamed"]


def sample(rank: int, index: int) -> tuple[Tensor, int]:
    generator = torch.Generator().manual_seed(1000 * rank + index)
    features = torch.randn(6, generator=generator)
    return features, int(features[:3].argmax())


class Counted(Dataset):
    def __init__(self, rank: int, num_batches: int) -> None:
        self.rank = rank
        self.num_samples = num_batches * BATCH_SIZE

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return sample(self.rank, index)


class Streamed(IterableDataset):
    def __init__(self, rank: int, num_batches: int) -> None:
        self.samples = Counted(rank, num_batches)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return (self.samples[index] for index in range(len(self.samples)))


def loader(rank: int, num_batches: int, kind: str) -> DataLoader:
    data = Counted(rank, num_batches) if kind == "counted" else Streamed(rank, num_batches)
    return DataLoader(data, batch_size=BATCH_SIZE)


class Model(pl.LightningModule):
    """Logs, counts and synchronises in every way that a shadowing rank could spoil."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.mean_feature, self.num_samples = MeanMetric(), SumMetric()
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.int64))
        self.steps: list[tuple[float, float, float]] = []
        self.num_validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels = batch
        first = features[:, 0].mean()
        self.num_seen += len(features)
        self.mean_feature(features[:, 0])
        self.num_samples(len(features))
        self.log("num_samples", self.num_samples, on_epoch=True, on_step=False)
        self.log("feature", first, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(features))
        self.log("largest", features.max(), on_epoch=True, on_step=False, reduce_fx="max", sync_dist=True)
        self.steps.append(
            (
                self.trainer.strategy.reduce(first.clone()).item(),
                self.trainer.strategy.reduce(torch.tensor(1), reduce_op="sum").item(),
                self.trainer.strategy.reduce(first.clone(), reduce_op="min").item(),
            )
        )
        return functional.cross_entropy(self.net(features), labels)

    def on_train_epoch_end(self) -> None:
        self.log("mean_feature", self.mean_feature)

    def on_validation_start(self) -> None:
        self.num_validated.append(0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.num_validated[-1] += 1
        self.log("val_loss", functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Manual(Model):
    """Two losses per batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        outputs = self.net(batch[0])
        self.manual_backward(functional.cross_entropy(outputs, batch[1]), retain_graph=True)
        optimizer.step()

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step()


class Normalized(Model):
    """Its backward pass wants the buffers of the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


class LaterEven(Model):
    """Has as many batches on all ranks in its second epoch."""

    def train_dataloader(self) -> Any:
        return loader(self.global_rank, 4 if self.current_epoch else (5, 3)[self.global_rank], "counted")


def train(way: str, lengths: tuple[int, ...] | None, kind: str, make_model: Callable[[], Model], options: dict) -> Any:
    import horovod.torch as hvd

    strategy = HorovodStrategy(uneven_inputs=way)
    rank = int(hvd.rank()) if hvd.is_initialized() else strategy.cluster_environment.global_rank()
    trainer = pl.Trainer(
        **{
            "strategy": strategy,
            "accelerator": "cpu",
            "max_epochs": NUM_EPOCHS,
            "use_distributed_sampler": False,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }
    )
    model = make_model()
    validation = DataLoader(Counted(9, 2), batch_size=BATCH_SIZE)
    trainer.fit(model, None if lengths is None else loader(rank, lengths[rank], kind), validation)
    return {
        "weights": {name: value.clone() for name, value in model.net.state_dict().items()},
        "num_seen": model.num_seen.item(),
        "global_step": trainer.global_step,
        "steps": model.steps,
        "num_validated": model.num_validated,
        "logged": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
    }


CASES = {
    (way, name, kind, accumulate): {"accumulate_grad_batches": accumulate}
    for way in ("stop", "join")
    for name in LENGTHS
    for kind in KINDS
    for accumulate in (1, 2)
}
CASES |= {
    ("error", "even", kind, accumulate): {"accumulate_grad_batches": accumulate}
    for kind in KINDS
    for accumulate in (1, 3)
}


def train_all(directory: str) -> dict[Any, Any]:
    results: dict[Any, Any] = {
        case: train(case[0], LENGTHS[case[1]], case[2], Model, options) for case, options in CASES.items()
    }
    for kind in KINDS:
        results["manual", kind] = train("join", (5, 3), kind, Manual, {})
        saving = ModelCheckpoint(directory, f"{kind}-{{step}}", every_n_train_steps=2, save_top_k=-1)
        options = {"enable_checkpointing": True, "callbacks": [saving], "val_check_interval": 2, "max_epochs": 1}
        results["checkpoints", kind] = train("join", (6, 3), kind, Model, options)
    results["batch norm"] = train("join", (5, 3), "counted", Normalized, {})
    results["later even"] = train("join", None, "counted", LaterEven, {"reload_dataloaders_every_n_epochs": 1})
    results["half epochs"] = train("join", (6, 3), "counted", Model, {"val_check_interval": 0.5, "max_epochs": 1})
    return results


@pytest.fixture(scope="module", params=["horovodrun", "mpirun"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run_horovod(request.param, train_all, str(tmp_path_factory.mktemp("checkpoints")), timeout_s=200)


def reference(
    way: str, lengths: tuple[int, ...], kind: str, accumulate: int = 1, later: tuple[int, ...] | None = None
) -> dict[str, Tensor]:
    """Weights of one process that goes through the batches of all ranks, of which there may be others later."""
    model = Model()
    (optimizer,), (scheduler,) = model.configure_optimizers()
    for epoch in range(NUM_EPOCHS):
        lengths = lengths if epoch == 0 or later is None else later
        num_batches = min(lengths) if way == "stop" else max(lengths)
        if kind == "streamed":  # the end of an epoch is known at optimizer steps
            num_batches = -(-num_batches // accumulate) * accumulate
        for start in range(0, num_batches, accumulate):
            gradients: list[list[Tensor]] = []
            for rank, length in enumerate(lengths):
                replica = deepcopy(model.net)
                replica.zero_grad()
                indices = range(start, min(start + accumulate, num_batches, length))
                for index in indices:
                    batch = [sample(rank, index * BATCH_SIZE + place) for place in range(BATCH_SIZE)]
                    features, labels = torch.stack([f for f, _ in batch]), torch.tensor([label for _, label in batch])
                    (functional.cross_entropy(replica(features), labels) / accumulate).backward()
                if indices:
                    gradients.append([parameter.grad for parameter in replica.parameters()])
            for parameter, *parts in zip(model.net.parameters(), *gradients, strict=True):
                parameter.grad = torch.stack(parts).mean(0)
            optimizer.step()
        scheduler.step()
    return model.net.state_dict()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_are_those_of_the_ranks_that_had_data(ranks, case):
    way, name, kind, accumulate = case
    for result in (rank[case] for rank in ranks):
        for key, value in reference(way, LENGTHS[name], kind, accumulate).items():
            torch.testing.assert_close(result["weights"][key], value, rtol=1e-5, atol=1e-6)
        num_batches = min(LENGTHS[name]) if way == "stop" else max(LENGTHS[name])
        assert result["global_step"] == NUM_EPOCHS * -(-num_batches // accumulate)
        assert result["lr"] == pytest.approx(0.1 * 0.5**NUM_EPOCHS)
        assert result["num_validated"] == [2] * (NUM_EPOCHS + 1)  # with the sanity check
    assert all(torch.equal(ranks[0][case]["weights"][key], value) for key, value in ranks[1][case]["weights"].items())


@pytest.mark.parametrize("case", [case for case in CASES if case[3] == 1], ids=str)
def test_what_is_logged_and_counted_is_of_each_batch_once(ranks, case):
    way, name, _, _ = case
    counted = [min(LENGTHS[name]) if way == "stop" else length for length in LENGTHS[name]]
    firsts = [
        [
            torch.stack([sample(rank, index * BATCH_SIZE + place)[0] for place in range(BATCH_SIZE)])
            for index in range(count)
        ]
        for rank, count in enumerate(counted)
    ]
    whole = torch.cat([batch for batches in firsts for batch in batches])
    for rank, result in enumerate(rank[case] for rank in ranks):
        assert result["num_seen"] == NUM_EPOCHS * counted[rank] * BATCH_SIZE
        assert result["logged"]["num_samples"] == len(whole)
        assert result["logged"]["largest"] == pytest.approx(whole.max().item())
        assert result["logged"]["feature_epoch"] == pytest.approx(whole[:, 0].mean().item(), abs=1e-5)
        assert len(result["steps"]) == NUM_EPOCHS * max(counted)
        for index, (mean, total, least) in enumerate(result["steps"][: max(counted)]):
            present = [batches[index][:, 0].mean().item() for batches in firsts if index < len(batches)]
            assert mean == pytest.approx(sum(present) / len(present), abs=1e-5)
            assert total == len(present)
            assert least == pytest.approx(min(present), abs=1e-5)


def test_shadow_steps_do_not_count_for_batch_normalisation(ranks):
    for rank, result in enumerate(ranks):
        assert result["batch norm"]["weights"]["1.num_batches_tracked"] == (5, 3)[rank] * NUM_EPOCHS


def test_an_epoch_in_which_ranks_are_even_again(ranks):
    for rank, result in enumerate(ranks):
        assert result["later even"]["num_seen"] == ((5, 3)[rank] + 4) * BATCH_SIZE
        for key, value in reference("join", (5, 3), "counted", later=(4, 4)).items():
            torch.testing.assert_close(result["later even"]["weights"][key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_manual_optimization_joins(ranks, kind):
    for rank in ranks:
        for key, value in reference("join", (5, 3), kind).items():
            torch.testing.assert_close(rank["manual", kind]["weights"][key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_validation_and_checkpoints_go_on_after_a_rank_has_joined(ranks, kind):
    for rank in ranks:
        assert rank["checkpoints", kind]["num_validated"] == [2, 2, 2, 2]
        assert rank["checkpoints", kind]["global_step"] == 6
    assert all(rank["half epochs"]["num_validated"] == [2, 2, 2] for rank in ranks)


def fail(lengths: tuple[int, ...], kind: str, accumulate: int) -> None:
    train("error", lengths, kind, Model, {"accumulate_grad_batches": accumulate})


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("kind", "lengths", "said"),
    [
        ("counted", (5, 3), ["rank 0: 5", "rank 1: 3"]),
        ("streamed", (5, 3), ["rank 1 after 3"]),
        ("streamed", (2, 3), ["rank 0 after 2"]),
    ],
)
def test_by_default_all_ranks_end_with_an_error_that_names_who_ran_out(kind, lengths, said, accumulate):
    start = time.monotonic()
    _, outcomes = try_horovod("horovodrun", fail, lengths, kind, accumulate, timeout_s=60)
    assert time.monotonic() - start < 120  # stock waits for half an hour
    texts = [outcome.text for outcome in outcomes.values() if outcome.name == "UnevenInputsError"]
    assert texts, outcomes
    for text in texts:
        assert all(words in text for words in said), text
        assert "uneven_inputs='stop'" in text


def train_one_short(kind: str) -> None:
    train("join", (5, 3), kind, Model, {"max_epochs": 1})


@pytest.mark.parametrize(
    ("kind", "said"), [("counted", "rank 0: 5, rank 1: 3"), ("streamed", "rank 1 ran out 2 batches")]
)
def test_the_log_says_who_ran_short_and_by_how_much(kind, said):
    output, _ = try_horovod("horovodrun", train_one_short, kind)
    assert output.count(said) == 1, output


def train_three() -> Any:
    return [train("join", (4, 1, 2), kind, Model, {})["weights"] for kind in KINDS]


def test_three_ranks_that_run_out_one_after_the_other():
    for rank in run_horovod("horovodrun", train_three, num_ranks=3):
        for kind, weights in zip(KINDS, rank, strict=True):
            for key, value in reference("join", (4, 1, 2), kind).items():
                torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-6)


class Draws(Model):
    """Takes its batches itself."""

    def training_step(self, dataloader_iter: Any) -> Tensor:
        (features, labels), _, _ = next(dataloader_iter)
        return functional.cross_entropy(self.net(features), labels)

    def on_train_epoch_end(self) -> None:
        pass


def train_drawing() -> list[Any]:
    steps = [train("error", (3, 3), kind, Draws, {})["global_step"] for kind in KINDS]
    refused = []
    for way, kind in (("stop", "counted"), ("join", "streamed")):
        try:
            train(way, (3, 2), kind, Draws, {})
        except UnevenInputsError as error:
            refused.append(str(error))
    return [steps, refused]


def test_steps_that_draw_their_batches_themselves_train_and_cannot_be_evened_out():
    for steps, refused in run_horovod("horovodrun", train_drawing):
        assert steps == [3 * NUM_EPOCHS] * 2
        assert [name in text for name, text in zip(("'stop'", "'join'"), refused, strict=True)] == [True, True]
        assert all("dataloader_iter" in text for text in refused)


def train_without_data() -> None:
    train("join", (2, 0), "streamed", Model, {})


def test_a_rank_without_any_batch_is_an_error():
    output, outcomes = try_horovod("horovodrun", train_without_data, timeout_s=60)
    assert "no training batch at all" in output + "".join(outcome.text for outcome in outcomes.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"uneven_inputs": "wait"}, "uneven_inputs='wait'"),
        ({"uneven_inputs": "join", "op": "adasum"}, "op='adasum'"),
        ({"uneven_inputs": "join", "process_set": object()}, "process_set"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(arguments, message):
    with pytest.raises(ValueError, match=message):
        HorovodStrategy(**arguments)
