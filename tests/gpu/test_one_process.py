"""``dp_ext`` with replicas on GPUs, and the Fabric strategies on GPUs."""

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric, seed_everything

from lightning_strategies_ext import DataParallelStrategy
from lightning_strategies_ext.fabric.dp import DataParallelStrategy as FabricDataParallelStrategy
from tests.gpu.devices import BACKEND, DEVICE_TYPE, ON_CPU, Ranks, cuda_only, run_main, two_gpus
from tests.support.models import MLP, WithBatchNorm, assert_same_bits, dataset, fit, loader, state_of

pytestmark = pytest.mark.processes

num_devices = pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=two_gpus)])


# --- dp_ext ---


class RecordsPlacement(MLP):
    """A net that records the devices of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[str] = []

    def training_step(self, batch, batch_idx):
        self.devices.append(str(batch[0].device))
        return super().training_step(batch, batch_idx)


class RecordsPlacementWithBatchNorm(RecordsPlacement, WithBatchNorm):
    pass


def train_replicas(where: dict[str, Any], make_model: type[RecordsPlacement], kwargs: dict[str, Any]) -> list[Any]:
    _, ext = fit("dp_ext", make_model, **where, **kwargs)
    _, single = fit("auto", make_model, **{**where, "devices": 1})
    return [state_of(ext.cpu()), state_of(single.cpu()), set(ext.devices)]


@num_devices
@pytest.mark.parametrize(
    ("make_model", "kwargs"),
    [(RecordsPlacement, {}), (RecordsPlacementWithBatchNorm, {"sync_batchnorm": True})],
    ids=["plain", "norm"],
)
def test_replicas_train_as_one_device_on_the_whole_batch(
    make_model: type[RecordsPlacement], kwargs: dict[str, Any], num_devices: int
) -> None:
    ext, single, devices = run_main(train_replicas, num_devices, make_model, kwargs)
    assert devices == ({"cpu"} if ON_CPU else {f"cuda:{index}" for index in range(num_devices)})
    for name, tensor in single.items():
        torch.testing.assert_close(ext[name], tensor, rtol=1e-4, atol=1e-5)


@cuda_only
@pytest.mark.parametrize("strategy_class", [DataParallelStrategy, FabricDataParallelStrategy])
def test_two_replicas_on_one_gpu_are_refused(strategy_class: type) -> None:
    with pytest.raises(ValueError, match="contains a GPU twice"):
        strategy_class(parallel_devices=[torch.device("cuda", 0)] * 2)


# --- Fabric ---


def train_with_fabric(where: dict[str, Any], strategy: str, precision: str) -> dict[str, torch.Tensor]:
    fabric = Fabric(strategy=strategy, precision=precision, **where)
    fabric.launch()
    seed_everything(11, verbose=False)
    model = MLP()
    model, optimizer = fabric.setup(model.net, model.configure_optimizers())
    batches = fabric.setup_dataloaders(loader())
    for index, (features, labels) in enumerate(batches):
        is_accumulating = index % 2 == 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            output = model(features)
            assert output.device.type == DEVICE_TYPE
            fabric.backward(torch.nn.functional.cross_entropy(output, labels))
        if not is_accumulating:
            optimizer.step()
            optimizer.zero_grad()
    return {name: tensor.cpu() for name, tensor in fabric.strategy.get_module_state_dict(model.module).items()}


def train_with_both(where: dict[str, Any], precision: str) -> tuple[Any, Any, str]:
    stock = train_with_fabric(where, "ddp", precision)
    return train_with_fabric(where, "ddp_ext", precision), stock, torch.distributed.get_backend()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_fabric_loop_trains_bitwise_as_with_stock(ranks: Ranks, precision: str) -> None:
    for ext, stock, backend in ranks.run(train_with_both, precision):
        assert backend == BACKEND
        assert_same_bits(ext, stock)


@num_devices
def test_a_loop_of_fabric_runs_on_replicas(num_devices: int) -> None:
    weights = run_main(train_with_fabric, num_devices, "dp_ext", "32-true")
    single = run_main(train_with_fabric, 1, "auto", "32-true")
    assert len(dataset()) % (4 * num_devices) == 0  # otherwise the parts of a batch have different sizes
    for name, tensor in single.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5)
