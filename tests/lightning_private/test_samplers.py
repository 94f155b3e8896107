"""Behavior of Lightning that :mod:`lightning_strategies_ext._lightning.samplers` requires."""

from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler, SubsetRandomSampler

from lightning_strategies_ext._lightning import samplers
from lightning_strategies_ext.collectives.sampler_order import SharedOrder


@pytest.mark.parametrize("kind", [DistributedSamplerWrapper, UnrepeatedDistributedSamplerWrapper])
def test_a_users_sampler_is_found_and_its_order_replaced(kind: type) -> None:
    users = SubsetRandomSampler(range(6), generator=torch.Generator().manual_seed(1))
    sampler = kind(users, num_replicas=2, rank=1, shuffle=False)
    loader = DataLoader(torch.arange(6), sampler=sampler)
    assert samplers.users_sampler(sampler) is users
    orders: list[SharedOrder] = []

    def share(found: object) -> SharedOrder:
        orders.append(SharedOrder(found, lambda obj: obj, epoch=0))
        return orders[-1]

    samplers.share_orders(loader, share)
    of_epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        of_epochs.append([*sampler])
        assert [*sampler] == of_epochs[-1] == orders[0]._order[1::2]
    assert of_epochs[0] != of_epochs[1]


def test_the_order_of_a_stage_is_that_of_rank_0_and_is_shared_at_once_in_predict() -> None:
    for is_predicting in (False, True):
        trainer = SimpleNamespace(current_epoch=0, predicting=is_predicting)
        sent: list[object] = []

        def broadcast(obj: object, sent: list[object] = sent) -> object:
            sent.append(obj)
            return torch.tensor([5, 4, 3, 2, 1, 0])

        wrapper = DistributedSamplerWrapper(SubsetRandomSampler(range(6)), num_replicas=2, rank=1, shuffle=False)
        samplers.share_orders_of_stage(DataLoader(torch.arange(6), sampler=wrapper), trainer, broadcast)
        assert len(sent) == int(is_predicting)
        assert [*wrapper] == [4, 2, 0]
        assert len(sent) == 1


def test_other_samplers_are_left_alone() -> None:
    data = torch.arange(6)
    for sampler in (
        SequentialSampler(data),
        DistributedSampler(data, 2, 0),
        UnrepeatedDistributedSamplerWrapper(SequentialSampler(data), 2, 0, shuffle=False),
    ):
        samplers.share_orders(DataLoader(data, sampler=sampler), lambda found: pytest.fail(f"{found} is replaced"))


@pytest.mark.parametrize("number", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("is_wrapper", [False, True])
def test_a_sampler_repeats_no_samples(number: int, is_wrapper: bool) -> None:
    found: list[int] = []
    for rank in range(3):
        data = torch.arange(number)
        sampler: DistributedSampler = (
            DistributedSamplerWrapper(SequentialSampler(data), num_replicas=3, rank=rank, shuffle=True)
            if is_wrapper
            else DistributedSampler(data, 3, rank)
        )
        samplers.repeat_no_samples(sampler)
        assert len(sampler) == len([*sampler])
        found += [*sampler]
    assert sorted(found) == [*range(number)]
