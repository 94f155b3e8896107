"""How the tests of ``horovod_ext`` train, and how they compare what comes of it."""

from typing import Any

import lightning.pytorch as pl
import torch

from tests.support.models import MLP, fit, state_of


def train(strategy: Any, make_model: Any = MLP, **kwargs: Any) -> tuple[pl.Trainer, pl.LightningModule]:
    return fit(strategy, make_model, **kwargs)


def weights_after(strategy: Any, make_model: Any = MLP, **kwargs: Any) -> dict[str, torch.Tensor]:
    return state_of(train(strategy, make_model, **kwargs)[1])


def assert_close(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=tolerance, atol=tolerance, msg=f"{name} differs")
