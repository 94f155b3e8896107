"""``fabric.strategy.exact_evaluation()``: every sample counts once in an evaluation under Fabric."""

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, SubsetRandomSampler, TensorDataset
from torchmetrics import Accuracy

from lightning_strategies_ext import fabric as ext
from tests.support.horovod_ranks import run_horovod
from tests.support.models import NUM_CLASSES, NUM_FEATURES, dataset
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes

NUMBERS = (99, 5, 1)


def data_of(number: int) -> TensorDataset:
    return TensorDataset(*dataset(number).tensors, torch.arange(number))


def train_and_evaluate(strategy: str, world_size: int) -> list[dict[str, Any]]:
    """Trains for two epochs, with evaluations between the epochs; returns the results of this rank."""
    backend = {"process_group_backend": strategy} if strategy in ("shm", "gloo") else {}
    made: Any = "auto"
    if world_size > 1:
        made = ext.HorovodStrategy() if strategy == "horovod" else ext.DDPStrategy(**backend)
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=made)
    fabric.launch()
    fabric.seed_everything(1, verbose=False)
    net = nn.Sequential(nn.Linear(NUM_FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, NUM_CLASSES))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    trained = fabric.setup_dataloaders(DataLoader(data_of(24), batch_size=4))
    return [
        evaluate(fabric, model, number, batch_size)
        for batch_size in (7, 2)
        for number in NUMBERS
        if not train(fabric, model, optimizer, trained)
    ]


def train(fabric: Fabric, model: Any, optimizer: Any, loader: Any) -> None:
    model.train()
    for features, labels, _ in loader:
        optimizer.zero_grad()
        fabric.backward(functional.cross_entropy(model(features), labels))
        optimizer.step()


def evaluate(fabric: Fabric, model: Any, number: int, batch_size: int) -> dict[str, Any]:
    loader = DataLoader(data_of(number), batch_size=batch_size)
    if fabric.world_size > 1:
        with fabric.strategy.exact_evaluation():
            loader = fabric.setup_dataloaders(loader)
    accuracy = Accuracy("multiclass", num_classes=NUM_CLASSES)
    seen: list[int] = []
    sums = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for features, labels, indices in loader:
            output = model(features)
            accuracy.update(output, labels)
            sums += torch.stack([functional.cross_entropy(output, labels, reduction="sum"), torch.tensor(len(labels))])
            seen += indices.tolist()
    return {
        "sums": fabric.all_reduce(sums, reduce_op="sum").tolist(),
        "accuracy": accuracy.compute().item(),
        "seen": seen,
        "weights": torch.cat([each.flatten().double() for each in model.state_dict().values()]),
        "length": len(loader),
    }


def check_each_counts_once(results: list[list[dict[str, Any]]]) -> None:
    for first, *others in zip(*results, strict=True):
        ranks = [first, *others]
        count = int(first["sums"][1])
        assert sorted(index for rank in ranks for index in rank["seen"]) == list(range(count))
        for rank in others:
            assert (rank["sums"], rank["accuracy"]) == (first["sums"], first["accuracy"])
            assert torch.equal(rank["weights"], first["weights"])


@pytest.mark.parametrize(("strategy", "world_size"), [("shm", 2), ("gloo", 3)])
def test_each_sample_counts_once_with_a_batch_norm(strategy: str, world_size: int) -> None:
    results = run_ranks(train_and_evaluate, strategy, world_size, world_size=world_size)
    check_each_counts_once(results)
    assert [result["sums"][1] for result in results[0]] == [*NUMBERS, *NUMBERS]
    assert min(result["length"] for rank in results for result in rank) == 0  # a rank without samples


def test_each_sample_counts_once_over_horovod() -> None:
    pytest.importorskip("horovod")
    results = run_horovod("horovodrun", train_and_evaluate, "horovod", 2)
    check_each_counts_once(results)
    assert [result["sums"][1] for result in results[0]] == [*NUMBERS, *NUMBERS]


def values_of_one_model(world_size: int) -> list[list[float]]:
    """Returns sums, counts, and accuracies of an untrained model."""
    made: Any = ext.DDPStrategy() if world_size > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=made)
    fabric.launch()
    fabric.seed_everything(1, verbose=False)
    net = nn.Sequential(nn.Linear(NUM_FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, NUM_CLASSES))
    model = fabric.setup(net)
    found = [evaluate(fabric, model, number, 7) for number in NUMBERS]
    return [[*each["sums"], each["accuracy"]] for each in found]


def test_values_are_those_of_one_device() -> None:
    expected = values_of_one_model(1)
    for rank in run_ranks(values_of_one_model, 2):
        for values, right in zip(rank, expected, strict=True):
            assert values == pytest.approx(right, rel=1e-5)


def numbers_of_samples(world_size: int) -> list[int]:
    """Returns the numbers of samples of this rank in several DataLoaders with five samples."""
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=ext.DDPStrategy())
    fabric.launch()
    data = data_of(5)
    own = DistributedSampler(data, world_size, fabric.global_rank, drop_last=True)
    with fabric.strategy.exact_evaluation():
        inside = fabric.setup_dataloaders(
            DataLoader(data, shuffle=True),
            DataLoader(data, sampler=SubsetRandomSampler(range(5))),
            DataLoader(data, sampler=own),
            DataLoader(data, batch_size=2, num_workers=1),
        )
    loaders = [*inside, fabric.setup_dataloaders(DataLoader(data))]
    return [sum(len(batch[0]) for batch in loader) for loader in loaders]


def test_samplers_inside_and_outside_of_the_block() -> None:
    assert run_ranks(numbers_of_samples, 2) == [[3, 3, 2, 3, 3], [2, 2, 2, 2, 3]]
