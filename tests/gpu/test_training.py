"""``ddp_ext`` on GPUs: results are bitwise identical to Lightning's ``ddp``, with options of the Trainer and DDP."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.utils.data import DistributedSampler

from lightning_strategies_ext import DDPStrategy, DiLoCo, LocalSGD, PowerSGD, TopK
from tests.gpu.devices import ACCELERATOR, ON_CPU, Ranks, cuda_only, run_main, two_gpus
from tests.support.models import (
    LOADS_EVERYTHING,
    MLP,
    TwoOptimizers,
    WithBatchNorm,
    WithUnusedParameters,
    assert_same_bits,
    dataset,
    fit,
    loader,
    make_trainer,
    state_of,
)
from tests.support.ranks import run_script

pytestmark = pytest.mark.processes

#: Makes torch deterministic; for cuBLAS see `devices.py`.
REPEATABLE = {"deterministic": True}


def train_with_both(where: dict[str, Any], make_model: type[MLP], variant: str, kwargs: dict[str, Any]) -> Any:
    stock = fit(f"ddp{variant}", make_model, **REPEATABLE, **where, **kwargs)
    # If gradients are views into buckets, the last bit of their norm differs, also with Lightning's strategy.
    as_stock = DDPStrategy(gradient_as_bucket_view=False)
    strategy = as_stock if "gradient_clip_val" in kwargs else f"ddp_ext{variant}"
    ext = fit(strategy, make_model, **REPEATABLE, **where, **kwargs)
    assert ext[0].global_step == stock[0].global_step > 0
    return state_of(ext[1]), state_of(stock[1])


@pytest.mark.parametrize(
    ("make_model", "variant", "kwargs"),
    [
        (MLP, "", {}),
        (MLP, "", {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}),
        (MLP, "", {"precision": "bf16-mixed"}),
        (WithBatchNorm, "", {}),
        (WithUnusedParameters, "_find_unused_parameters_true", {}),
        (TwoOptimizers, "_find_unused_parameters_true", {}),
    ],
    ids=["plain", "accumulated and clipped", "bf16", "batch norm", "unused parameters", "two optimizers"],
)
def test_the_weights_have_the_bits_of_stock(
    ranks: Ranks, make_model: type[MLP], variant: str, kwargs: dict[str, Any]
) -> None:
    for ext, stock in ranks.run(train_with_both, make_model, variant, kwargs):
        assert_same_bits(ext, stock)


# --- 16-mixed: the gradient scaler ---

OVERFLOWING = 3


class Overflowing(MLP):
    """A net with infinite gradients of one batch on rank 0. It records the scale and weights after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[float] = []
        self.weights: list[torch.Tensor] = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == OVERFLOWING and self.trainer.is_global_zero else loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())
        self.weights.append(self.net[0].weight.detach().cpu().clone())


def overflow_with_both(where: dict[str, Any]) -> list[tuple[Any, ...]]:
    def precision() -> MixedPrecision:
        # Torch's initial scale, 65536, may be too large for this model.
        return MixedPrecision("16-mixed", "cuda", torch.amp.GradScaler("cuda", init_scale=1024))

    trained = [
        fit(name, Overflowing, plugins=[precision()], max_epochs=1, **REPEATABLE, **where)[1]
        for name in ("ddp_ext", "ddp")
    ]
    return [(state_of(model), model.scales, model.weights) for model in trained]


@cuda_only
def test_an_overflow_on_one_rank_halves_the_scale_and_skips_the_step_on_all_ranks(ranks: Ranks) -> None:
    for (ext, scales, weights), (stock, stock_scales, _) in ranks.run(overflow_with_both):
        steps = len(weights)
        assert scales == [1024.0] * OVERFLOWING + [512.0] * (steps - OVERFLOWING) == stock_scales
        unchanged = [step for step in range(1, steps) if torch.equal(weights[step], weights[step - 1])]
        assert unchanged == [OVERFLOWING]
        assert_same_bits(ext, stock)


# --- communication hooks ---


def fp16() -> dict[str, Any]:
    return {"ddp_comm_hook": default_hooks.fp16_compress_hook}


def bf16() -> dict[str, Any]:
    return {"ddp_comm_hook": default_hooks.bf16_compress_hook}


def power_sgd() -> dict[str, Any]:
    state = PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=3)
    return {"ddp_comm_state": state, "ddp_comm_hook": powerSGD_hook}


def power_sgd_in_fp16() -> dict[str, Any]:
    return {**power_sgd(), "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper}


def train_with_hook(where: dict[str, Any], hook: Callable[[], dict[str, Any]]) -> list[Any]:
    plain, stock = fit("ddp", **REPEATABLE, **where), fit(LightningDDPStrategy(**hook()), **REPEATABLE, **where)
    ext = fit(DDPStrategy(**hook()), **REPEATABLE, **where)
    return [state_of(model) for _, model in (ext, stock, plain)]


@cuda_only  # Lightning's strategy registers hooks on CUDA only
@pytest.mark.parametrize("hook", [fp16, bf16, power_sgd, power_sgd_in_fp16])
def test_a_communication_hook_has_the_effect_that_it_has_with_stock(
    ranks: Ranks, hook: Callable[[], dict[str, Any]]
) -> None:
    for ext, stock, plain in ranks.run(train_with_hook, hook):
        assert_same_bits(ext, stock)
        assert any(not torch.equal(tensor, plain[name]) for name, tensor in ext.items()), "the hook had no effect"


def train_compressed(where: dict[str, Any], compression: Any) -> dict[str, Tensor]:
    _, model = fit(DDPStrategy(compression=compression), **REPEATABLE, **where)
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("compression", ["bf16", "fp16", PowerSGD(2, 1), TopK(0.1, 1), LocalSGD(3), DiLoCo(3)], ids=str)
def test_ranks_whose_exchange_is_compressed_end_with_one_model(ranks: Ranks, compression: Any) -> None:
    first, *others = ranks.run(train_compressed, compression)
    assert all(tensor.isfinite().all() for tensor in first.values())
    for other in others:
        assert_same_bits(first, other)


# --- SyncBatchNorm ---


def train_with_sync_batchnorm(where: dict[str, Any]) -> tuple[Any, Any]:
    """Trains on one rank; returns its results, and the results of one process with the global batches."""
    pl.seed_everything(11, verbose=False)
    ext, whole = WithBatchNorm(), WithBatchNorm()
    whole.load_state_dict(ext.state_dict())
    # With an explicit sampler, because Lightning's sampler would shuffle.
    trainer = make_trainer("ddp_ext", sync_batchnorm=not ON_CPU, use_distributed_sampler=False, **where)
    in_order = DistributedSampler(dataset(), trainer.world_size, trainer.global_rank, shuffle=False)
    trainer.fit(ext, loader(sampler=in_order))
    device = trainer.strategy.root_device
    whole.to(device)
    optimizer = whole.configure_optimizers()
    for _ in range(2):
        for batch in loader(batch_size=4 * trainer.world_size):
            optimizer.zero_grad()
            whole.loss([tensor.to(device) for tensor in batch]).backward()
            optimizer.step()
    return state_of(ext), state_of(whole.cpu())


def test_sync_batchnorm_has_the_statistics_and_gradients_of_the_whole_batch(ranks: Ranks) -> None:
    if ON_CPU and ranks.world_size > 1:
        pytest.skip("LSE_GPU_TESTS_ON=cpu: torch has no SyncBatchNorm for CPUs, and results with BatchNorm differ")
    for ext, whole in ranks.run(train_with_sync_batchnorm):
        assert ext.keys() == whole.keys()  # BatchNorm again, instead of SyncBatchNorm
        for name, tensor in whole.items():
            torch.testing.assert_close(ext[name], tensor, rtol=1e-4, atol=1e-5)


# --- checkpoints ---


def save(where: dict[str, Any], path: Path) -> dict[str, torch.Tensor]:
    trainer, model = fit("ddp_ext", **where)
    trainer.save_checkpoint(path)
    return state_of(model)


def resume(where: dict[str, Any], path: Path) -> tuple[dict[str, torch.Tensor], int, set[str]]:
    restored = MLP.load_from_checkpoint(path, map_location="cpu")
    model = MLP()
    trainer = make_trainer("ddp_ext", max_epochs=3, **where)
    trainer.fit(model, loader(), ckpt_path=path, **LOADS_EVERYTHING)
    states = trainer.optimizers[0].state.values()
    return state_of(restored), trainer.global_step, {state["momentum_buffer"].device.type for state in states}


def test_training_continues_on_a_cpu_from_a_checkpoint_of_a_gpu(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    saved = ranks.run(save, path)[0]
    steps = 3 * len(loader())
    loaded, global_step, devices = run_main(on_cpu, 1, path)
    assert_same_bits(loaded, saved)
    assert global_step == 2 * steps // 3 // ranks.world_size + steps // 3
    assert devices == {"cpu"}


def on_cpu(where: dict[str, Any], path: Path) -> Any:
    return resume({**where, "accelerator": "cpu"}, path)


# --- started as by users ---

SCRIPT = """
import os, sys
import lightning_strategies_ext
from tests.support.models import fit

if __name__ == "__main__":
    trainer, model = fit("ddp_ext", devices=int(sys.argv[1]), accelerator=sys.argv[2])
    total = sum(parameter.sum().item() for parameter in model.parameters())
    os.write(1, f"rank {trainer.global_rank} on {trainer.strategy.root_device}: {total!r}\\n".encode())
"""


@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=two_gpus)])
def test_a_script_starts_a_process_per_gpu(num_devices: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = run_script(script, str(num_devices), ACCELERATOR)
    assert result.returncode == 0, result.stdout
    lines = dict(line.split(": ") for line in result.stdout.splitlines() if line.startswith("rank "))
    devices = ["cpu"] * num_devices if ON_CPU else [f"cuda:{rank}" for rank in range(num_devices)]
    assert lines.keys() == {f"rank {rank} on {device}" for rank, device in enumerate(devices)}
    assert len(set(lines.values())) == 1
