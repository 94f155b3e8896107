"""``horovod_ext`` writes the checkpoints of ``ddp_ext``, and supports callbacks and prediction."""

import tempfile
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn

from lightning_strategies_ext import HorovodStrategy
from tests.support.horovod_ranks import run_horovod
from tests.support.models import (
    LOADS_EVERYTHING,
    MLP,
    WithBatchNorm,
    assert_close,
    fit,
    loader,
    make_trainer,
    state_of,
    weights_after,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes


def half(strategy: str, directory: str) -> None:
    fit(strategy, callbacks=[ModelCheckpoint(directory, "half")], enable_checkpointing=True)


def resumed(strategy: str, directory: str) -> dict[str, torch.Tensor]:
    pl.seed_everything(11, verbose=False)  # also the seed of the sampler
    model = MLP()
    nn.init.zeros_(model.net[0].weight)
    trainer = make_trainer(strategy, max_epochs=4)
    trainer.fit(model, loader(), ckpt_path=f"{directory}/half.ckpt", **LOADS_EVERYTHING)
    return state_of(model)


class Buffers(WithBatchNorm):
    """A model that records its buffers in each validation step, and has a buffer that is not broadcast."""

    def __init__(self):
        super().__init__()
        self._ddp_params_and_buffers_to_ignore = ["own"]
        self.register_buffer("seen", torch.zeros(1, dtype=torch.bool))
        self.register_buffer("total", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("own", torch.zeros(1))
        self.found = []

    def training_step(self, batch, batch_idx):
        if self.global_rank == 0:
            self.seen.fill_(True)
        self.total += batch[0].double().sum()
        self.own += self.global_rank
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.found.append({name: buffer.clone() for name, buffer in self.named_buffers()})


class Cache(Buffers):
    """A model with a buffer of a different size on each rank."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", None)

    def training_step(self, batch, batch_idx):
        self.cache = torch.zeros(self.global_rank + 1)
        return super().training_step(batch, batch_idx)


def buffers(strategy: Any, make_model: Any = Buffers, **kwargs: Any) -> list[dict[str, torch.Tensor]]:
    """Returns the buffers of a rank in each validation step of ``fit``, and after a checkpoint."""
    pl.seed_everything(11, verbose=False)
    model, trainer = make_model(), make_trainer(strategy, val_check_interval=4, **kwargs)
    trainer.fit(model, loader(), loader(8))
    with tempfile.TemporaryDirectory() as directory:
        if trainer.is_global_zero:  # as with Lightning's strategy, this is not a collective
            trainer.strategy.save_checkpoint({}, f"{directory}/of_rank_0.ckpt")
        trainer.save_checkpoint(f"{directory}/a.ckpt")
    return [*model.found, {name: buffer.clone() for name, buffer in model.named_buffers()}]


def buffers_by_mode(strategy: str) -> dict[str, Any]:
    if strategy == "ddp_ext":
        return {"in each step": buffers(strategy), "accumulating": buffers(strategy, accumulate_grad_batches=3)}
    in_each_step = partial(HorovodStrategy, broadcast_buffers=True)
    return {
        "in each step": buffers(in_each_step()),
        "accumulating": buffers(in_each_step(), accumulate_grad_batches=3),
        "by default": buffers("horovod_ext"),
        "cache": buffers("horovod_ext", Cache),
    }


def test_broadcast_buffers_are_those_of_ddp_and_rank_0s_are_evaluated_and_saved():
    expected = run_ranks(buffers_by_mode, "ddp_ext")
    ext = run_horovod("horovodrun", buffers_by_mode, "horovod_ext")
    for name, stock in expected[0].items():  # on other ranks, DDP does not update the buffers of the last step
        for found, right in zip(ext[0][name], stock, strict=True):
            assert_close(found, right)
    for name in ext[0]:
        for zero, one in zip(ext[0][name], ext[1][name], strict=True):
            assert zero.pop("own") == 0 < one.pop("own")
            zero.pop("cache", None)
            one.pop("cache", None)
            assert_close(one, zero)


def whole_and_callbacks(directory: str, other: str) -> dict[str, Any]:
    half("horovod_ext", directory)
    found = {"resumed": resumed("horovod_ext", other), "whole": weights_after("horovod_ext", max_epochs=4)}
    stopped, _ = fit("horovod_ext", Worsens, max_epochs=9, callbacks=[EarlyStopping("worse")])
    found["stopped"] = stopped.current_epoch
    trainer = make_trainer("horovod_ext")
    found["predictions"] = len(trainer.predict(MLP(), loader(26)))
    found["test"] = trainer.test(MLP(), loader(26), verbose=False)
    return found


class Worsens(MLP):
    def on_train_epoch_end(self):
        self.log("worse", float(self.current_epoch))


def test_checkpoints_are_interchangeable_with_ddps(tmp_path):
    ext, stock = tmp_path / "horovod", tmp_path / "ddp"
    run_ranks(half, "ddp_ext", str(stock))
    ranks = run_horovod("horovodrun", whole_and_callbacks, str(ext), str(stock))
    for rank in ranks:
        assert_close(rank["resumed"], rank["whole"])
        assert rank["stopped"] == 4
        assert rank["predictions"] == 4
    assert [path.name for path in ext.iterdir()] == ["half.ckpt"]
    assert_close(run_ranks(resumed, "ddp_ext", str(ext))[0], ranks[0]["whole"])
