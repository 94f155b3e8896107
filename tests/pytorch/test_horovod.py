"""``horovod_ext`` on ranks that ``horovodrun`` or ``mpirun`` has started.

The start of ranks takes seconds, so each launcher runs once for all tests (``train_with_everything``), and the tests
check the returned values. The reference is ``ddp_ext`` on the same number of ranks.
"""

import threading
from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, Sampler
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from lightning_strategies_ext import HorovodStrategy
from tests.support.horovod_ranks import run_horovod
from tests.support.models import (
    MLP,
    NUM_CLASSES,
    ManualMLP,
    TwoOptimizers,
    WithUnusedParameters,
    assert_close,
    dataset,
    fit,
    loader,
    make_trainer,
    state_of,
    weights_after,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes

LAUNCHERS = ("horovodrun", "mpirun")


# --- functions of ranks, which also run with ddp_ext ---


class Accumulates(ManualMLP):
    """Manual optimization with two backward passes per step, of which the first exchanges no gradients."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        with optimizer.toggle_model(sync_grad=batch_idx % 2 == 1):
            self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()


class Freezes(MLP):
    """A model whose first layer is frozen in the first epoch."""

    def on_train_epoch_start(self):
        self.net[0].requires_grad_(self.current_epoch > 0)


class Sparse(MLP):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 8, sparse=True)

    def loss(self, batch):
        return functional.cross_entropy(self.net(batch[0] + self.table(batch[1])), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WithMetrics(MLP):
    def __init__(self):
        super().__init__()
        self.accuracy, self.auroc = MulticlassAccuracy(NUM_CLASSES), MulticlassAUROC(NUM_CLASSES)
        self.ranks = [MeanMetric(), {"deeper": MeanMetric()}]

    def on_validation_start(self):
        self.ranks.append(MeanMetric())  # during the stage

    def validation_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        self.accuracy(logits, batch[1])
        self.auroc.update(logits, batch[1])
        self.log("accuracy", self.accuracy)
        self.log("loss", functional.cross_entropy(logits, batch[1]), sync_dist=True)
        for metric in (self.ranks[0], self.ranks[1]["deeper"], self.ranks[2]):
            metric.update(self.global_rank)

    def on_validation_epoch_end(self):
        for name, metric in {"list": self.ranks[0], "dict": self.ranks[1]["deeper"], "late": self.ranks[2]}.items():
            self.log(name, metric.compute())
        self.log("auroc", self.auroc.compute())
        self.auroc.reset()


class OwnsMetric(pl.Callback):
    def __init__(self):
        self.metric = MeanMetric()

    def on_validation_batch_end(self, trainer, pl_module, *args):
        self.metric.update(trainer.global_rank)

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("callback", self.metric.compute())


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (MLP, {}),
    "several optimizers": (TwoOptimizers, {}),
    "manual accumulation": (Accumulates, {}),
    "accumulation with a shortened last window": (MLP, {"accumulate_grad_batches": 3}),
    "clipping": (MLP, {"gradient_clip_val": 0.05}),
}


def scheduled() -> dict[str, Any]:
    return {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 4})], "max_epochs": 3}


def mixed(precision: str) -> dict[str, Any]:
    return {"plugins": [MixedPrecision(precision, "cpu")]}  # type: ignore[arg-type]


def train_all(strategy: str) -> dict[str, Any]:
    weights = {name: weights_after(strategy, model, **kwargs) for name, (model, kwargs) in CASES.items()}
    weights["scheduled accumulation"] = weights_after(strategy, **scheduled())
    weights["bf16-mixed"] = weights_after(strategy, **mixed("bf16-mixed"))
    weights["16-mixed"] = weights_after(strategy, **mixed("16-mixed"))
    pl.seed_everything(11, verbose=False)
    model = WithMetrics()
    trainer = make_trainer(strategy, callbacks=[OwnsMetric()])
    metrics = trainer.validate(model, loader(26, batch_size=4), verbose=False)[0]
    assert model.accuracy.dist_sync_fn is None  # not changed
    return {"weights": weights, "metrics": metrics}


@cache
def reference() -> dict[str, Any]:
    return run_ranks(train_all, "ddp_ext_find_unused_parameters_true")[0]


def train_with_everything() -> dict[str, Any]:
    """Runs in each rank of each launcher."""
    results = train_all("horovod_ext")
    results["collectives"] = collectives()
    results["frozen at first"] = weights_after("horovod_ext", Freezes)
    results["unused parameters"] = weights_after("horovod_ext", WithUnusedParameters)
    arguments = {
        "each by itself": {"num_groups": 0},
        "one group": {"num_groups": 1},
        "three groups": {"num_groups": 3},
        "predivided": {"gradient_predivide_factor": 2.0},
        "fp16": {"compression": "fp16"},
        "sum": {"op": "sum"},
    }
    results["options"] = {name: weights_after(HorovodStrategy(**kwargs)) for name, kwargs in arguments.items()}
    results["sparse"] = [weights_after(HorovodStrategy(sparse_as_dense=dense), Sparse) for dense in (False, True)]
    results["scaled"] = [
        fit(HorovodStrategy(scale_learning_rate=scale), max_epochs=1)[0].optimizers[0].param_groups[0]["lr"]
        for scale in (False, True)
    ]
    results["fit twice"] = fit_twice()
    return results


def collectives() -> dict[str, Any]:
    import horovod.torch as hvd

    strategy = make_trainer("horovod_ext").strategy
    strategy.setup_environment()
    rank, found = strategy.rank, {}
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        for op in ("mean", "sum", "min", "max", "product"):
            value = strategy.reduce(torch.tensor([rank, rank + 1]).to(dtype), reduce_op=op)
            found[f"{op} of {dtype}"] = (value.tolist(), value.dtype)
    found["complex"] = strategy.reduce(torch.tensor([1j * rank]), reduce_op="sum").tolist()
    found["text"] = strategy.reduce("text")
    found["gathered"] = strategy.all_gather(result=torch.tensor([rank, rank])).tolist()
    found["gathered scalars"] = strategy.all_gather(torch.tensor(float(rank))).tolist()
    found["gathered bools"] = strategy.all_gather(torch.tensor([rank == 0])).tolist()
    found["uneven"] = strategy.all_gather(torch.full((rank + 1, 2), rank)).tolist()
    found["one is empty"] = strategy.all_gather(torch.full((rank, 2), rank)).tolist()
    for shape in ((2,), (rank + 1,)):
        tensor = torch.ones(shape, requires_grad=True)
        (strategy.all_gather(tensor, sync_grads=True) * (rank + 1)).sum().backward()
        found[f"gradients of {len(shape)}, uneven {shape != (2,)}"] = tensor.grad.tolist()
    found["sent"] = strategy.broadcast({"from": rank}, src=1)
    found["large"] = len(strategy.broadcast("x" * 10_000 * (rank + 1), src=1))
    found["all"], found["any"] = (strategy.reduce_boolean_decision(rank == 0, all=all_) for all_ in (True, False))
    strategy.barrier("name")
    with pytest.raises(ValueError, match="`reduce_op='middle'` is unknown"):
        strategy.reduce(torch.ones(1), reduce_op="middle")
    with pytest.raises(RuntimeError, match=r"cannot be pickled|cannot pickle"):
        strategy.broadcast(threading.Lock(), src=0)
    with pytest.raises(TypeError, match="`group` must be a horovod"):
        strategy.reduce(torch.ones(1), group="all")
    alone = hvd.add_process_set([1])
    found["in a set"] = strategy.reduce(torch.tensor([float(rank)]), group=alone, reduce_op="sum").item()
    hvd.remove_process_set(alone)
    found["sampler"] = strategy.distributed_sampler_kwargs
    found["ranks"] = (rank, strategy.global_rank, strategy.world_size, strategy.is_global_zero)
    return found


def fit_twice() -> list[Any]:
    trainer, model = fit("horovod_ext")
    trainer.fit_loop.max_epochs = 4
    trainer.fit(model, loader())
    return [trainer.global_step, state_of(model)]


class OfBothRanks(Sampler[int]):
    """A sampler with the samples of two ranks: four samples of each rank in turn."""

    def __init__(self):
        self.samplers = [DistributedSampler(dataset(), 2, rank, shuffle=True, seed=11) for rank in range(2)]

    def set_epoch(self, epoch: int) -> None:
        for sampler in self.samplers:
            sampler.set_epoch(epoch)

    def __iter__(self):
        first, second = map(list, self.samplers)
        for start in range(0, len(first), 4):
            yield from first[start : start + 4] + second[start : start + 4]

    def __len__(self):
        return 64


def weights_of_one_process(make_model: Any) -> dict[str, torch.Tensor]:
    pl.seed_everything(11, verbose=False)
    model = make_model()
    whole_batches = DataLoader(dataset(), batch_size=8, sampler=OfBothRanks())
    make_trainer("auto", devices=1).fit(model, whole_batches)
    return state_of(model)


@pytest.fixture(scope="module", params=LAUNCHERS)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_horovod(request.param, train_with_everything)


CASE_NAMES = [*CASES, "scheduled accumulation", "bf16-mixed", "16-mixed"]


@pytest.mark.parametrize("name", CASE_NAMES)
def test_weights_agree_with_those_of_ddp(ranks, name):
    tolerance = 2e-2 if "mixed" in name else 1e-5
    for rank in ranks:
        assert_close(rank["weights"][name], reference()["weights"][name], tolerance)


def test_weights_are_those_of_one_process_with_the_whole_batch(ranks):
    assert_close(ranks[0]["weights"]["plain"], weights_of_one_process(MLP))


def test_parameters_that_are_frozen_at_first_are_exchanged_later(ranks):
    assert_close(ranks[0]["frozen at first"], weights_of_one_process(Freezes))


def test_a_metric_has_the_value_of_all_ranks_data(ranks):
    for rank in ranks:
        assert rank["metrics"] == pytest.approx(reference()["metrics"])
        assert [rank["metrics"][name] for name in ("list", "dict", "late", "callback")] == [0.5] * 4
    alone = make_trainer("auto", devices=1)
    pl.seed_everything(11, verbose=False)
    expected = alone.validate(WithMetrics(), loader(26, batch_size=4), verbose=False)[0]
    assert ranks[0]["metrics"]["accuracy"] == pytest.approx(expected["accuracy"])
    assert ranks[0]["metrics"]["auroc"] == pytest.approx(expected["auroc"])


@pytest.mark.parametrize("op", ["mean", "sum", "min", "max", "product"])
def test_a_reduction_is_right_for_every_dtype(ranks, op):
    numbers = {"mean": [0.5, 1.5], "sum": [1, 3], "min": [0, 1], "max": [1, 2], "product": [0, 2]}[op]
    bools = {"mean": [0.5, 1.0], "sum": [1, 2], "min": [0, 1], "max": [1, 1], "product": [0, 1]}[op]
    for rank in ranks:
        for name, (value, dtype) in reductions(rank, op):
            assert value == (bools if "bool" in name else numbers), name
            if op == "mean":
                assert dtype.is_floating_point, name


def reductions(rank: dict[str, Any], op: str) -> list[Any]:
    return [(name, found) for name, found in rank["collectives"].items() if name.startswith(f"{op} of")]


def test_collectives_over_horovod(ranks):
    for number, rank in enumerate(ranks):
        found = rank["collectives"]
        assert found["complex"] == [1j]
        assert found["text"] == "text"
        assert found["gathered"] == [[0, 0], [1, 1]]
        assert found["gathered scalars"] == [0.0, 1.0]
        assert found["gathered bools"] == [[True], [False]]
        assert found["uneven"] == [[0, 0], [1, 1], [1, 1]]
        assert found["one is empty"] == [[1, 1]]
        assert found["gradients of 1, uneven False"] == [3.0, 3.0]
        assert found["sent"] == {"from": 1}
        assert found["large"] == 20_000
        assert (found["all"], found["any"]) == (False, True)
        assert found["in a set"] == float(number)
        assert found["sampler"] == {"num_replicas": 2, "rank": number}
        assert found["ranks"] == (number, number, 2, number == 0)


def test_parameters_that_only_some_ranks_use_are_updated_alike(ranks):
    assert_close(ranks[0]["unused parameters"], ranks[1]["unused parameters"], 0)


@pytest.mark.parametrize("name", ["each by itself", "one group", "three groups", "predivided", "fp16"])
def test_options_of_the_exchange_give_the_same_weights(ranks, name):
    tolerance = 2e-3 if name == "fp16" else 1e-5
    assert_close(ranks[0]["options"][name], reference()["weights"]["plain"], tolerance)
    assert_close(ranks[0]["options"][name], ranks[1]["options"][name], 0)


class Doubled(MLP):
    def training_step(self, batch, batch_idx):
        return 2 * super().training_step(batch, batch_idx)


def test_a_sum_of_gradients_is_no_average(ranks):
    assert_close(ranks[0]["options"]["sum"], weights_of_one_process(Doubled))


def test_sparse_gradients_are_exchanged_sparse_or_dense(ranks):
    sparse, dense = ranks[0]["sparse"]
    assert_close(sparse, dense)
    assert_close(ranks[0]["sparse"][0], ranks[1]["sparse"][0], 0)
    assert_close(sparse, weights_of_one_process(Sparse))


def test_learning_rates_are_scaled_only_with_the_argument(ranks):
    assert ranks[0]["scaled"] == pytest.approx([0.1, 0.2])


def test_a_second_fit_continues_the_training(ranks):
    steps, weights = ranks[0]["fit twice"]
    assert steps == 32
    assert_close(weights, ranks[1]["fit twice"][1], 0)
