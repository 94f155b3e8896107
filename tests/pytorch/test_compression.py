"""``compression=...`` in training: compared with torch's hooks and with one process, and after failures."""

import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
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
