"""Fabric loops have equal results with ``horovod_ext`` and with ``ddp_ext``."""

import copy
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn import functional
from torchmetrics import MeanMetric

from lightning_strategies_ext.fabric import HorovodStrategy
from tests.support.horovod_ranks import run_horovod
from tests.support.models import MLP, NUM_FEATURES, WithBatchNorm, assert_close, loader, state_of
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes


def train_under_fabric(strategy: str, directory: str) -> dict[str, Any]:
    if strategy == "horovod_ext":
        each_step = Fabric(strategy=HorovodStrategy(broadcast_buffers=True), devices=2, accelerator="cpu")
        each_step.launch()
        in_each_step = train_buffers(each_step, f"{directory}/each_step.ckpt")
        in_each_step |= train_by_methods(each_step)
    fabric = Fabric(strategy=strategy, devices=2, accelerator="cpu")
    fabric.launch()
    fabric.seed_everything(11, verbose=False)
    module = MLP()
    model, optimizer = fabric.setup(module.net, torch.optim.SGD(module.net.parameters(), lr=0.1))
    for index, (features, labels) in enumerate(fabric.setup_dataloaders(loader())):
        with fabric.no_backward_sync(model, enabled=index % 2 == 0):
            fabric.backward(functional.cross_entropy(model(features), labels))
        if index % 2 == 1:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    fabric.save(f"{directory}/model.ckpt", {"model": model})
    before = state_of(module)
    with torch.no_grad():
        module.net[0].weight.zero_()
    fabric.load(f"{directory}/model.ckpt", {"model": model})
    fabric.barrier()
    return {
        **({"in each step": in_each_step} if strategy == "horovod_ext" else {}),
        "before": before,
        "after": state_of(module),
        "gan": train_gan(fabric),
        "buffers": train_buffers(fabric, f"{directory}/buffers.ckpt") | train_by_methods(fabric),
        "metric": mean_of_ranks(fabric),
        "sum": fabric.all_reduce(torch.tensor(float(fabric.global_rank)), reduce_op="sum").item(),
        "gathered": fabric.all_gather(torch.tensor(fabric.global_rank)).tolist(),
        "sent": fabric.broadcast(fabric.global_rank, src=1),
        "any": fabric.strategy.reduce_boolean_decision(fabric.global_rank == 0, all=False),
    }


def mean_of_ranks(fabric: Fabric) -> float:
    metric = MeanMetric()
    metric.update(float(fabric.global_rank))
    return metric.compute().item()


def train_buffers(fabric: Fabric, path: str) -> dict[str, Any]:
    """Trains batch normalization; returns the results of an evaluation in between, and the buffers of a checkpoint."""
    fabric.seed_everything(11, verbose=False)
    module = WithBatchNorm()
    model, optimizer = fabric.setup(module.net, torch.optim.SGD(module.net.parameters(), lr=0.1))
    found, batches = {}, list(fabric.setup_dataloaders(loader()))
    for index, (features, labels) in enumerate(batches):
        with fabric.no_backward_sync(model, enabled=index % 2 == 0):
            fabric.backward(functional.cross_entropy(model(features), labels))
        if index % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                model(features)
            found |= {f"{index}.{name}": value.clone() for name, value in module.net.named_buffers()}
            model.train()
    model(features)
    fabric.save(path, {"model": model})
    if isinstance(fabric.strategy, HorovodStrategy) and fabric.global_rank == 0:
        copy.deepcopy(module.net).eval()(features)  # a copy belongs to one rank
    found |= {f"saved.{name}": value for name, value in torch.load(path)["model"].items()}
    return found


class Steps(WithBatchNorm):
    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        return self.net(batch[0]).mean()


def train_by_methods(fabric: Fabric) -> dict[str, Any]:
    """Calls methods instead of ``forward``; returns the results of an evaluation, and the buffers that it used."""
    fabric.seed_everything(11, verbose=False)
    module = Steps()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for index, batch in enumerate(fabric.setup_dataloaders(loader())):
        fabric.backward(model.training_step(batch, index))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        computed = model.validation_step((torch.ones(8, NUM_FEATURES),), 0)
    return {"by methods": computed} | {f"by methods.{name}": each.clone() for name, each in module.named_buffers()}


def train_gan(fabric: Fabric) -> dict[str, Any]:
    """Trains two modules whose parameters have the same names, each in turn."""
    fabric.seed_everything(11, verbose=False)
    nets = [nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.ReLU(), nn.Linear(8, NUM_FEATURES)), MLP().net]
    (generator, of_generator), (critic, of_critic) = (
        fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1)) for net in nets
    )
    for features, labels in fabric.setup_dataloaders(loader(16)):
        with torch.no_grad():
            made = generator(features)
        of_critic.zero_grad()
        fabric.backward(functional.cross_entropy(critic(features + made), labels))
        of_critic.step()
        of_generator.zero_grad()
        fabric.backward(functional.cross_entropy(critic(generator(features)), 1 - labels.clamp(max=1)))
        of_generator.step()
    return {f"{i}.{name}": values for i, net in enumerate(nets) for name, values in net.state_dict().items()}


@pytest.mark.parametrize("launcher", ["horovodrun", "python"])
def test_a_fabric_loop_trains_as_with_ddp(launcher, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    expected = run_ranks(train_under_fabric, "ddp_ext", str(tmp_path / "a"))
    buffers = [rank.pop("buffers") for rank in expected]
    assert_close(buffers[1], buffers[0])
    for ext, stock in zip(
        run_horovod(launcher, train_under_fabric, "horovod_ext", str(tmp_path / "b")), expected, strict=True
    ):
        assert_close(ext.pop("before"), stock.pop("before"))
        assert_close(ext.pop("after"), stock.pop("after"))
        assert_close(ext.pop("gan"), stock.pop("gan"))
        for found in (ext.pop("buffers"), ext.pop("in each step")):
            assert_close(found, buffers[0])
        assert ext == stock
