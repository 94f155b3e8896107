"""``Fabric(strategy="dp_ext")``: a loop for a single device runs on replicas."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DataParallelStrategy as FabricsOwn
from torch import nn
from torch.nn import DataParallel, functional
from torchmetrics.classification import MulticlassAccuracy

from lightning_strategies_ext.fabric.dp import DataParallelStrategy
from tests.support.dp_training import MODES, copying_devices, cpu_devices
from tests.support.models import MLP, NUM_CLASSES, assert_close, loader, state_of

FABRIC_MODES = {
    "in turns": {"parallel_devices": cpu_devices(3)},
    "at once": {"parallel_devices": cpu_devices(3), "sequential": False},
    "with copies": {"parallel_devices": copying_devices(3), "sequential": False},
}
each_mode = pytest.mark.parametrize("arguments", FABRIC_MODES.values(), ids=FABRIC_MODES.keys())


def test_the_tests_cover_the_same_modes_as_those_of_the_trainer():
    assert FABRIC_MODES.keys() == MODES.keys()


def train(strategy="auto", devices=1, precision=None, **kwargs):
    fabric = Fabric(strategy=strategy, devices=devices, accelerator="cpu", precision=precision, **kwargs)
    fabric.launch()
    fabric.seed_everything(11, verbose=False)
    module = MLP()
    model, optimizer = fabric.setup(module.net, torch.optim.SGD(module.net.parameters(), lr=0.1))
    batches = fabric.setup_dataloaders(loader(64, batch_size=10))
    for index, (features, labels) in enumerate(batches):
        with fabric.no_backward_sync(model, enabled=index % 2 == 0):
            loss = functional.cross_entropy(model(features), labels)
            fabric.backward(loss)
        if index % 2 == 1:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    return fabric, model, optimizer, state_of(module)


@each_mode
def test_a_loop_trains_as_on_a_single_device(arguments):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*does not support skipping.*")
        assert_close(train(DataParallelStrategy(**arguments))[-1], train()[-1])


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_the_name_takes_fabrics_devices(num_replicas):
    fabric, model, _, state = train("dp_ext", num_replicas)
    assert_close(state, train()[-1])
    assert type(fabric.strategy) is DataParallelStrategy
    assert isinstance(fabric.strategy, FabricsOwn)
    assert isinstance(model._forward_module, DataParallel)
    assert (fabric.world_size, fabric.global_rank) == (1, 0)


def test_mixed_precision_reaches_the_replicas():
    assert_close(train("dp_ext", 2, "bf16-mixed")[-1], train(precision="bf16-mixed")[-1], tolerance=2e-2)


def test_collectives_are_those_of_one_process_and_reduce_over_entries():
    fabric = Fabric(strategy="dp_ext", devices=2, accelerator="cpu")
    strategy = fabric.strategy
    values = torch.tensor([1.0, 2.0, 6.0])
    assert fabric.all_reduce(values).item() == 3
    assert fabric.all_reduce({"a": [values, "text"]}, reduce_op="sum") == {"a": [torch.tensor(9.0), "text"]}
    assert fabric.all_reduce(values, reduce_op="max").item() == 6
    assert fabric.all_reduce(values, reduce_op=torch.distributed.ReduceOp.MIN).item() == 1
    assert fabric.all_reduce(torch.tensor([1, 2])).item() == 1.5
    with pytest.raises(ValueError, match="`reduce_op='middle'` is unknown"):
        fabric.all_reduce(values, reduce_op="middle")
    assert torch.equal(fabric.all_gather(values), values)
    assert fabric.broadcast({"a": 1}, src=0) == {"a": 1}
    fabric.barrier("name")
    assert strategy.reduce_boolean_decision(True, all=False) is True
    assert strategy.reduce_boolean_decision(False) is False
    assert strategy.distributed_sampler_kwargs is None
    assert strategy.root_device == torch.device("cpu")
    batch = [values]
    assert strategy.batch_to_device(batch) is batch
    module = nn.Linear(1, 1)
    strategy.module_to_device(module)
    assert module.weight.device == strategy.root_device


def test_the_sampler_is_left_alone():
    fabric = Fabric(strategy="dp_ext", devices=2, accelerator="cpu")
    assert isinstance(fabric.setup_dataloaders(loader()).sampler, torch.utils.data.SequentialSampler)


def test_saved_states_are_those_of_a_single_device(tmp_path):
    fabric, model, optimizer, state = train("dp_ext", 3)
    fabric.save(tmp_path / "dp.ckpt", {"model": model, "optimizer": optimizer, "step": 7})
    saved = torch.load(tmp_path / "dp.ckpt", weights_only=True)
    assert saved["model"].keys() == model._forward_module.module.state_dict().keys()
    for strategy, devices in (("auto", 1), ("dp_ext", 2)):
        other, other_model, other_optimizer, _ = train(strategy, devices)
        nn.init.zeros_(next(other_model.parameters()))
        rest = other.load(tmp_path / "dp.ckpt", {"model": other_model, "optimizer": other_optimizer})
        assert rest == {"step": 7}
        assert_close({f"net.{name}": value for name, value in state_of(other_model).items()}, state)
    strategy = fabric.strategy
    assert_close(strategy.get_module_state_dict(model._forward_module), saved["model"])
    strategy.load_module_state_dict(model._forward_module, saved["model"])
    with pytest.raises(RuntimeError, match="Missing key"):
        strategy.load_module_state_dict(model._forward_module, {})


def test_a_launched_function_runs_in_this_process():
    fabric = Fabric(strategy="dp_ext", devices=2, accelerator="cpu")
    assert fabric.launch(lambda fabric, value: (fabric.global_rank, value), 3) == (0, 3)


class Module(nn.Module):
    """A module with several inputs, keyword inputs, several outputs, a loss, and a method other than ``forward``."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, NUM_CLASSES)

    def forward(self, features, *, labels=None, scale=1.0):
        logits = self.net(features) * scale
        return {"logits": logits, "loss": None if labels is None else functional.cross_entropy(logits, labels)}

    def score(self, features):
        return self(features)["logits"].softmax(dim=1), len(features)


@each_mode
def test_inputs_are_split_and_outputs_gathered(arguments):
    outputs = []
    for strategy in (DataParallelStrategy(**arguments), "auto"):
        torch.manual_seed(0)
        fabric = Fabric(strategy=strategy, devices=1, accelerator="cpu")
        module = Module()
        model = fabric.setup(module)
        model.mark_forward_method("score")
        features, labels = next(iter(loader(64, batch_size=10)))
        output = model(features, labels=labels, scale=2.0)
        fabric.backward(output["loss"])
        score, num_samples = model.score(features)
        outputs.append([output, score, torch.as_tensor(num_samples).sum(), module.net.weight.grad])
        assert model(features)["loss"] is None
    torch.testing.assert_close(outputs[0], outputs[1])


class Logs(MLP):
    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(NUM_CLASSES)

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        loss = functional.cross_entropy(logits, batch[1])
        self.log("loss", loss)
        self.log("accuracy", self.accuracy(logits, batch[1]))
        return {"loss": loss, "count": len(batch[0])}


@each_mode
def test_a_lightning_module_trains_and_logs_once(arguments):
    class Logger(pl.loggers.logger.DummyLogger):
        def __init__(self):
            super().__init__()
            self.rows = []

        def log_metrics(self, metrics, step=None):
            self.rows.append({key: float(value) for key, value in metrics.items()})

    results = []
    for strategy in (DataParallelStrategy(**arguments), "auto"):
        logger = Logger()
        fabric = Fabric(strategy=strategy, devices=1, accelerator="cpu", loggers=[logger])
        pl.seed_everything(11, verbose=False)
        module = Logs()
        module.fabric = fabric
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for index, batch in enumerate(fabric.setup_dataloaders(loader(64, batch_size=10))):
            fabric.backward(model.training_step(batch, index)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        results.append((logger.rows, state_of(module), module.accuracy.compute()))
    ext, single = results
    assert len(ext[0]) == len(single[0]) == 14
    for ext_row, row in zip(ext[0], single[0], strict=True):
        assert ext_row == pytest.approx(row, rel=1e-4)
    assert_close(ext[1], single[1])
    torch.testing.assert_close(ext[2], single[2])


class NoInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self):
        return self.weight.sum()


def test_a_call_without_inputs_runs_once_and_one_that_cannot_be_split_is_refused():
    fabric = Fabric(strategy="dp_ext", devices=2, accelerator="cpu")
    assert fabric.setup(NoInput())().item() == 3
    with pytest.raises(ValueError, match="cannot be split"):
        fabric.setup(Module())("text")


def test_a_scatter_function_splits_the_first_input():
    def scatter(batch, num_replicas):
        return [(batch[:2], 2), (batch[2:], len(batch) - 2)]

    fabric = Fabric(strategy=DataParallelStrategy(scatter=scatter), devices=2, accelerator="cpu")
    torch.manual_seed(0)
    module = Module()
    features, labels = next(iter(loader(64, batch_size=10)))
    output = fabric.setup(module)(features, labels=labels)
    torch.testing.assert_close(output, module(features, labels=labels))


def test_the_name_dp_selects_the_strategy_of_fabric():
    fabric = Fabric(strategy="dp", devices=2, accelerator="cpu")
    assert "lightning_strategies_ext" not in type(fabric.strategy).__module__


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"parallel_devices": []}, ValueError, r"`parallel_devices=\[\]` contains no device"),
        ({"scatter": 3}, TypeError, "`scatter` must be a function"),
        ({"precision": 16}, TypeError, "`precision` must be a Precision of lightning.fabric"),
    ],
)
def test_wrong_arguments_are_refused_at_construction(arguments, error, message):
    with pytest.raises(error, match=message):
        DataParallelStrategy(**arguments)
