"""After an exception that the script catches on all ranks, the ranks can train another model."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.support.horovod_ranks import run_horovod
from tests.support.models import MLP, loader, make_trainer
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes


class PrunedError(Exception):
    """An exception that ends a trial of a search."""


class Pruned(MLP):
    """A model that ends its training on one rank, while the other rank waits in a collective."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_rank == self.rank and self.trainer.global_step == 2:
            raise PrunedError("not promising")


def train_trials(strategy: str) -> list[Any]:
    ended: list[Any] = []
    for rank in (0, 1, -1):
        pl.seed_everything(rank + 5, verbose=False)
        model, trainer = Pruned(rank), make_trainer(strategy, max_epochs=1)
        try:
            trainer.fit(model, loader())
        except Exception as exception:
            ended.append(type(exception).__name__)
    ended.append(trainer.global_step)
    return [*ended, torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()]


def check(ranks: list[list[Any]]) -> None:
    first, second = ranks
    assert first[:2] == ["PrunedError", "RankFailedError"]
    assert second[:2] == ["RankFailedError", "PrunedError"]
    assert first[2] == 8  # all steps of the last trial
    assert first[2:] == second[2:]


def test_ranks_of_ddp_ext_train_again_after_one_of_them_has_raised() -> None:
    check(run_ranks(train_trials, "ddp_ext"))


@pytest.mark.parametrize("launcher", ["python", "horovodrun"])
def test_ranks_of_horovod_ext_train_again_after_one_of_them_has_raised(launcher: str) -> None:
    check(run_horovod(launcher, train_trials, "horovod_ext"))
