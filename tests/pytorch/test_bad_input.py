"""Invalid arguments are rejected as early as possible, with the argument, its value, and a fix."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

from lightning_strategies_ext import DataParallelStrategy, DDPSpawnStrategy, HorovodStrategy, ShmOptions
from lightning_strategies_ext.fabric.ddp import DDPStrategy as FabricDDPStrategy
from lightning_strategies_ext.fabric.dp import DataParallelStrategy as FabricDataParallelStrategy
from lightning_strategies_ext.fabric.horovod import HorovodStrategy as FabricHorovodStrategy
from lightning_strategies_ext.pytorch.ddp import DDPStrategy
from lightning_strategies_ext.torch_distributed import process_group
from tests.support.models import MLP, loader, make_trainer
from tests.support.ranks import run_ranks

CPU, NO_GPU = torch.device("cpu"), torch.device("cuda", torch.cuda.device_count())


HOOK_FORM = "`def hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]`"


@dataclass
class Refusal:
    """A call of a constructor, and the exception that it must raise.

    Attributes:
        arguments: Keyword arguments of the constructor.
        error: Type of the exception.
        argument: The argument that the message must contain, by default the last one of ``arguments``.
        value: The value as the message must contain it.
        fix: The fix that the message must contain.
    """

    arguments: dict[str, Any]
    error: type[Exception]
    value: str
    fix: str
    argument: str = field(default="")

    def check(self, construct: Callable[..., Any]) -> None:
        with pytest.raises(self.error) as caught:
            construct(**self.arguments)
        message = str(caught.value)
        assert f"`{self.argument or list(self.arguments)[-1]}" in message
        assert self.value in message
        assert self.fix in message

    def __str__(self) -> str:
        return ",".join(
            f"{key}={getattr(value, '__name__', None) or repr(value).partition(' object at ')[0]}"
            for key, value in self.arguments.items()
        )


def hook_without_bucket(state):
    """Is not a communication hook."""


def hook_with_other_names(state, gradients):
    """Is not a communication hook, because torch passes ``bucket``."""


def hook_with_keywords(state, **gradients):
    """Is not a communication hook."""


def hook_with_wrong_argument(state, bucket: torch.Tensor):
    """Is not a communication hook."""


def hook_with_wrong_result(state, bucket: dist.GradBucket) -> torch.Tensor:
    """Is not a communication hook."""


def wrapper_without_result(hook):
    """Is not a wrapper."""


def wrapper_with_wrong_result(hook):
    return hook_without_bucket


def local_sgd(**arguments: Any) -> dict[str, Any]:
    return {"ddp_comm_hook": post_localSGD_hook, "ddp_comm_state": PostLocalSGDState(None, None, 2), **arguments}


FOR_BOTH_FRONT_ENDS = [
    Refusal({"process_group_backend": "mccl"}, ValueError, "'mccl'", "Use one of "),
    Refusal({"process_group_backend": "cpu:gloo,cuda:mccl"}, ValueError, "'cpu:gloo,cuda:mccl'", "Use one of "),
    Refusal({"process_group_backend": 5}, TypeError, "got 5", "'gloo'"),
    Refusal({"timeout": timedelta(seconds=-1)}, ValueError, "-1.0 seconds", "must be positive"),
    Refusal({"timeout": timedelta(0)}, ValueError, "0.0 seconds", "must be positive"),
    Refusal({"timeout": 1800}, TypeError, "got 1800", "Write `timedelta(seconds=...)`"),
    Refusal(
        {"process_group_backend": "gloo", "process_group_options": ShmOptions()},
        ValueError,
        "`process_group_options=ShmOptions(segment_num_bytes=None)` are for the backend 'shm'",
        "`process_group_backend='gloo'`",
    ),
    Refusal({"start_method": "thread"}, ValueError, "'thread'", "Use one of popen, "),
    Refusal({"start_method": None}, ValueError, "=None", "Use one of popen, "),
    Refusal({"find_unused_params": True}, TypeError, "Unknown", "find_unused_parameters"),
    Refusal({"device_ids": [0]}, TypeError, "Unknown", "DistributedDataParallel accepts"),
    Refusal({"bucket_cap_mb": 0}, ValueError, "got 0.", "must be positive"),
    Refusal({"bucket_cap_mb": -25}, ValueError, "got -25.", "must be positive"),
    Refusal({"bucket_cap_mb": "25"}, TypeError, "got '25'.", "must be a number"),
    Refusal(
        {"parallel_devices": [CPU, torch.device("cuda", 0)]}, ValueError, "cpu, cuda", "must be devices of one type"
    ),
    Refusal({"parallel_devices": ["cpu", "cpu"]}, TypeError, "['cpu', 'cpu']", "a list of torch.device"),
    Refusal({"parallel_devices": CPU}, TypeError, "device(type='cpu')", "a list of torch.device"),
    Refusal({"parallel_devices": 2}, TypeError, "got 2.", "a list of torch.device"),
    Refusal({"parallel_devices": [NO_GPU]}, ValueError, repr(NO_GPU), f"this host has {NO_GPU.index} GPUs"),
    Refusal({"parallel_devices": [torch.device("cuda", 0)] * 2}, ValueError, "index=0", "List each GPU once"),
    Refusal({"accelerator": "cpu"}, TypeError, "'cpu'", "must be a lightning.fabric.accelerators.Accelerator"),
    Refusal({"cluster_environment": "slurm"}, TypeError, "'slurm'", "environments.ClusterEnvironment"),
    Refusal({"checkpoint_io": "file"}, TypeError, "'file'", "io.CheckpointIO"),
    Refusal({"ddp_comm_hook": "fp16"}, TypeError, "'fp16'", "must be callable"),
    Refusal({"ddp_comm_hook": hook_without_bucket}, TypeError, "hook_without_bucket", HOOK_FORM),
    Refusal({"ddp_comm_hook": hook_with_other_names}, TypeError, "'gradients'", HOOK_FORM),
    Refusal({"ddp_comm_hook": hook_with_keywords}, TypeError, "called `bucket`", HOOK_FORM),
    Refusal({"ddp_comm_hook": hook_with_wrong_argument}, TypeError, "<class 'torch.Tensor'>", HOOK_FORM),
    Refusal({"ddp_comm_hook": hook_with_wrong_result}, TypeError, "<class 'torch.Tensor'>", HOOK_FORM),
    Refusal({"ddp_comm_hook": allreduce_hook, "ddp_comm_wrapper": 3}, TypeError, "got 3.", "must be callable"),
    Refusal(
        {"ddp_comm_hook": allreduce_hook, "ddp_comm_wrapper": wrapper_without_result},
        TypeError,
        "but returned None",
        "must return a communication hook",
    ),
    Refusal(
        {"ddp_comm_hook": allreduce_hook, "ddp_comm_wrapper": wrapper_with_wrong_result},
        TypeError,
        "hook_without_bucket",
        HOOK_FORM,
    ),
    Refusal({"ddp_comm_wrapper": fp16_compress_wrapper}, ValueError, "fp16_compress_wrapper", "`ddp_comm_hook`"),
    Refusal({"ddp_comm_state": "my state"}, ValueError, "'my state'", "`ddp_comm_hook`"),
]

FOR_THE_TRAINER = [
    Refusal({"precision_plugin": "16-mixed"}, TypeError, "'16-mixed'", "a Precision of lightning.pytorch"),
    Refusal(local_sgd(), ValueError, "PostLocalSGDState", "`model_averaging_period=4`", argument="ddp_comm_state"),
    Refusal({"model_averaging_period": 4}, ValueError, "=4` requires", "`ddp_comm_state` to be a PostLocalSGDState"),
    *(
        Refusal(local_sgd(model_averaging_period=period), ValueError, f"got {period!r}.", "must be a positive integer")
        for period in (0, -1, True, "4", 2.0)
    ),
]

FOR_FABRIC = [
    Refusal({"precision": "16-mixed"}, TypeError, "'16-mixed'", "a Precision of lightning.fabric"),
    Refusal({"model_averaging_period": 4}, TypeError, "Unknown", "DistributedDataParallel accepts"),
    # Fabric's optimizer step bypasses the strategy's averaging, so the models would differ from then on.
    Refusal(local_sgd(), ValueError, "PostLocalSGDState", "PeriodicModelAverager", argument="ddp_comm_state"),
]


@pytest.mark.parametrize("strategy_class", [DDPStrategy, FabricDDPStrategy], ids=["Trainer", "Fabric"])
@pytest.mark.parametrize("refusal", FOR_BOTH_FRONT_ENDS, ids=str)
def test_constructors_refuse(refusal: Refusal, strategy_class: type) -> None:
    refusal.check(strategy_class)


@pytest.mark.parametrize("refusal", FOR_THE_TRAINER, ids=str)
def test_the_trainers_constructor_refuses(refusal: Refusal) -> None:
    refusal.check(DDPStrategy)


@pytest.mark.parametrize("refusal", FOR_FABRIC, ids=str)
def test_fabrics_constructor_refuses(refusal: Refusal) -> None:
    refusal.check(FabricDDPStrategy)


# --- backends ---


@pytest.mark.parametrize("backend", ["nccl", "mpi", "ucc"])
def test_a_backend_that_torch_was_built_without_is_refused(backend: str) -> None:
    if getattr(dist, f"is_{backend}_available")():
        pytest.skip(f"this build of torch has {backend}")
    for strategy_class in (DDPStrategy, FabricDDPStrategy):
        Refusal(
            {"process_group_backend": backend}, RuntimeError, f"does not include {backend}", "Omit the argument"
        ).check(strategy_class)


def construct_with_a_backend_that_is_for_gpus(backend: str | None) -> list[str]:
    """Constructs both front ends for CPU processes; returns the messages. ``None`` registers a backend for GPUs."""
    if backend is None:
        backend = "gpuonly"
        dist.Backend.register_backend(backend, lambda *args: None, devices=["cuda"])
    messages = []
    with pytest.raises(ValueError) as caught:  # noqa: PT011 the caller reads the message
        make_trainer(DDPStrategy(process_group_backend=backend))
    messages.append(str(caught.value))
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Fabric(strategy=FabricDDPStrategy(process_group_backend=backend), accelerator="cpu", devices=2)
    return [*messages, str(caught.value)]


@pytest.mark.processes
@pytest.mark.parametrize("backend", [None, "nccl"], ids=["a registered one", "nccl"])
def test_a_backend_that_does_not_support_the_devices_is_refused_once_they_are_known(backend: str | None) -> None:
    if backend == "nccl" and not dist.is_nccl_available():
        pytest.skip("this build of torch has no NCCL")
    (messages,) = run_ranks(construct_with_a_backend_that_is_for_gpus, backend, world_size=1)
    for message in messages:
        assert f"`process_group_backend={backend or 'gpuonly'!r}` supports tensors on cuda" in message
        assert "of type 'cpu'" in message
        assert "Use `accelerator='cuda'` or another backend, such as 'gloo'" in message


def join_a_group_of_another_shape() -> str:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    environment = LightningEnvironment()
    environment.set_world_size(2)
    with pytest.raises(RuntimeError) as caught:
        process_group.start(environment, "gloo", CPU, None)
    return str(caught.value)


@pytest.mark.processes
def test_a_process_group_of_another_shape_is_refused() -> None:
    (message,) = run_ranks(join_a_group_of_another_shape, world_size=1)
    assert "rank 0 of 1" in message
    assert "rank 0 of 2" in message
    assert "Use the same number of devices and nodes as before" in message


@pytest.mark.parametrize("averaging", [{"compression": "localsgd"}, {"compression": "diloco"}])
@pytest.mark.parametrize("others", [{}, {"uneven_inputs": "stop"}, {"start_method": "spawn"}])
def test_elastic_model_averaging_is_refused_without_advice_that_is_refused_too(
    averaging: dict[str, Any], others: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"with `elastic=True`: .* Omit one of the two") as caught:
        DDPSpawnStrategy(elastic=True, **averaging, **others)
    assert "`compression=" in str(caught.value)
    assert "uneven_inputs" not in str(caught.value)


@pytest.mark.parametrize("strategy", ["ddp_ext", "ddp_spawn_ext"])
def test_a_batch_size_finder_is_refused_with_the_ways_to_find_a_size(strategy: str) -> None:
    alternatives = r"`BatchSizeFinder` .*`Trainer\(strategy='auto', devices=1\)`.*`strategy='dp_ext'`"
    with pytest.raises(MisconfigurationException, match=alternatives):
        make_trainer(strategy, callbacks=[BatchSizeFinder()]).fit(MLP(), loader())


def test_fabric_refuses_to_try_sizes_of_buckets() -> None:
    with pytest.raises(ValueError, match=r"`bucket_cap_mb='auto'`: only the Trainer's `fit` can search.*Pass a size"):
        FabricDDPStrategy(bucket_cap_mb="auto")


class Silent(MLP):
    """A model without logging: torch 2.13 cannot compile a step with ``self.log``, also on one device."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


class CompiledInHook(Silent):
    def configure_model(self):
        if not hasattr(self.net, "_orig_mod"):
            self.net = torch.compile(self.net, backend="eager")


@pytest.mark.processes
def test_a_compiled_module_is_refused_with_two_ways_out_which_train() -> None:
    with pytest.raises(TypeError, match=r"was made by `torch.compile`") as caught:
        make_trainer("ddp_spawn_ext").fit(torch.compile(Silent(), backend="eager"), loader())
    assert "Compile in `configure_model`" in str(caught.value)
    assert "`strategy='ddp_fork_ext'`" in str(caught.value)
    compiled = torch.compile(Silent(), backend="eager")
    for strategy, model in (("ddp_fork_ext", compiled), ("ddp_spawn_ext", CompiledInHook())):
        trainer = make_trainer(strategy, max_epochs=1, limit_train_batches=2)
        trainer.fit(model, loader())
        assert trainer.global_step == 2


@pytest.mark.processes  # HorovodStrategy imports Horovod
@pytest.mark.parametrize("stage", ["fit", "validate"])
@pytest.mark.parametrize(
    ("strategy", "alternative"),
    [(DataParallelStrategy, "Pass the module without `torch.compile`"), (HorovodStrategy, "Compile its submodules")],
)
def test_a_compiled_module_is_refused_by_the_strategy_with_a_way_out(strategy, alternative, stage) -> None:
    trainer = make_trainer(strategy(), devices=2)
    with pytest.raises(
        RuntimeError, match=rf"`{strategy.__name__}` .*torch.compile.*{alternative}.*`strategy='ddp_ext'`"
    ):
        getattr(trainer, stage)(torch.compile(Silent(), backend="eager"), loader())
    assert trainer.global_step == 0


# --- post-local SGD with an optimizer that distributes its work ---


class WithZeroRedundancyOptimizer(MLP):
    def configure_optimizers(self):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.SGD, lr=0.1)


def fit_with_averaging_of_a_distributed_optimizer() -> str:
    strategy = DDPStrategy(**local_sgd(model_averaging_period=4))
    with pytest.raises(ValueError, match="ZeroRedundancyOptimizer") as caught:
        make_trainer(strategy, devices=1).fit(WithZeroRedundancyOptimizer(), loader())
    return str(caught.value)


@pytest.mark.processes
def test_model_averaging_with_an_optimizer_that_distributes_its_own_work_is_refused() -> None:
    (message,) = run_ranks(fit_with_averaging_of_a_distributed_optimizer, world_size=1)
    assert "`model_averaging_period=4` cannot be combined with ZeroRedundancyOptimizer" in message
    assert "Use another optimizer" in message


# --- attributes that are read too early ---


@pytest.mark.parametrize(
    "make",
    [DDPStrategy, DataParallelStrategy, HorovodStrategy, FabricDataParallelStrategy, FabricHorovodStrategy],
    ids=lambda make: f"{make.__module__.split('.')[1]}.{make.__name__}",
)
def test_root_device_before_the_devices_are_known_is_an_error(make):
    with pytest.raises(RuntimeError, match=r"The devices are not known yet. Pass the strategy to (a Trainer|Fabric)"):
        _ = make().root_device


@pytest.mark.parametrize("name", ["ddp_ext", "ddp_spawn_elastic_ext", "horovod_ext"])
def test_outside_of_a_stage_a_loader_is_left_as_it_is(name):
    data = loader()
    assert make_trainer(name).strategy.process_dataloader(data) is data


def test_outside_of_a_stage_there_are_no_members_and_no_replicas():
    with pytest.raises(RuntimeError, match="`membership` is available only on the ranks of `fit`"):
        _ = make_trainer("ddp_spawn_elastic_ext").strategy.membership
    with pytest.raises(RuntimeError, match="`training_step` of the strategy runs on replicas"):
        make_trainer("dp_ext").strategy.training_step(None, 0)
