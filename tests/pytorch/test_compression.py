"""``compression=...`` in training: compared with torch's hooks and with one process, in checkpoints, after failures."""

import os
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import DataLoader

from lightning_strategies_ext import Compression, DDPStrategy, DiLoCo, LocalSGD, PowerSGD, RankFailedError, TopK
from lightning_strategies_ext.torch_distributed.compression import host_groups
from tests.support.models import (
    LOADS_EVERYTHING,
    MLP,
    NUM_CLASSES,
    NUM_FEATURES,
    TwoOptimizers,
    assert_same_bits,
    dataset,
    loader,
    make_trainer,
    state_of,
)
from tests.support.ranks import outcomes_of_ranks, run_ranks

try:
    from lightning.pytorch.callbacks import EMAWeightAveraging
except ImportError:  # before Lightning 2.6
    EMAWeightAveraging = None

NUM_STEPS = 16  # in two epochs
BATCH_SIZE = 4
WITH_STATE = {
    "powersgd": PowerSGD(rank=2, warmup_steps=3),
    "topk": TopK(fraction=0.05, warmup_steps=3),
    "localsgd": LocalSGD(period=3),
    "diloco": DiLoCo(period=3, warmup_steps=2),
}


class Wide(MLP):
    """A model with a large matrix and running means, which records the validated state."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[dict[str, Tensor]] = []

    def make_net(self) -> nn.Module:
        layers = [nn.Linear(NUM_FEATURES, 48, bias=False), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(48, NUM_CLASSES))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(state_of(self))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def batches_of(rank: int, size: int = 2) -> Any:
    """Returns the batches of a rank in an epoch."""
    samples = torch.utils.data.Subset(dataset(), range(rank, len(dataset()), size))
    return DataLoader(samples, batch_size=BATCH_SIZE)


def train(model: pl.LightningModule, compression: Any, ckpt_path: Path | None = None, **arguments: Any) -> dict:
    trainer = make_trainer(DDPStrategy(compression=compression), use_distributed_sampler=False, **arguments)
    resumed = {} if ckpt_path is None else {"ckpt_path": ckpt_path, **LOADS_EVERYTHING}
    trainer.fit(model, batches_of(trainer.global_rank, trainer.world_size), loader(batch_size=BATCH_SIZE), **resumed)
    assert trainer.global_step == NUM_STEPS
    if trainer.checkpoint_callback is not None:
        trainer.save_checkpoint(Path(trainer.checkpoint_callback.dirpath, "after.ckpt"))
    return state_of(model)


def seeded(kind: type[pl.LightningModule]) -> Any:
    pl.seed_everything(5, verbose=False)
    return kind()


# --- compared with torch's hooks ---


def train_with_casts() -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {}
    arguments = {"accumulate_grad_batches": 2}
    for name in ("bf16", "fp16"):
        hook = getattr(default_hooks, f"{name}_compress_hook")
        found[name] = []
        for strategy in (f"ddp_ext_{name}", DDPStrategy(ddp_comm_hook=hook), "ddp_ext"):
            model = seeded(Wide)
            make_trainer(strategy, **arguments).fit(model, loader(batch_size=BATCH_SIZE))
            found[name].append(state_of(model))
    return found


@pytest.mark.processes
def test_casts_are_those_of_torch() -> None:
    for found in run_ranks(train_with_casts):
        for name, (ext, of_torch, uncompressed) in found.items():
            if name == "bf16":
                assert_same_bits(ext, of_torch)
            else:  # torch divides rounded values; this package rounds divided values
                for key, tensor in ext.items():
                    torch.testing.assert_close(tensor, of_torch[key], rtol=1e-3, atol=1e-5)
            assert any(not torch.equal(ext[name], uncompressed[name]) for name in ext)


# --- compared with one process ---


def train_apart(period: int, outer: Any, per_host: int, decay: float | None = None) -> dict[str, Tensor]:
    """Trains the models of two hosts in one process, each with its optimizer, and averages them periodically.

    Args:
        period: Number of steps between two averages of the models.
        outer: Function that creates the outer optimizer; None if the models are set to their average.
        per_host: Number of ranks per host, which exchange gradients in each step.
        decay: Decay of a moving average of each model; the mean of the moving averages is returned.
    """
    size = 2 * per_host
    common = seeded(MLP)
    models = [deepcopy(common) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    outer_optimizer = None if outer is None else outer(common.parameters())
    batches = [list(batches_of(rank, size)) for rank in range(size)]
    averages = [] if decay is None else [AveragedModel(model, avg_fn=get_ema_avg_fn(decay)) for model in models]
    for step in range(NUM_STEPS):
        for host, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            for rank in range(host * per_host, (host + 1) * per_host):
                (model.loss(batches[rank][step % len(batches[rank])]) / per_host).backward()
            optimizer.step()
        is_due, is_last = (step + 1) % period == 0, step == NUM_STEPS - 1
        if is_due or is_last:
            with torch.no_grad():
                for whole, *parts in zip(common.parameters(), *(model.parameters() for model in models), strict=True):
                    mean = sum(part * 0.5 for part in parts)
                    whole.grad = whole - mean
                    if outer_optimizer is None or not is_due:
                        whole.copy_(mean)
            if outer_optimizer is not None and is_due:
                outer_optimizer.step()
            for model in models:
                model.load_state_dict(common.state_dict())
        for average, model in zip(averages, models, strict=bool(averages)):
            average.update_parameters(model)
    if averages:
        states = [state_of(average.module) for average in averages]
        return {name: (states[0][name] + states[1][name]) * 0.5 for name in states[0]}
    return state_of(common)


@pytest.mark.processes
@pytest.mark.parametrize("per_host", [1, 2])
@pytest.mark.parametrize(
    ("compression", "outer"),
    [
        (LocalSGD(period=5), None),
        (DiLoCo(period=5), lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.5, nesterov=True)),
    ],
    ids=["localsgd", "diloco"],
)
def test_models_apart_are_those_of_one_process(compression: Compression, outer: Any, per_host: int) -> None:
    expected = train_apart(5, outer, per_host)
    for found in run_ranks(train_mlp, compression, per_host, world_size=2 * per_host):
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def train_mlp(compression: Compression, per_host: int, decay: float | None = None) -> dict:
    host_groups.host_identity = lambda: f"host {int(os.environ['LOCAL_RANK']) // per_host}"
    size = {"devices": 2 * per_host, "max_epochs": 2 * per_host}
    callbacks = [] if decay is None else [EMAWeightAveraging(decay=decay)]
    return train(seeded(MLP), compression, limit_val_batches=0, callbacks=callbacks, **size)


# --- checkpoints ---


def train_and_resume(directory: Path) -> dict[str, Any]:
    found = {}
    for name, compression in WITH_STATE.items():
        results = []
        for directory_of_run, ckpt_path in (
            (directory / name, None),
            (directory / f"{name} resumed", directory / name / "epoch=0.ckpt"),
        ):
            saves = ModelCheckpoint(directory_of_run, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
            arguments = {"callbacks": [saves], "enable_checkpointing": True, "limit_val_batches": 0}
            results.append(train(seeded(Wide), compression, ckpt_path, **arguments))
        found[name] = results
    return found


@pytest.mark.processes
def test_a_resumed_run_has_the_weights_of_an_uninterrupted_run(tmp_path: Path) -> None:
    first, second = run_ranks(train_and_resume, tmp_path)
    for name, (whole, resumed) in first.items():
        # The last bits of MKL's products may depend on a matrix's alignment in memory, which differs after a restart.
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if name == "powersgd" else {"rtol": 0, "atol": 0}
        for key, tensor in whole.items():
            torch.testing.assert_close(resumed[key], tensor, **tolerance)
        others = second[name][1]
        # In each forward pass, all ranks have rank 0's buffers. After it, buffers differ, unless models are averaged.
        compared = whole.keys() if name in ("localsgd", "diloco") else dict(Wide().named_parameters())
        assert_same_bits({key: resumed[key] for key in compared}, {key: others[key] for key in compared})
        saved = torch.load(tmp_path / name / "epoch=1.ckpt", weights_only=False)
        assert_same_bits(saved["state_dict"], whole)
        after = torch.load(tmp_path / name / "after.ckpt", weights_only=False)
        [saved_states], [states_after] = saved["optimizer_states"], after["optimizer_states"]
        assert saved_states.keys() == states_after.keys() > {"state", "param_groups"}
        assert numbers_in(saved_states) == pytest.approx(numbers_in(states_after), abs=1e-6)
    # Trainings with a different compression, or without, can load the checkpoint, also on one device.
    run_ranks(train_with_another, tmp_path)
    trainer = make_trainer("auto", devices=1, max_epochs=2)
    trainer.fit(seeded(Wide), loader(), ckpt_path=tmp_path / "powersgd" / "epoch=0.ckpt", **LOADS_EVERYTHING)
    assert trainer.global_step == NUM_STEPS // 2 + 16


def train_with_another(directory: Path) -> list[int]:
    pairs = [("powersgd", "localsgd"), ("topk", "powersgd"), ("localsgd", "diloco"), ("diloco", "topk")]
    return [
        len(train(seeded(Wide), WITH_STATE[other], directory / name / "epoch=0.ckpt", limit_val_batches=0))
        for name, other in pairs
    ]


def numbers_in(state: Any) -> list[float]:
    """Returns all numbers, and the sums of all tensors, in nested containers."""
    if isinstance(state, dict):
        return [number for part in state.values() for number in numbers_in(part)]
    if isinstance(state, list | tuple):
        return [number for part in state for number in numbers_in(part)]
    return (
        [float(state.sum())] if isinstance(state, Tensor) else [float(state)] if isinstance(state, int | float) else []
    )


def validate_apart() -> tuple[list[dict], dict, bool]:
    model = seeded(Wide)
    state = train(model, LocalSGD(period=100), val_check_interval=5)
    return model.validated, state, "torch.distributed.optim" in sys.modules


@pytest.mark.processes
def test_ranks_validate_one_model_and_end_with_one() -> None:
    (first, end, is_imported), (second, other_end, _) = run_ranks(validate_apart)
    assert not is_imported  # it compiles TorchScript, which the tests do not need
    assert len(first) == len(second) > 2
    for one, another in zip(first, second, strict=True):
        assert_same_bits(one, another)
    assert_same_bits(end, other_end)


class KeepsAverage(Wide):
    """A model that updates an average of its last layer, outside of the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.net[-1]).requires_grad_(False)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.average.update_parameters(self.net[-1])


class AveragesAtTheEnd(pl.Callback):
    """A callback that writes an average of its tensors to the module, after the last averaging of models."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.sums = self.sums or [torch.zeros_like(parameter) for parameter in module.parameters()]
        for total, parameter in zip(self.sums, module.parameters(), strict=True):
            total.add_(parameter.detach())

    def on_train_end(self, trainer: Any, module: Any) -> None:
        for parameter, total in zip(module.parameters(), self.sums, strict=True):
            parameter.data.copy_(total / trainer.global_step)


class RecordsCheckpoints(pl.Callback):
    def __init__(self) -> None:
        self.saved: dict[str, Tensor] = {}

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        of_callbacks = [each.get("average_model_state", {}) for each in checkpoint["callbacks"].values()]
        for part, state in enumerate([checkpoint["state_dict"], *of_callbacks]):
            for name, value in state.items():
                self.saved[f"{trainer.global_step} {part} {name}"] = value.detach().clone()


def train_with_averages(directory: Path) -> dict[str, dict]:
    found = {}
    for compression in (LocalSGD(period=3), DiLoCo(period=4, warmup_steps=2)):
        for name, make in {
            **({} if EMAWeightAveraging is None else {"ema": lambda: EMAWeightAveraging(decay=0.9)}),
            "swa": lambda: StochasticWeightAveraging(0.05, 1, 1),
            "own": AveragesAtTheEnd,
        }.items():
            model, callback, seen = seeded(KeepsAverage), make(), RecordsCheckpoints()
            saves = ModelCheckpoint(directory / f"{compression.name} {name}", save_last=True, save_top_k=0)
            trainer = make_trainer(
                DDPStrategy(compression=compression),
                callbacks=[callback, seen, saves],
                enable_checkpointing=True,
                val_check_interval=5,
                use_distributed_sampler=False,
                max_epochs=3,
            )
            trainer.fit(model, batches_of(trainer.global_rank), loader(batch_size=BATCH_SIZE))
            average = getattr(callback, "_average_model", None)
            found[f"{compression.name} {name}"] = {
                "module": state_of(model),
                "average": {} if average is None else state_of(average),
                "optimizer": dict(enumerate(trainer.optimizers[0].state_dict()["state"][0].values())),
                "validated": {
                    f"{i} {key}": each for i, seen in enumerate(model.validated) for key, each in seen.items()
                },
                "saved": seen.saved,
            }
    return found


@pytest.mark.processes
def test_ranks_end_with_one_average(tmp_path: Path) -> None:
    first, second = run_ranks(train_with_averages, tmp_path)
    different = [
        f"{case}: {part} {key}"
        for case, parts in first.items()
        for part, tensors in parts.items()
        for key, tensor in tensors.items()
        if not torch.equal(tensor, second[case][part][key])
    ]
    assert different == []


@pytest.mark.processes
@pytest.mark.skipif(EMAWeightAveraging is None, reason="this Lightning has no weight averaging callback (2.6 has)")
def test_an_average_is_the_mean_of_those_of_the_ranks() -> None:
    expected = train_apart(5, None, 1, decay=0.9)
    for found in run_ranks(train_mlp, LocalSGD(period=5), 1, 0.9):
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def train_alone() -> tuple[dict, dict]:
    found = []
    for strategy in ("ddp_ext", "ddp_ext_powersgd"):
        model = seeded(Wide)
        make_trainer(strategy, devices=1, max_epochs=1).fit(model, loader())
        found.append(state_of(model))
    return found[0], found[1]


@pytest.mark.processes
def test_one_rank_trains_bitwise_as_without_compression() -> None:
    [(plain, compressed)] = run_ranks(train_alone, world_size=1)
    assert_same_bits(plain, compressed)


# --- two optimizers, workers, failures ---


def train_two_optimizers() -> dict:
    model = seeded(TwoOptimizers)
    strategy = DDPStrategy(compression=LocalSGD(period=3, warmup_steps=2), find_unused_parameters=True)
    make_trainer(strategy).fit(model, loader())
    return state_of(model)


@pytest.mark.processes
def test_manual_optimization_with_two_optimizers_ends_with_one_model() -> None:
    first, second = run_ranks(train_two_optimizers)
    assert_same_bits(first, second)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["topk", "diloco"])
def test_workers_return_the_model_and_the_state_to_save(name: str, tmp_path: Path) -> None:
    model = seeded(Wide)
    before = state_of(model)
    trainer = make_trainer(f"ddp_spawn_ext_{name}")
    trainer.fit(model, loader())
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    [state] = torch.load(tmp_path / "after.ckpt", weights_only=False)["optimizer_states"]
    assert state["lightning_strategies_ext.compression"]["num_steps"] in (NUM_STEPS, [NUM_STEPS])
    assert not torch.equal(model.net[3].weight, before["net.3.weight"])


class FailsOnRank1(Wide):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_rank == 1 and self.trainer.global_step == 4:
            raise ValueError("rank 1 has had enough")
        return super().training_step(batch, batch_idx)


def fail(compression: Compression) -> None:
    train(seeded(FailsOnRank1), compression)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["powersgd", "localsgd"])
def test_a_rank_that_waits_for_a_failing_rank_gets_its_error(name: str) -> None:
    first, second = outcomes_of_ranks(fail, WITH_STATE[name])
    assert "rank 1 has had enough" in second.error
    assert RankFailedError.__name__ in first.error
    assert "rank 1 has had enough" in first.error


KEY = "lightning_strategies_ext.compression"


class RestoresEarly(pl.Callback):
    """A callback that restores a state before DDP is created, as in elastic training, and records the new state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        trainer.strategy.load_optimizer_state_dict({"optimizer_states": [{KEY: self.state}]})

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.restored = trainer.strategy.optimizer_state(trainer.optimizers[0])[KEY]


def restore_before_wrapping() -> list[list[float]]:
    compression = WITH_STATE["topk"]
    trainer = make_trainer(DDPStrategy(compression=compression), devices=2, max_epochs=1)
    trainer.fit(seeded(Wide), loader())
    state = trainer.strategy.optimizer_state(trainer.optimizers[0])[KEY]
    restores = RestoresEarly(state)
    trainer = make_trainer(DDPStrategy(compression=compression), devices=2, max_steps=1, callbacks=[restores])
    trainer.fit(seeded(Wide), loader())
    return [numbers_in(state), numbers_in(restores.restored)]


@pytest.mark.processes
def test_state_is_restored_before_the_model_is_wrapped() -> None:
    for state, restored in run_ranks(restore_before_wrapping):
        assert any(state[1:])
        assert restored == pytest.approx(state, abs=1e-6)
