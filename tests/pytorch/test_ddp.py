"""``ddp_ext``, in addition to equal weights: several stages of a Trainer, registered names, and collectives."""

import pickle
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy as LightningFabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.strategies import ParallelStrategy as LightningParallelStrategy

from lightning_strategies_ext import (
    DDPElasticStrategy,
    DDPRayStrategy,
    DDPSpawnElasticStrategy,
    DDPSpawnStrategy,
    DDPStrategy,
    ParallelStrategy,
)
from lightning_strategies_ext.fabric.ddp import DDPStrategy as FabricDDPStrategy
from lightning_strategies_ext.registry import FABRIC, STRATEGIES
from tests.support.examples import EXAMPLE_ENVIRONMENT
from tests.support.models import (
    MLP,
    WithBatchNorm,
    assert_same_bits,
    fit,
    loader,
    make_trainer,
    state_of,
)
from tests.support.ranks import REPOSITORY, outcomes_of_ranks, run_ranks, run_script

START_METHODS = {row.name: row.init_params["start_method"] for row in STRATEGIES if "start_method" in row.init_params}
POPEN_NAMES = [name for name, start_method in START_METHODS.items() if start_method == "popen"]
FORK_NAMES = [name for name, start_method in START_METHODS.items() if start_method == "fork"]


@pytest.mark.forked
def test_the_strategy_is_a_ddp_strategy_of_lightning():
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


@pytest.mark.processes
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


@pytest.mark.processes
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


@pytest.mark.processes
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


def train_named(names: list[str]) -> dict[str, dict]:
    return {name: state_of(fit(name, max_epochs=1)[1]) for name in names}


@pytest.mark.processes
def test_every_popen_name_trains():
    first, second = run_ranks(train_named, POPEN_NAMES)
    for name in POPEN_NAMES:
        assert_same_bits(first[name], second[name])


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


@pytest.mark.processes
@pytest.mark.parametrize("name", [name for name in FORK_NAMES if not name.endswith("false")])
def test_every_fork_name_trains_under_both_front_ends(name, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = run_script(script, name)
    assert result.returncode == 0, result.stdout
    assert "at 2" in result.stdout
    assert "sum 1.0" in result.stdout


@pytest.mark.processes
def test_the_example_trains_and_leaves_a_checkpoint(tmp_path):
    result = run_script(REPOSITORY / "examples/digits.py", "--dir", tmp_path, "--epochs", "6", env=EXAMPLE_ENVIRONMENT)
    assert result.returncode == 0, result.stdout
    [row] = [line for line in result.stdout.splitlines() if "held-out images" in line]
    assert float(row.split("│")[2]) >= 0.97
    assert (tmp_path / "digits.ckpt").is_file()
    assert "destroy" not in result.stdout, "noise about the process group"


@pytest.mark.parametrize(
    "strategy_class",
    [DDPStrategy, DDPSpawnStrategy, DDPSpawnElasticStrategy, DDPElasticStrategy, DDPRayStrategy, FabricDDPStrategy],
)
def test_the_classes_register_their_own_names_and_no_other(strategy_class):
    strategies = type(pl.strategies.StrategyRegistry)()
    strategy_class.register_strategies(strategies)
    in_scripts = set(POPEN_NAMES)
    elastic = {"ddp_spawn_elastic_ext"}
    restarted = {"ddp_elastic_ext"}
    in_workers = START_METHODS.keys() - in_scripts - elastic
    names = {
        DDPStrategy: in_scripts,
        DDPSpawnStrategy: in_workers,
        DDPSpawnElasticStrategy: elastic,
        DDPElasticStrategy: restarted,
        DDPRayStrategy: {"ddp_ray_ext"},
        FabricDDPStrategy: {row.name for row in STRATEGIES if row.name in START_METHODS and FABRIC in row.classes},
    }
    assert set(strategies) == names[strategy_class]
    assert all(entry["strategy"] is strategy_class for entry in strategies.values())


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


@pytest.mark.processes
def test_collectives_of_the_strategy_and_of_the_module():
    run_ranks(use_collectives)


def gradients_with_and_without_sync() -> list[bool]:
    """Returns whether ranks have equal gradients after a blocked backward pass, and after the next backward pass."""
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


@pytest.mark.processes
def test_block_backward_sync_keeps_gradients_local():
    assert run_ranks(gradients_with_and_without_sync) == [[False, True]] * 2


def join_a_group_of_another_shape() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    make_trainer("ddp_ext").fit(MLP(), loader())


@pytest.mark.processes
def test_a_process_group_of_another_shape_is_refused():
    for outcome in outcomes_of_ranks(join_a_group_of_another_shape):
        assert "is rank 0 of 1 in a process group" in outcome.error


def train_with_sync_batchnorm_on_cpu() -> None:
    make_trainer("ddp_ext", sync_batchnorm=True).fit(WithBatchNorm(), loader())


@pytest.mark.processes
def test_sync_batchnorm_on_cpu_is_refused_on_every_rank():
    for outcome in outcomes_of_ranks(train_with_sync_batchnorm_on_cpu):
        assert "`sync_batchnorm=True` requires GPUs" in outcome.error
