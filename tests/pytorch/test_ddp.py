"""What ``ddp_ext`` promises beside equal weights: its arguments, its life over several stages."""

import pickle
import time
import warnings
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
from lightning.fabric.strategies import DDPStrategy as LightningFabricDDPStrategy
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins import MixedPrecision, TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.strategies import ParallelStrategy as LightningParallelStrategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_strategies_ext import DDPSpawnStrategy, DDPStrategy, ParallelStrategy, ShmOptions
from lightning_strategies_ext.fabric.ddp import DDPStrategy as FabricDDPStrategy
from lightning_strategies_ext.registry import STRATEGIES
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
from tests.support.ranks import REPOSITORY, outcomes_of_ranks, run_ranks, run_warm

START_METHODS = {row.name: row.init_params["start_method"] for row in STRATEGIES if "ddp" in row.name}
POPEN_NAMES = [name for name, start_method in START_METHODS.items() if start_method == "popen"]
FORK_NAMES = [name for name, start_method in START_METHODS.items() if start_method == "fork"]


@pytest.mark.forked
def test_it_is_a_lightning_ddp_strategy():
    strategy = make_trainer("ddp_ext", devices=1).strategy
    for kind in (DDPStrategy, ParallelStrategy, LightningDDPStrategy, LightningParallelStrategy):
        assert isinstance(strategy, kind)
    assert isinstance(Fabric(strategy="ddp_ext", devices=1, accelerator="cpu").strategy, LightningFabricDDPStrategy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert strategy.is_distributed


# --- several stages of one Trainer ---


def run_all_stages() -> dict[str, Any]:
    trainer, model = fit("ddp_ext", max_epochs=1)
    seen: dict[str, Any] = {"fitted": state_of(model), "wrapped": isinstance(trainer.strategy.model, MLP)}
    seen["validated"] = trainer.validate(model, loader(), verbose=False)
    seen["tested"] = trainer.test(model, loader(), verbose=False)
    seen["predicted"] = len(trainer.predict(model, loader()))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader())
    seen["steps"] = trainer.global_step
    seen["refitted"] = state_of(model)
    trainer.strategy.teardown()
    trainer.strategy.teardown()
    second = make_trainer("ddp_ext", max_epochs=1)  # another Trainer of the same script, in the same process group
    second.fit(model, loader())
    return seen


def test_one_trainer_runs_fit_validate_test_predict_and_fit_again():
    first, second = run_ranks(run_all_stages)
    for seen in (first, second):
        assert seen["wrapped"], "the model was left inside DDP"
        assert seen["predicted"] == 8
        assert seen["steps"] == 16
    assert first["validated"] == second["validated"]
    assert first["tested"] == second["tested"]
    assert_same_bits(first["refitted"], second["refitted"])


def weights_of_rank_zero_when_not_training() -> list[float]:
    torch.manual_seed(int(__import__("os").environ["LOCAL_RANK"]))
    model = MLP()
    make_trainer("ddp_ext").validate(model, loader(), verbose=False)
    return model.net[0].weight.flatten().tolist()


def test_evaluation_without_training_uses_the_weights_of_the_first_rank_everywhere():
    first, second = run_ranks(weights_of_rank_zero_when_not_training)
    assert first == second


class FailsIn(MLP):
    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    def prepare_data(self):
        self.fail("prepare_data")

    def setup(self, stage):
        self.fail("setup")

    def fail(self, hook: str) -> None:
        if hook == self.hook:
            raise KeyError(hook)


def fail_then_train(hook: str) -> tuple[list[str], dict]:
    torn_down = []

    class Strategy(DDPStrategy):
        def teardown(self):
            torn_down.append("teardown")
            super().teardown()

    with pytest.raises(KeyError, match=hook):
        make_trainer(Strategy()).fit(FailsIn(hook), loader())
    return torn_down, state_of(fit("ddp_ext")[1])


@pytest.mark.parametrize("hook", ["setup"])
def test_an_exception_before_setup_tears_down_and_leaves_the_process_usable(hook):
    first, second = run_ranks(fail_then_train, hook)
    assert first[0] == second[0] == ["teardown"]
    assert_same_bits(first[1], second[1])


@pytest.mark.forked
def test_a_strategy_can_be_pickled():
    strategy = make_trainer("ddp_ext", devices=1).strategy
    assert pickle.loads(pickle.dumps(strategy)).num_processes == 1


# --- names ---


def train_named(name: str) -> dict:
    return state_of(fit(name, max_epochs=1)[1])


@pytest.mark.parametrize("name", POPEN_NAMES)
def test_every_popen_name_trains(name):
    first, second = run_ranks(train_named, name)
    assert_same_bits(first, second)


SCRIPT = """
import sys, torch
from lightning.fabric import Fabric
from tests.support.models import fit, state_of

def ranks(fabric):
    return fabric.all_reduce(torch.tensor(float(fabric.global_rank)), reduce_op="sum").item()

if __name__ == "__main__":
    trainer, model = fit(sys.argv[1], max_epochs=1)
    print("loss", trainer.callback_metrics["loss"].item(), "at", trainer.world_size)
    print("sum", Fabric(strategy=sys.argv[1], devices=2, accelerator="cpu").launch(ranks))
"""


@pytest.mark.parametrize("name", [name for name in FORK_NAMES if not name.endswith("false")])
def test_every_fork_name_trains_under_both_front_ends(name, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = run_warm(script, name)
    assert result.returncode == 0, result.stdout
    assert "at 2" in result.stdout
    assert "sum 1.0" in result.stdout


def test_the_example_trains_and_leaves_a_checkpoint(tmp_path):
    result = run_warm(REPOSITORY / "examples/digits.py", "--dir", tmp_path, "--epochs", "6", env={"COLUMNS": "120"})
    assert result.returncode == 0, result.stdout
    [row] = [line for line in result.stdout.splitlines() if "held-out images" in line]
    assert float(row.split("│")[2]) >= 0.97
    assert (tmp_path / "digits.ckpt").is_file()
    assert "destroy" not in result.stdout, "noise about the process group"


@pytest.mark.parametrize("strategy_class", [DDPStrategy, DDPSpawnStrategy, FabricDDPStrategy])
def test_the_classes_register_their_own_names_and_no_other(strategy_class):
    strategies = type(pl.strategies.StrategyRegistry)()
    strategy_class.register_strategies(strategies)
    in_scripts = set(POPEN_NAMES)
    in_workers = START_METHODS.keys() - in_scripts
    names = {DDPStrategy: in_scripts, DDPSpawnStrategy: in_workers, FabricDDPStrategy: in_scripts | in_workers}
    assert set(strategies) == names[strategy_class]
    assert all(type(strategies.get(name)) is strategy_class for name in strategies)


# --- arguments ---


def train_with(**arguments: Any) -> dict:
    return state_of(fit(DDPStrategy(**arguments), max_epochs=1)[1])


class NotingCheckpointIO(TorchCheckpointIO):
    def __init__(self) -> None:
        self.saved: list[str] = []

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.saved.append(Path(path).name)
        super().save_checkpoint(checkpoint, path, storage_options)


def train_with_plugins(directory: Path, gives_devices: bool) -> dict[str, Any]:
    environment, checkpoint_io = LightningEnvironment(), NotingCheckpointIO()
    precision = MixedPrecision("bf16-mixed", "cpu")
    # Lightning's Trainer takes an accelerator or CPU devices from a strategy, not both.
    accelerator, devices = (None, [torch.device("cpu")] * 2) if gives_devices else (CPUAccelerator(), None)
    # By position, in the order of Lightning's own DDPStrategy.
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


@pytest.mark.parametrize("kind", ["fp16", "bf16", "wrapper", "state"])
def test_a_communication_hook_exchanges_the_gradients_on_cpu_too(kind):
    outcomes = run_ranks(compressed_and_not, kind)
    for compressed, exact in outcomes:
        assert any(not torch.equal(compressed[name], exact[name]) for name in exact), "the hook did nothing"
        for name in exact:
            torch.testing.assert_close(compressed[name], exact[name], atol=0.05, rtol=0.05)
    assert_same_bits(outcomes[0][0], outcomes[1][0])


class NoteWeights(pl.Callback):
    def __init__(self) -> None:
        self.weights: list[list[float]] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.weights.append(module.net[0].weight.flatten().tolist())


def train_locally() -> list[list[float]]:
    """Gradients are exchanged for two steps, then not at all; models are averaged every third step."""
    note = NoteWeights()
    state = post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=2, post_local_gradient_allreduce=False)
    strategy = DDPStrategy(
        ddp_comm_state=state, ddp_comm_hook=post_localSGD_hook.post_localSGD_hook, model_averaging_period=3
    )
    fit(strategy, callbacks=[note], max_epochs=1)
    return note.weights


def test_post_local_sgd_lets_models_drift_apart_and_averages_them_by_its_period():
    first, second = run_ranks(train_locally)
    agree = [a == b for a, b in zip(first, second, strict=True)]
    # Averaged after the third and the sixth step: two warm-up steps, then every third one.
    assert agree == [True, True, True, False, False, True, False, False]


def train_within_the_host() -> list[list[float]]:
    note = NoteWeights()
    state = post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=0)  # groups: not said
    fit(
        DDPStrategy(
            ddp_comm_state=state, ddp_comm_hook=post_localSGD_hook.post_localSGD_hook, model_averaging_period=4
        ),
        callbacks=[note],
        max_epochs=1,
    )
    return note.weights


def test_post_local_sgd_exchanges_gradients_within_the_host_when_no_group_is_given():
    first, second = run_ranks(train_within_the_host)
    assert first == second


def time_out() -> float:
    strategy = make_trainer(DDPStrategy(timeout=timedelta(seconds=2))).strategy
    strategy.setup_environment()
    start = time.monotonic()
    if strategy.global_rank == 0:
        with pytest.raises(RuntimeError, match="barrier nobody comes failed"):
            strategy.barrier("nobody comes")
    else:
        while time.monotonic() - start < 4:
            pass
    return time.monotonic() - start


def test_timeout_bounds_a_collective():
    assert 1 < run_ranks(time_out)[0] < 4


def look_at_process_group() -> tuple[str | None, str, float]:
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


@pytest.mark.parametrize("make_strategy", [DDPStrategy, FabricDDPStrategy])
def test_cpu_ranks_of_one_host_share_memory_by_default_and_options_reach_it(make_strategy):
    outcomes = outcomes_of_ranks(take_too_much_memory, make_strategy)
    assert [outcome.value for outcome in outcomes] == [("shm", 6.0)] * 2
    assert "the process group talks over gloo, since rank 0 finds no room" in outcomes[0].output


def test_process_group_backend_is_used():
    assert run_ranks(look_at_process_group) == [("cpu:gloo", "cpu:gloo", 3.0)] * 2


class Look(pl.Callback):
    """Notes DDP's settings and the collectives that one forward pass runs."""

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


def look_at_ddp() -> list[Any]:
    seen = []
    for model, arguments in (
        (MLP, {}),
        (MLP, {"gradient_as_bucket_view": False, "find_unused_parameters": True}),
        (WithBatchNorm, {"static_graph": True}),
    ):
        look = Look()
        fit(DDPStrategy(**arguments), model, callbacks=[look], max_epochs=1)
        seen.append((look.settings, look.collectives, len(set(look.gradients))))
    return seen


def test_defaults_keep_gradients_once_and_broadcast_no_buffer_that_is_not_there():
    plain, chosen, with_buffers = run_ranks(look_at_ddp)[0]
    assert plain == ((True, False, False), [], 1), "gradients lie in one bucket"
    assert chosen == ((False, True, False), [], 4), "the user's own choice holds"
    assert with_buffers[0] == (True, False, True)


def fit_often(name: str, model: type[MLP]) -> None:
    for _ in range(3):
        fit(name, model, max_epochs=1)


@pytest.mark.parametrize(
    ("name", "model", "times"),
    [
        ("ddp_ext_find_unused_parameters_true", MLP, 1),
        ("ddp_ext_find_unused_parameters_true", WithUnusedParameters, 0),  # its graph is not static
        ("ddp_ext", MLP, 0),  # nothing to gain
    ],
)
def test_static_graph_is_advised_once_where_it_helps(name, model, times):
    first, second = outcomes_of_ranks(fit_often, name, model)
    assert first.error is None
    assert first.output.count("static_graph=True") == times
    assert "static_graph" not in second.output


# --- collectives through the strategy and the module ---


def use_collectives() -> None:
    class Module(MLP):
        def on_train_start(self):
            rank = self.trainer.global_rank
            gathered = self.all_gather({"a": torch.tensor([float(rank)]), "b": rank})
            assert gathered["a"].tolist() == [[0.0], [1.0]]
            assert gathered["b"].tolist() == [0, 1]
            strategy = self.trainer.strategy
            assert strategy.reduce(torch.tensor(rank + 1), reduce_op="sum").item() == 3
            assert strategy.broadcast(f"from {rank}", src=1) == "from 1"
            assert strategy.reduce_boolean_decision(rank == 0) is False
            assert strategy.reduce_boolean_decision(rank == 0, all=False) is True
            assert strategy.is_global_zero == (rank == 0)
            strategy.barrier("a name")

    fit("ddp_ext", Module, max_epochs=1)


def test_collectives_of_the_strategy_and_of_the_module():
    run_ranks(use_collectives)


def gradients_with_and_without_sync() -> list[bool]:
    """Whether both ranks have equal gradients: after a blocked backward pass, and after the one that follows."""
    agree = []

    class Module(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            strategy = self.trainer.strategy
            with strategy.block_backward_sync():
                self.manual_backward(self.loss(batch))
            agree.append(self.same_gradients())
            self.manual_backward(self.loss(batch))
            agree.append(self.same_gradients())

        def same_gradients(self) -> bool:
            gathered = self.trainer.strategy.all_gather(self.net[0].weight.grad)
            return torch.equal(gathered[0], gathered[1])

    fit("ddp_ext", Module, max_epochs=1, limit_train_batches=1)
    return agree


def test_block_backward_sync_keeps_gradients_local():
    assert run_ranks(gradients_with_and_without_sync) == [[False, True]] * 2


def join_a_group_of_another_shape() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    make_trainer("ddp_ext").fit(MLP(), loader())


def test_a_process_group_of_another_shape_is_refused():
    for outcome in outcomes_of_ranks(join_a_group_of_another_shape):
        assert "is rank 0 of 1 in a process group" in outcome.error


def train_with_sync_batchnorm_on_cpu() -> None:
    make_trainer("ddp_ext", sync_batchnorm=True).fit(WithBatchNorm(), loader())


def test_sync_batchnorm_on_cpu_is_refused_before_anything_starts():
    for outcome in outcomes_of_ranks(train_with_sync_batchnorm_on_cpu):
        assert "`sync_batchnorm=True` needs GPUs" in outcome.error
