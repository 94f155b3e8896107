"""LBFGS evaluates its closure equally often on all ranks, with the results of one process on the whole batch."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.support.horovod_ranks import run_horovod
from tests.support.models import make_trainer
from tests.support.ranks import run_ranks

NUM_STEPS = 3


class Regression(pl.LightningModule):
    """A model that fits weights with LBFGS to data that differ between ranks."""

    def __init__(self, line_search: str | None, is_manual: bool) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        self.line_search = line_search
        self.automatic_optimization = not is_manual
        self.num_evaluations: list[int] = []
        self.losses: list[float] = []

    def loss(self, batch: Any) -> torch.Tensor:
        self.num_evaluations[-1] += 1
        return (self.net(batch[0]) - batch[1]).square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.num_evaluations.append(0)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        if self.automatic_optimization:
            loss = self.loss(batch)
            self.log("loss", loss)
            return loss
        optimizer = self.optimizers()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)
        return None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.automatic_optimization:
            self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=12, line_search_fn=self.line_search)


def data(rank: int | None) -> DataLoader:
    """Returns the batches of one of two ranks, or the batches of one process."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(NUM_STEPS, 2, 8, 4, generator=generator, dtype=torch.float64)
    targets = inputs.sum(dim=-1, keepdim=True).sin() * torch.tensor([1.0, -4.0]).view(1, 2, 1, 1)
    chosen = [each.reshape(NUM_STEPS, 16, -1) if rank is None else each[:, rank] for each in (inputs, targets)]
    return DataLoader(TensorDataset(*chosen), batch_size=None)


def train(strategy: str, devices: int) -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    for line_search in ("strong_wolfe", None):
        for is_manual in (False, True):
            trainer = make_trainer(strategy, devices=devices, max_epochs=1, use_distributed_sampler=False)
            model = Regression(line_search, is_manual)
            trainer.fit(model, data(None if devices == 1 else trainer.global_rank))
            weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            outcome[f"{line_search}, {is_manual}"] = (model.num_evaluations, weights, model.losses)
    return outcome


def assert_trained_alike(ranks: list[dict[str, Any]]) -> None:
    expected = train("auto", 1)
    for case, (num_evaluations, weights, losses) in expected.items():
        for outcome in ranks:
            assert outcome[case][0] == num_evaluations, case
            assert max(num_evaluations) > 2
            torch.testing.assert_close(outcome[case][1], weights, msg=case)
        means = [sum(each) / 2 for each in zip(*(outcome[case][2] for outcome in ranks), strict=True)]
        assert means == pytest.approx(losses), case
        if losses:
            assert ranks[0][case][2] != ranks[1][case][2]  # each rank logs its own values


@pytest.mark.processes
def test_ranks_of_ddp_train_as_one_process_with_the_whole_batch() -> None:
    assert_trained_alike(run_ranks(train, "ddp_ext", 2))


@pytest.mark.processes
def test_ranks_of_horovod_train_as_one_process_with_the_whole_batch() -> None:
    pytest.importorskip("horovod")
    assert_trained_alike(run_horovod("horovodrun", train, "horovod_ext", 2))
