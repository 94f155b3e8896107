"""``ddp_spawn_ext`` evaluates and predicts like one process: all samples once, in order, over all ranks."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SubsetRandomSampler

from tests.support.ddp_spawn_trainers import seeded, spawn_trainer
from tests.support.models import MLP, assert_same_bits, dataset, loader, make_trainer, state_of

pytestmark = pytest.mark.processes


def test_validate_and_test_return_the_results_of_one_process(tmp_path):
    model = seeded()
    trainer = spawn_trainer()
    (validated,) = trainer.validate(model, loader(), verbose=False)
    (tested,) = trainer.test(model, loader(), verbose=False)
    alone = make_trainer("auto", devices=1)
    assert validated == pytest.approx(alone.validate(model, loader(), verbose=False)[0])
    assert tested == pytest.approx(alone.test(model, loader(), verbose=False)[0])
    assert trainer.callback_metrics["test_loss"].item() == pytest.approx(tested["test_loss"])


def test_weights_that_a_stage_loads_from_a_checkpoint_are_returned(tmp_path):
    trained = seeded()
    trainer = spawn_trainer(max_epochs=1)
    trainer.fit(trained, loader())
    trainer.save_checkpoint(tmp_path / "trained.ckpt")
    model = MLP()
    trainer.test(model, loader(), ckpt_path=tmp_path / "trained.ckpt", verbose=False)
    assert_same_bits(state_of(model), state_of(trained))


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("num_samples", [5, 12, 13])
def test_predictions_of_all_ranks_are_those_of_one_process(devices, num_samples):
    model = seeded()
    ext = spawn_trainer(devices=devices).predict(model, loader(num_samples))
    single = make_trainer("auto", devices=1).predict(model, loader(num_samples))
    assert [batch.shape for batch in ext] == [batch.shape for batch in single]
    for batch, expected in zip(ext, single, strict=True):
        torch.testing.assert_close(batch, expected)


class PredictsIndices(MLP):
    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return {"x": batch[0][:, 0].clone(), "names": [f"{value:.4f}" for value in batch[0][:, 0]], "none": None}


def first_feature(indices: Any) -> Tensor:
    return dataset().tensors[0][list(indices), 0]


def joined(predictions: list[Any]) -> Tensor:
    return torch.cat([batch["x"] for batch in predictions])


def test_samples_that_a_sampler_repeats_are_dropped():
    """torch's sampler makes all shards equal: 13 samples on 2 ranks become 14."""
    trainer = spawn_trainer(use_distributed_sampler=False)
    predictions = trainer.predict(PredictsIndices(), datamodule=DealsOut())
    assert torch.equal(joined(predictions), first_feature(range(13)))
    assert predictions[0]["names"] == [f"{value:.4f}" for value in first_feature(range(4))]
    assert predictions[0]["none"] is None


class DealsOut(pl.LightningDataModule):
    def predict_dataloader(self):
        data = first_samples(13).dataset
        return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))


def first_samples(num_samples: int) -> DataLoader:
    return DataLoader(torch.utils.data.Subset(dataset(), range(num_samples)), batch_size=4)


def test_every_rank_may_predict_all_samples():
    trainer = spawn_trainer(use_distributed_sampler=False)
    predictions = trainer.predict(PredictsIndices(), first_samples(13))
    assert torch.equal(joined(predictions), first_feature(range(13)))


def test_predictions_are_in_the_order_of_the_sampler():
    indices = [5, 3, 60, 1, 7, 9, 2]
    trainer = spawn_trainer()
    predictions = trainer.predict(PredictsIndices(), loader(sampler=OrderedSampler(indices), batch_size=3))
    assert torch.equal(joined(predictions), first_feature(indices))
    assert [len(batch["names"]) for batch in predictions] == [3, 3, 1]


class OrderedSampler(SubsetRandomSampler):
    def __iter__(self) -> Any:
        return iter(self.indices)


def test_several_dataloaders_and_a_limit():
    trainer = spawn_trainer(limit_predict_batches=2)
    first, second = trainer.predict(PredictsIndices(), [first_samples(13), first_samples(5)])
    assert torch.equal(joined(first), first_feature(range(13)))
    assert torch.equal(joined(second), first_feature(range(5)))
    (limited,) = (trainer.predict(PredictsIndices(), loader(64)),)
    assert torch.equal(joined(limited), first_feature(range(16)))


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return iter(
            [dataset()[index] for index in range(rank * 4, 24, world_size * 4) for index in range(index, index + 4)]
        )


def test_predictions_on_a_stream_are_returned_batch_by_batch():
    predictions = spawn_trainer().predict(PredictsIndices(), DataLoader(Stream(), batch_size=4))
    assert torch.equal(joined(predictions), first_feature(range(24)))


def test_predictions_are_not_returned_without_return_predictions():
    assert spawn_trainer().predict(MLP(), loader(), return_predictions=False) is None
