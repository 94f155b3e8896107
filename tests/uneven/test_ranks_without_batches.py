"""Validation during ``fit`` in which a rank has no batches, without ``exact_evaluation``."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_strategies_ext import DDPStrategy
from tests.support.models import MLP, assert_same_bits, make_trainer, state_of
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes

#: Numbers of validation batches of each rank, by DataLoader.
NUM_BATCHES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((3,), (3,)),
    ((0,), (3,)),
    ((3,), (0,)),
    ((0,), (0,)),
    ((0, 2), (2, 1)),
    ((2, 0), (0, 0)),
]


class Stream(IterableDataset):
    """Batches of one rank, of which no length is known."""

    def __init__(self, num_batches: int, rank: int) -> None:
        self.num_batches = num_batches
        self.rank = rank

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.rank)
        for _ in range(self.num_batches):
            yield torch.randn(4, 8, generator=generator), torch.randint(3, (4,), generator=generator)


class Normalized(MLP):
    """A model whose buffers differ between ranks after each training step."""

    def __init__(self, num_batches: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        super().__init__()
        self.num_batches = num_batches
        self.num_steps = 0
        self.evaluated: list[Tensor] = []

    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Stream(6, self.trainer.global_rank), batch_size=None)

    def val_dataloader(self) -> list[DataLoader]:
        rank = self.trainer.global_rank
        return [DataLoader(Stream(number, rank), batch_size=None) for number in self.num_batches[rank]]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.num_steps += 1
        self.loss(batch)

    def on_validation_epoch_end(self) -> None:
        assert isinstance(self.net, nn.Sequential)
        assert isinstance(self.net[1], nn.BatchNorm1d)
        assert self.net[1].running_mean is not None
        self.evaluated.append(self.net[1].running_mean.clone())


def train(arguments: dict[str, Any]) -> list[tuple[int, dict[str, Tensor], list[Tensor]]]:
    results = []
    for num_batches in NUM_BATCHES:
        seed_everything(11, verbose=False)
        model = Normalized(num_batches)
        settings = {"use_distributed_sampler": False, "num_sanity_val_steps": 1, "val_check_interval": 3}
        make_trainer(DDPStrategy(**arguments), max_epochs=2, **settings).fit(model)
        results.append((model.num_steps, state_of(model), model.evaluated))
    return results


@pytest.mark.parametrize(
    "arguments",
    [{}, {"find_unused_parameters": True}, {"process_group_backend": "gloo"}],
    ids=["over_shm", "by_the_reducer", "over_gloo"],
)
def test_it_takes_part_in_the_broadcast_of_buffers(arguments: dict[str, Any]) -> None:
    results = run_ranks(train, arguments)
    _, state, evaluated = results[0][0]
    assert len(evaluated) == 1 + 2 * 2  # the sanity check, and two validations per epoch
    for rank, results_of_rank in enumerate(results):
        for num_batches, result in zip(NUM_BATCHES, results_of_rank, strict=True):
            assert result[0] == sum(min(number, 1) + 4 * number for number in num_batches[rank])
            assert_same_bits(result[1], state)
            torch.testing.assert_close(result[2], evaluated, rtol=0, atol=0)
