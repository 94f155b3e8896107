"""The arguments of ``DDPStrategy`` reach torch and the Trainer, and have the documented effects."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins import MixedPrecision, TorchCheckpointIO
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_strategies_ext import DDPStrategy, ShmOptions
from lightning_strategies_ext.fabric.ddp import DDPStrategy as FabricDDPStrategy
from lightning_strategies_ext.registry import STRATEGIES
from lightning_strategies_ext.torch_distributed import process_group
from tests.support.models import (
    MLP,
    WithBatchNorm,
    WithUnusedParameters,
    assert_same_bits,
    fit,
    loader,
    make_trainer,
    state_of,
)
from tests.support.ranks import outcomes_of_ranks, run_ranks

START_METHODS = {row.name: row.init_params["start_method"] for row in STRATEGIES if "start_method" in row.init_params}
POPEN_NAMES = [name for name, start_method in START_METHODS.items() if start_method == "popen"]
FORK_NAMES = [name for name, start_method in START_METHODS.items() if start_method == "fork"]


def train_with(**arguments: Any) -> dict:
    return state_of(fit(DDPStrategy(**arguments), max_epochs=1)[1])


class RecordingCheckpointIO(TorchCheckpointIO):
    def __init__(self) -> None:
        self.saved: list[str] = []

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.saved.append(Path(path).name)
        super().save_checkpoint(checkpoint, path, storage_options)


def train_with_plugins(directory: Path, gives_devices: bool) -> dict[str, Any]:
    environment, checkpoint_io = LightningEnvironment(), RecordingCheckpointIO()
    precision = MixedPrecision("bf16-mixed", "cpu")
    # Lightning's Trainer accepts an accelerator or CPU devices of a strategy, but not both.
    accelerator, devices = (None, [torch.device("cpu")] * 2) if gives_devices else (CPUAccelerator(), None)
    # By position, in the order of Lightning's DDPStrategy.
    strategy = DDPStrategy(accelerator, devices, environment, checkpoint_io, precision)
    pl.seed_everything(11, verbose=False)
    model = MLP()
    trainer = make_trainer(strategy, devices="auto" if gives_devices else 2, accelerator="auto", max_epochs=1)
    trainer.fit(model, loader())
    trainer.save_checkpoint(directory / "saved.ckpt")
    assert gives_devices or trainer.accelerator is accelerator
    assert strategy.cluster_environment is environment
    assert trainer.precision == "bf16-mixed"
    return {"saved": checkpoint_io.saved, "world_size": trainer.world_size, "state": state_of(model)}


def train_with_trainer_flags() -> dict:
    return state_of(fit("ddp_ext", max_epochs=1, precision="bf16-mixed")[1])


@pytest.mark.processes
@pytest.mark.parametrize("gives_devices", [True, False])
def test_plugins_given_to_the_strategy_are_those_that_are_used(tmp_path, gives_devices):
    first, second = run_ranks(train_with_plugins, tmp_path, gives_devices)
    assert first["world_size"] == second["world_size"] == 2
    assert (first["saved"], second["saved"]) == (["saved.ckpt"], [])  # rank 0 writes
    assert_same_bits(first["state"], run_ranks(train_with_trainer_flags)[0])


def compressed_and_not(kind: str) -> list[dict]:
    arguments: dict[str, Any] = {
        "fp16": {"ddp_comm_hook": default_hooks.fp16_compress_hook},
        "bf16": {"ddp_comm_hook": default_hooks.bf16_compress_hook},
        "wrapper": {
            "ddp_comm_hook": default_hooks.allreduce_hook,
            "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper,
        },
        "state": {
            "ddp_comm_state": powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2),
            "ddp_comm_hook": powerSGD_hook.powerSGD_hook,
        },
    }[kind]
    return [train_with(**arguments), train_with()]


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["fp16", "bf16", "wrapper", "state"])
def test_a_communication_hook_also_exchanges_gradients_on_cpu(kind):
    outcomes = run_ranks(compressed_and_not, kind)
    for compressed, exact in outcomes:
        assert any(not torch.equal(compressed[name], exact[name]) for name in exact), "the hook had no effect"
        for name in exact:
            torch.testing.assert_close(compressed[name], exact[name], atol=0.05, rtol=0.05)
    assert_same_bits(outcomes[0][0], outcomes[1][0])


class RecordsWeights(pl.Callback):
    def __init__(self) -> None:
        self.weights: list[list[float]] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.weights.append(module.net[0].weight.flatten().tolist())


def train_locally() -> list[list[float]]:
    """Trains with post-local SGD: exchanges gradients for two steps only, and averages models every third step."""
    recorder = RecordsWeights()
    state = post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=2, post_local_gradient_allreduce=False)
    strategy = DDPStrategy(
        ddp_comm_state=state, ddp_comm_hook=post_localSGD_hook.post_localSGD_hook, model_averaging_period=3
    )
    fit(strategy, callbacks=[recorder], max_epochs=1)
    return recorder.weights


@pytest.mark.processes
def test_with_post_local_sgd_models_differ_and_are_averaged_by_its_period():
    first, second = run_ranks(train_locally)
    agree = [a == b for a, b in zip(first, second, strict=True)]
    # Averaged after the third and the sixth step: two warm-up steps, then every third step.
    assert agree == [True, True, True, False, False, True, False, False]


def train_within_the_host() -> list[list[float]]:
    recorder = RecordsWeights()
    state = post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=0)  # groups: not logged
    fit(
        DDPStrategy(
            ddp_comm_state=state, ddp_comm_hook=post_localSGD_hook.post_localSGD_hook, model_averaging_period=4
        ),
        callbacks=[recorder],
        max_epochs=1,
    )
    return recorder.weights


@pytest.mark.processes
def test_post_local_sgd_exchanges_gradients_within_the_host_when_no_group_is_given():
    first, second = run_ranks(train_within_the_host)
    assert first == second


def time_out() -> float:
    strategy = make_trainer(DDPStrategy(timeout=timedelta(seconds=2))).strategy
    strategy.setup_environment()
    start = time.monotonic()
    if strategy.global_rank == 0:
        with pytest.raises(RuntimeError, match="barrier no peer comes failed"):
            strategy.barrier("no peer comes")
    else:
        while time.monotonic() - start < 4:
            pass
    return time.monotonic() - start


@pytest.mark.processes
def test_timeout_bounds_a_collective():
    assert 1 < run_ranks(time_out)[0] < 4


def inspect_process_group() -> tuple[str | None, str, float]:
    strategy = make_trainer(DDPStrategy(process_group_backend="cpu:gloo")).strategy
    strategy.setup_environment()
    return strategy.process_group_backend, dist.get_backend(), strategy.reduce(torch.tensor(3.0)).item()


def take_too_much_memory(make_strategy: Callable[..., Any]) -> tuple[str, float]:
    strategy = make_strategy(process_group_options=ShmOptions(segment_num_bytes=10**15))
    front_end = Fabric if isinstance(strategy, FabricDDPStrategy) else pl.Trainer
    strategy = front_end(strategy=strategy, accelerator="cpu", devices=2).strategy
    strategy.setup_environment()
    tensor = torch.tensor(3.0)
    dist.all_reduce(tensor)
    return dist.get_backend(), tensor.item()


@pytest.mark.processes
@pytest.mark.parametrize("make_strategy", [DDPStrategy, FabricDDPStrategy])
def test_cpu_ranks_of_one_host_share_memory_by_default_and_options_reach_it(make_strategy):
    outcomes = outcomes_of_ranks(take_too_much_memory, make_strategy)
    assert [outcome.value for outcome in outcomes] == [("shm", 6.0)] * 2
    assert "falling back to gloo for this process group: rank 0 cannot reserve" in outcomes[0].output


@pytest.mark.parametrize(
    ("world_size", "num_hosts", "backend"), [(1, 1, "gloo"), (2, 2, "gloo"), (3, 2, "shm"), (4, 2, "shm")]
)
def test_cpu_ranks_that_share_hosts_share_memory_there_by_default(world_size: int, num_hosts: int, backend: str):
    assert process_group.default_backend(torch.device("cpu"), world_size, num_hosts) == backend
    assert process_group.default_backend(torch.device("cuda"), world_size, num_hosts) == "nccl"


@pytest.mark.processes
def test_process_group_backend_is_used():
    assert run_ranks(inspect_process_group) == [("cpu:gloo", "cpu:gloo", 3.0)] * 2


class Inspects(pl.Callback):
    """A callback that records DDP's settings and the collectives of one forward pass."""

    def __init__(self) -> None:
        self.model: Any = None
        self.collectives: list[str] = []

    def on_train_start(self, trainer, module):
        model = trainer.strategy.model
        assert isinstance(model, DistributedDataParallel)
        self.settings = (model.gradient_as_bucket_view, model.find_unused_parameters, model.static_graph)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler, torch.no_grad():
            module.forward = module.net.forward
            model(next(iter(loader()))[0])
        self.collectives = [event.name for event in profiler.events() if event.name.startswith(("c10d::", "shm:"))]

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if not hasattr(self, "gradients"):
            self.gradients = [parameter.grad.untyped_storage().data_ptr() for parameter in module.parameters()]


def inspect_ddp() -> list[Any]:
    seen = []
    for model, arguments in (
        (MLP, {}),
        (MLP, {"bucket_cap_mb": 25}),
        (MLP, {"gradient_as_bucket_view": False, "find_unused_parameters": True}),
        (WithBatchNorm, {"static_graph": True}),
    ):
        inspection = Inspects()
        fit(DDPStrategy(**arguments), model, callbacks=[inspection], max_epochs=1)
        seen.append((inspection.settings, inspection.collectives, len(set(inspection.gradients))))
    return seen


@pytest.mark.processes
def test_defaults_keep_gradients_once_and_broadcast_no_missing_buffer():
    plain, with_reducer, chosen, with_buffers = run_ranks(inspect_ddp)[0]
    assert plain == ((True, False, False), [], 1), "small gradients are parts of one tensor"
    assert with_reducer == ((True, False, False), [], 1), "gradients lie in one bucket"
    assert chosen == ((False, True, False), [], 4), "the user's choice holds"
    assert with_buffers[0] == (True, False, True)


def fit_often(name: str, model: type[MLP]) -> None:
    for _ in range(3):
        fit(name, model, max_epochs=1)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "model", "times"),
    [
        ("ddp_ext_find_unused_parameters_true", MLP, 1),
        ("ddp_ext_find_unused_parameters_true", WithUnusedParameters, 0),  # the graph is not static
        ("ddp_ext", MLP, 0),  # no benefit
    ],
)
def test_static_graph_is_advised_once_where_it_helps(name, model, times):
    first, second = outcomes_of_ranks(fit_often, name, model)
    assert first.error is None
    assert first.output.count("static_graph=True") == times
    assert "static_graph" not in second.output
