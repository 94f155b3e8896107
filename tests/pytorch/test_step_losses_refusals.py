"""Refusals of a missing or nonfinite loss that is to be skipped: modules and arguments with which ranks cannot skip."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from lightning_strategies_ext import ChecksOptions, DDPSpawnStrategy, DDPStrategy
from tests.support.models import (
    MLP,
    loader,
    make_trainer,
)


class Manual(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class WithLBFGS(MLP):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Sparse(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2, 2, sparse=True)


@pytest.mark.parametrize(
    ("model_class", "text"),
    [
        (Manual, "`checks=ChecksOptions(missing_loss='skip')` requires automatic optimization, but Manual has"),
        (WithLBFGS, "cannot be combined with `torch.optim.LBFGS`"),
        (Sparse, "cannot be combined with sparse gradients"),
    ],
)
@pytest.mark.forked
def test_modules_that_cannot_skip_are_refused(model_class: type[MLP], text: str):
    strategy = DDPStrategy(checks=ChecksOptions(missing_loss="skip"))
    with pytest.raises(ValueError, match=re.escape(text)):
        make_trainer(strategy, devices=1).fit(model_class(), loader())


@pytest.mark.parametrize(
    "arguments",
    [
        {"compression": "localsgd"},
        {"static_graph": True},
        {"uneven_inputs": "join"},
        {"ddp_comm_hook": lambda state, bucket: None},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_arguments_with_which_ranks_cannot_skip_are_refused(arguments: dict[str, Any]):
    [name] = arguments
    for field in ("missing_loss", "nonfinite_loss"):
        with pytest.raises(
            ValueError, match=rf"`checks=ChecksOptions\({field}='skip'\)` .* with `{name}=.*Omit one of"
        ):
            DDPStrategy(checks=ChecksOptions(**{field: "skip"}), **arguments)
    DDPStrategy(checks=ChecksOptions(nonfinite_loss="error"), **arguments)


def test_elastic_training_refuses_both():
    with pytest.raises(ValueError, match="cannot be combined with `elastic=True`"):
        DDPSpawnStrategy(elastic=True, uneven_inputs="stop", checks=ChecksOptions(nonfinite_loss="error"))


def test_unknown_reactions_are_rejected():
    with pytest.raises(ValueError, match="`missing_loss='ignore'` is unknown"):
        ChecksOptions(missing_loss="ignore")
    with pytest.raises(ValueError, match="`nonfinite_loss='warn'` is unknown"):
        ChecksOptions(nonfinite_loss="warn")
