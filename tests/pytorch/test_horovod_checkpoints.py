"""Under ``horovod_ext`` checkpoints are those of ``ddp_ext``, and callbacks and prediction work."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn

from tests.support.horovod_ranks import run_horovod
from tests.support.models import LOADS_EVERYTHING, MLP, assert_close, fit, loader, make_trainer, state_of, weights_after
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes


def half(strategy: str, directory: str) -> None:
    fit(strategy, callbacks=[ModelCheckpoint(directory, "half")], enable_checkpointing=True)


def resumed(strategy: str, directory: str) -> dict[str, torch.Tensor]:
    pl.seed_everything(11, verbose=False)  # which is also that of the sampler
    model = MLP()
    nn.init.zeros_(model.net[0].weight)
    trainer = make_trainer(strategy, max_epochs=4)
    trainer.fit(model, loader(), ckpt_path=f"{directory}/half.ckpt", **LOADS_EVERYTHING)
    return state_of(model)


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
    ours, theirs = tmp_path / "horovod", tmp_path / "ddp"
    run_ranks(half, "ddp_ext", str(theirs))
    ranks = run_horovod("horovodrun", whole_and_callbacks, str(ours), str(theirs))
    for rank in ranks:
        assert_close(rank["resumed"], rank["whole"])
        assert rank["stopped"] == 4
        assert rank["predictions"] == 4
    assert [path.name for path in ours.iterdir()] == ["half.ckpt"]
    assert_close(run_ranks(resumed, "ddp_ext", str(ours))[0], ranks[0]["whole"])
