""":mod:`lightning_strategies_ext.collectives.local`: a rank without peers waits for no rank."""

import pytest
import torch

from lightning_strategies_ext.collectives import LocalCollectives

ALONE = LocalCollectives(rank=1, world_size=3)
VALUES = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int16, torch.bool, torch.complex64])
def test_all_gather_has_an_entry_per_rank_with_the_value_of_this_rank(dtype):
    tensor = VALUES.to(dtype)
    gathered = ALONE.all_gather(tensor.mT)
    assert (gathered.shape, gathered.dtype) == ((3, 2, 2), dtype)
    assert all(torch.equal(of_rank, tensor.mT) for of_rank in gathered)
    assert ALONE.all_gather(torch.empty(0, 2)).shape == (3, 0, 2)
    assert ALONE.all_gather(torch.tensor(7)).tolist() == [7, 7, 7]


def test_a_started_gather_has_the_value_of_this_rank_in_all_entries():
    output = torch.empty(6)
    ALONE.start_all_gather(output, torch.tensor([1.0, 2.0]), "values")()
    assert output.tolist() == [1.0, 2.0] * 3


def test_a_metric_is_of_this_ranks_data():
    (only,) = ALONE.gather_list(VALUES.clone().requires_grad_())
    assert torch.equal(only, VALUES)
    assert not only.requires_grad


def test_the_gradient_of_all_gather_is_that_of_the_entry_of_this_rank():
    tensor = VALUES.clone().requires_grad_()
    weights = torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1)
    (ALONE.all_gather(tensor, sync_grads=True) * weights).sum().backward()
    assert torch.equal(tensor.grad, torch.full((2, 2), 10.0))


@pytest.mark.parametrize("reduce_op", ["mean", "sum", "max", None])
def test_reductions_are_of_this_rank(reduce_op):
    assert torch.equal(ALONE.reduce(VALUES.clone(), reduce_op=reduce_op), VALUES)
    assert ALONE.reduce("no tensor", reduce_op=reduce_op) == "no tensor"


def test_objects_and_decisions_are_those_of_this_rank():
    assert ALONE.broadcast({"best": 3}, src=0) == {"best": 3}
    assert [ALONE.reduce_boolean_decision(decision, all=False) for decision in (True, False)] == [True, False]
    assert (ALONE.rank(), ALONE.world_size()) == (1, 3)


def test_sums_broadcasts_and_barriers_neither_wait_nor_change_tensors():
    tensor, module = VALUES.clone(), torch.nn.Linear(2, 2)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    ALONE.start_sum(tensor, "gradients")()
    ALONE.start_all_reduce(tensor, "max", "values")()
    ALONE.broadcast_tensors([tensor], src=0)
    ALONE.broadcast_module(module)
    ALONE.barrier("end")
    assert torch.equal(tensor, VALUES)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
