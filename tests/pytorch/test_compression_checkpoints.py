"""Compressed exchanges between stages: checkpoints, averages of the model, and the state to restore."""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from lightning_strategies_ext import DDPStrategy, DiLoCo, LocalSGD
from tests.pytorch.test_compression import (
    BATCH_SIZE,
    NUM_STEPS,
    WITH_STATE,
    EMAWeightAveraging,
    Wide,
    batches_of,
    seeded,
    train,
    train_apart,
    train_mlp,
)
from tests.support.models import (
    LOADS_EVERYTHING,
    assert_same_bits,
    loader,
    make_trainer,
    state_of,
)
from tests.support.ranks import run_ranks


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
