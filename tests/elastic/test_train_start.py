"""Workers that join a ``fit`` whose ``on_train_start`` hooks add a layer, and workers that leave it after a SIGTERM.

Each optimizer step subtracts exactly 1 from each trained element, on any number of ranks and as on one device. All
elements start at 0, so they end at minus the number of steps, unless one of them was created again or not restored.
"""

import json
import logging
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn

from lightning_strategies_ext import DDPSpawnElasticStrategy
from tests.support.models import fit

pytestmark = pytest.mark.processes


@dataclass
class Plan:
    """Events of a run.

    Attributes:
        directory: Directory for the marks and results of processes.
        signum: Signal that workers send to themselves, once, before step 3.
        ranks: Ranks of the workers that send the signal.
        worlds: Sizes of the worlds of a remaining worker, which stops in the last world.
        later_width: Outputs of the layer that is added after the signal.
    """

    directory: Path
    signum: int
    ranks: tuple[int, ...]
    worlds: tuple[int, ...] = (2, 1, 2)
    later_width: int = 1


class Extended(pl.LightningModule):
    """A model that adds a layer with its own parameter group in ``on_train_start``."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.net = self.make_layer(1)
        self.worlds: list[int] = []
        self.num_batches = self.num_batches_in_world = 0

    def make_layer(self, width: int) -> nn.Module:
        layer = nn.Linear(1, width)
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)
        return layer

    @property
    def mark(self) -> Path:
        return self.plan.directory / f"signal to rank {self.plan.ranks[0]}"

    def on_train_start(self) -> None:
        self.worlds.append(self.trainer.world_size)
        self.num_batches_in_world = 0
        self.extra = self.make_layer(self.plan.later_width if self.mark.exists() else 1)
        self.trainer.optimizers[0].add_param_group({"params": [*self.extra.parameters()], "lr": 1.0})

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        plan = self.plan
        mark = plan.directory / f"signal to rank {self.global_rank}"
        if self.trainer.global_step == 3 and self.global_rank in plan.ranks and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), plan.signum)
        if self.trainer.world_size == 1:
            time.sleep(0.02)
        return sum(parameter.sum() for parameter in self.parameters())

    def on_train_batch_end(self, *args: Any) -> None:
        self.num_batches += 1
        self.num_batches_in_world += 1
        size = self.plan.worlds[-1]
        is_last = self.mark.exists() and self.trainer.world_size == size
        if size == 1:  # a rank that joins later cannot count the worlds
            is_last = len(self.worlds) == len(self.plan.worlds)
        self.trainer.should_stop = is_last and self.num_batches_in_world == 3

    def on_train_end(self) -> None:
        values = torch.cat([parameter.detach().flatten() for parameter in self.parameters()]).unique()
        end = {
            "worlds": self.worlds,
            "steps": self.trainer.global_step,
            "batches": self.num_batches,
            "values": values.tolist(),
            "groups": [len(group["params"]) for group in self.trainer.optimizers[0].param_groups],
        }
        (self.plan.directory / f"end{self.global_rank}").write_text(json.dumps(end))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=1.0)


def run(plan: Plan, **arguments: Any) -> list[dict[str, Any]]:
    """Runs the plan, and returns the results of the ranks of the last world."""
    fit(DDPSpawnElasticStrategy(commit_every_n_steps=1, **arguments), lambda: Extended(plan), max_epochs=-1)
    ends = [json.loads(path.read_text()) for path in sorted(plan.directory.glob("end*"))]
    assert ends[0]["worlds"] == [*plan.worlds]
    for end in ends:
        assert end["steps"] == ends[0]["steps"] > 3
        assert end["values"] == [-end["steps"]]
        assert end["groups"] == [2, 2]
    return ends


@pytest.mark.parametrize(("signum", "rank"), [(signal.SIGKILL, 1), (signal.SIGTERM, 0)])
def test_a_worker_that_joins_has_the_state_of_a_layer_that_on_train_start_adds(
    tmp_path: Path, signum: int, rank: int
) -> None:
    remaining, joined = run(Plan(tmp_path, signum, (rank,)))
    assert joined["worlds"][-1] == 2
    assert joined["batches"] == 3
    if signum == signal.SIGTERM:
        assert remaining["batches"] == remaining["steps"]  # no step is repeated


def test_a_worker_that_adds_another_layer_cannot_join_and_the_other_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert len(run(Plan(tmp_path, signal.SIGKILL, (1,), worlds=(2, 1, 1), later_width=2))) == 1
    (message,) = [record.getMessage() for record in caplog.records if "cannot join" in record.getMessage()]
    assert "continue without worker 1, which is not restarted" in message
    assert "`extra.weight` has the shape (1, 1) in the commit, and has the shape (2, 1) on this rank" in message


def test_a_worker_that_leaves_after_a_sigterm_needs_no_restart_but_min_workers_do(tmp_path: Path) -> None:
    (remaining,) = run(Plan(tmp_path, signal.SIGTERM, (1,), worlds=(2, 1)), max_restarts=0)
    assert remaining["batches"] == remaining["steps"]
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(SIGTERMException):
        run(Plan(tmp_path, signal.SIGTERM, (1,)), max_restarts=0, min_workers=2)


def test_a_sigterm_to_each_worker_ends_fit(tmp_path: Path) -> None:
    with pytest.raises(SIGTERMException):
        run(Plan(tmp_path, signal.SIGTERM, (0, 1)))
    assert not [*tmp_path.glob("end*")]


class Unequal(Extended):
    """A model whose gradients differ between the ranks: 1 on rank 0, and 2 on rank 1."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (1 + self.global_rank) * sum(parameter.sum() for parameter in self.parameters())

    def on_train_batch_end(self, *args: Any) -> None:
        pass


def test_gradients_of_a_layer_added_in_on_train_start_are_averaged_from_step_one(tmp_path: Path) -> None:
    fit(DDPSpawnElasticStrategy(), lambda: Unequal(Plan(tmp_path, 0, (0,))), max_steps=4)
    ends = [json.loads(path.read_text()) for path in tmp_path.glob("end*")]
    assert [end["values"] for end in ends] == [[-4 * 1.5]] * 2
