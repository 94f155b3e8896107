"""``Fabric(strategy="ddp_ext")``: results of two ranks are bitwise identical to Lightning's strategy."""

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

from lightning_strategies_ext import WorkerRaisedError
from lightning_strategies_ext.fabric.ddp import DDPStrategy as FabricDDPStrategy
from tests.support.examples import EXAMPLE_ENVIRONMENT
from tests.support.models import MLP, assert_same_bits, dataset, state_of
from tests.support.ranks import REPOSITORY, leave_process_group, run_ranks, run_script


def train_under_fabric(name: str) -> tuple[dict, str, float]:
    fabric = Fabric(strategy=name, devices=2, accelerator="cpu")
    fabric.launch()
    return train(fabric)


def train(fabric: Fabric) -> tuple[dict, str, float]:
    fabric.seed_everything(11, verbose=False)
    module = MLP()
    model, optimizer = fabric.setup(module.net, torch.optim.SGD(module.net.parameters(), lr=0.1))
    batches = fabric.setup_dataloaders(torch.utils.data.DataLoader(dataset(), batch_size=4))
    for index, (features, labels) in enumerate(batches):
        with fabric.no_backward_sync(model, enabled=index % 2 == 0):
            loss = torch.nn.functional.cross_entropy(model(features), labels)
            fabric.backward(loss)
        if index % 2 == 1:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    total = fabric.all_reduce(loss.detach(), reduce_op="sum").item()
    assert fabric.all_gather(torch.tensor(fabric.global_rank)).tolist() == [0, 1]
    assert fabric.broadcast(fabric.global_rank, src=1) == 1
    assert fabric.strategy.reduce_boolean_decision(fabric.global_rank == 0, all=False)
    fabric.barrier()
    return state_of(module), type(fabric.strategy).__module__, total


def train_under_fabric_with_both() -> list[Any]:
    stock = train_under_fabric("ddp")
    leave_process_group()
    ext = train_under_fabric("ddp_ext")
    assert torch.distributed.get_backend() == "shm"
    return [ext, stock]


@pytest.mark.processes
def test_fabric_trains_bitwise_as_with_stock():
    for ext, stock in run_ranks(train_under_fabric_with_both):
        assert ext[1] == FabricDDPStrategy.__module__
        assert_same_bits(ext[0], stock[0])
        assert ext[2] == stock[2]


def save_and_load_in_a_script(directory: str) -> tuple[dict, dict]:
    fabric = Fabric(strategy="ddp_ext", devices=2, accelerator="cpu")
    fabric.launch()
    return save_and_load(fabric, directory)


def save_and_load(fabric: Fabric, directory: str) -> tuple[dict, dict]:
    torch.manual_seed(fabric.global_rank)
    net = MLP().net
    model = fabric.setup_module(net)
    fabric.save(f"{directory}/model.ckpt", {"model": model})
    before = state_of(net)
    with torch.no_grad():
        net[0].weight.zero_()
    fabric.load(f"{directory}/model.ckpt", {"model": model})
    return before, state_of(net)


@pytest.mark.processes
def test_fabric_saves_and_loads_without_the_prefix_of_the_wrapper(tmp_path):
    for before, after in run_ranks(save_and_load_in_a_script, str(tmp_path)):
        assert_same_bits(before, after)
    assert next(iter(torch.load(tmp_path / "model.ckpt")["model"])) == "0.weight"
    before, after = Fabric(strategy="ddp_spawn_ext", devices=2, accelerator="cpu").launch(save_and_load, str(tmp_path))
    assert_same_bits(before, after)


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["ddp_ext", "ddp_spawn_ext", "dp_ext"])
def test_one_example_trains_with_each_strategy(strategy, tmp_path):
    result = run_script(
        REPOSITORY / "examples/fabric_digits.py", "--strategy", strategy, "--epochs", "4", "--batch-size", "16",
        "--checkpoint", tmp_path / "digits.ckpt",
        env=EXAMPLE_ENVIRONMENT,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    (accuracy,) = re.findall(rf"^{strategy}: accuracy on 360 held-out images ([\d.]+)$", result.stdout, re.MULTILINE)
    assert float(accuracy) > 0.9
    assert "0.weight" in torch.load(tmp_path / "digits.ckpt")["model"]


# --- functions that are launched in workers ---


@pytest.mark.processes
@pytest.mark.parametrize("name", ["ddp_spawn_ext", "ddp_fork_ext"])
def test_a_launched_function_trains_as_scripts_do_and_its_value_is_returned(name):
    ((expected, _, total), _), *_ = run_ranks(train_under_fabric_with_both)
    weights, module, sum_of_losses = Fabric(strategy=name, devices=2, accelerator="cpu").launch(train)
    assert module == FabricDDPStrategy.__module__
    assert_same_bits(weights, expected)
    assert sum_of_losses == total


def where(fabric: Fabric, scale: int, offset: int = 0) -> tuple[int, list[int]]:
    return os.getpid(), (fabric.all_gather(torch.tensor(fabric.global_rank)) * scale + offset).tolist()


def fail(fabric: Fabric) -> None:
    if fabric.global_rank == 1:
        raise ValueError("bad luck")
    fabric.barrier()


@pytest.mark.processes
def test_the_next_launch_reuses_the_workers_and_a_failure_names_the_rank():
    fabric = Fabric(strategy="ddp_spawn_ext", devices=2, accelerator="cpu")
    pid, values = fabric.launch(where, 10, offset=1)
    assert values == [1, 11]
    assert pid != os.getpid()
    assert fabric.launch(where, 2) == (pid, [0, 2])
    with pytest.raises(WorkerRaisedError, match=r"rank 1 .* failed: ValueError: bad luck"):
        fabric.launch(fail)
    other, values = fabric.launch(where, 3)
    assert (values, other != pid) == ([0, 3], True)


def test_launching_workers_without_a_function_is_refused():
    with pytest.raises(TypeError, match="needs to be called with a function"):
        Fabric(strategy="ddp_spawn_ext", devices=2, accelerator="cpu").launch()


def join_with_a_plugin(directory: str) -> tuple[bool, float]:
    torch.utils.rename_privateuse1_backend("plugin")  # as in a plugin for other devices, for which torch finds no hooks
    fabric = Fabric(strategy="ddp_ext", accelerator="cpu", devices=2)
    fabric.launch()
    written = Path(directory, "written")
    if fabric.global_rank == 1:
        time.sleep(0.5)
        written.touch()
    fabric.barrier("written")
    return written.exists(), float(fabric.all_reduce(torch.tensor(1.0), reduce_op="sum"))


@pytest.mark.processes
def test_a_barrier_works_where_a_device_plugin_breaks_torchs_barrier(tmp_path):
    """Lightning's Fabric supports this since 2.5.5."""
    assert run_ranks(join_with_a_plugin, str(tmp_path)) == [(True, 2.0)] * 2


def gradients_of_passes(order: str, **ddp_kwargs: Any) -> tuple[str, list[float]]:
    """Runs two forward and two backward passes; `order` has the passes inside of `no_backward_sync` in capitals."""
    strategy = FabricDDPStrategy(**ddp_kwargs)
    fabric = Fabric(strategy=strategy, devices=2, accelerator="cpu")
    fabric.launch()
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    model = fabric.setup(net)
    data = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(3))[:, fabric.global_rank :: 2]
    batches, losses = iter(data), []
    try:
        for pass_kind in order:
            with fabric.no_backward_sync(model, enabled=pass_kind.isupper()):
                if pass_kind.lower() == "f":
                    features = next(batches).clone().requires_grad_()
                    losses.append((model(features) - 1).pow(2).mean())
                elif pass_kind == "g":  # a gradient penalty
                    (slope,) = torch.autograd.grad(losses[-1], features, create_graph=True)
                    losses[-1] = losses[-1] + slope.pow(2).sum(1).mean()
                else:
                    fabric.backward(losses.pop(0)) if pass_kind.lower() == "b" else losses.pop(0).backward()
    except RuntimeError as error:
        return str(error), []
    return "", torch.cat([parameter.grad.flatten() for parameter in net.parameters()]).tolist()


def gradients_of_all_orders() -> dict[str, tuple[str, list[float]]]:
    orders = ["fbfb", "ffbb", "fflb", "Ffbb", "ffBb"]
    found = {order: gradients_of_passes(order) for order in orders}
    found["penalty"] = gradients_of_passes("fgb")
    for name in ("find_unused_parameters", "static_graph"):
        found[name] = gradients_of_passes("ffbb", **{name: True})
    found["static graph, first blocked"] = gradients_of_passes("FBfb", static_graph=True)
    found["penalty, unused"] = gradients_of_passes("fgb", find_unused_parameters=True)
    found["alone"] = gradients_alone(penalty=False)
    found["alone, penalty"] = gradients_alone(penalty=True)
    return found


def gradients_alone(*, penalty: bool) -> tuple[str, list[float]]:
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    data = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(3))
    for features in data[:1] if penalty else data:
        loss = (net(features.requires_grad_()) - 1).pow(2).mean()
        if penalty:
            # Each rank has the penalty of its samples: the gradient of a mean over half of them is twice as large.
            (slope,) = torch.autograd.grad(2 * loss, features, create_graph=True)
            loss = loss + slope.pow(2).sum(1).mean()
        loss.backward()
    return "", torch.cat([parameter.grad.flatten() for parameter in net.parameters()]).tolist()


@pytest.mark.processes
def test_every_backward_pass_is_exchanged_in_every_order_of_passes():
    """DDP prepares for one backward pass in each forward pass, and exchanges nothing in a second backward pass."""
    for found in run_ranks(gradients_of_all_orders):
        for order in ("fbfb", "ffbb", "fflb", "Ffbb", "ffBb", "static graph, first blocked"):
            assert found[order] == ("", pytest.approx(found["alone"][1], abs=1e-6)), order
        for order in ("penalty", "penalty, unused"):
            assert found[order] == ("", pytest.approx(found["alone, penalty"][1], abs=1e-6)), order
        for name in ("find_unused_parameters", "static_graph"):
            assert found[name][0], "an error, or the gradients of both passes"
        assert "`find_unused_parameters=True`: two forward passes" in found["find_unused_parameters"][0]
