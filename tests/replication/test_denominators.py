"""The value of a batch equals the mean over its elements if autograd shows the denominators of the parts."""

import pytest
import torch
from torch.nn import functional

from lightning_strategies_ext.replication.denominators import Count, denominator_of
from lightning_strategies_ext.replication.gathering import value_of_batch

CPU = torch.device("cpu")
ROWS = torch.tensor([1.0, 3.0, 5.0, 2.0, 4.0, 8.0, 7.0, 6.0])
MASK = torch.tensor([True, True, False, False, False, False, True, True])  # two elements in each part
SPANS = [slice(0, 6), slice(6, 8)]
SIZES = [6, 2]

REDUCTIONS = {
    "selected": lambda x, mask: x[mask].mean(),
    "masked_select": lambda x, mask: x.masked_select(mask).mean(),
    "of one element": lambda x, mask: x[:, None][mask].mean(0),
    "of two dimensions": lambda x, mask: x[mask].mean()[None, None],
    "cloned": lambda x, mask: x[mask].mean().clone(),
    "divided": lambda x, mask: (x * mask).sum() / mask.sum(),
    "divided by a float": lambda x, mask: (x * mask).sum() / mask.float().sum(),
    "divided by a half": lambda x, mask: (x * mask).sum() / mask.sum().half(),
    "of squares": lambda x, mask: (x[mask] - 1).square().mean(),
    "a loss": lambda x, mask: functional.mse_loss(x[mask], torch.zeros(int(mask.sum()))),
}


@pytest.mark.parametrize("reduce", REDUCTIONS.values(), ids=REDUCTIONS.keys())
def test_equal_counts_in_parts_of_different_sizes_are_weights(reduce):
    rows = ROWS.clone().requires_grad_()
    values = [reduce(rows[span], MASK[span]) for span in SPANS]
    denominators = list(map(denominator_of, values))
    assert all(isinstance(denominator, Count) for denominator in denominators)
    value = value_of_batch(values, denominators, SIZES, CPU)
    torch.testing.assert_close(value, reduce(rows, MASK).reshape_as(value))


@pytest.mark.parametrize(
    "reduce",
    [
        lambda x: torch.stack([x.mean(), x.square().mean()]).mean(),
        lambda x: torch.stack([x, 2 * x], 1).mean(0).mean(),
        lambda x: torch.stack([x, 2 * x], 1).mean(0).sum() / 2,
        lambda x: torch.stack([x.mean(), 3 * x.mean(), x.square().mean()])[[0, 1]].mean(),
        lambda x: functional.smooth_l1_loss(torch.stack([x, 2 * x], 1).mean(0), torch.tensor([-9.0, -8.0])),
    ],
)
def test_constants_of_the_model_are_no_weights(reduce):
    rows = ROWS.clone().requires_grad_()
    values = [reduce(rows[span]) for span in SPANS]
    denominators = list(map(denominator_of, values))
    assert not any(isinstance(denominator, Count) for denominator in denominators)
    value = value_of_batch(values, denominators, SIZES, CPU)
    torch.testing.assert_close(value, reduce(rows))


def test_a_loss_of_the_mean_of_the_rows_is_weighted_by_samples():
    values = [functional.mse_loss(ROWS[span].clone().requires_grad_().mean(0), torch.tensor(1.0)) for span in SPANS]
    value = value_of_batch(values, list(map(denominator_of, values)), SIZES, CPU)
    torch.testing.assert_close(value, (6 * values[0] + 2 * values[1]) / 8)  # not linear: one device's value differs


def test_the_gradient_of_a_part_without_elements_is_zero():
    rows, mask = ROWS.clone().requires_grad_(), torch.arange(8) >= 6  # the first part has none
    values = [(rows[span] * mask[span]).sum() / mask[span].sum() for span in SPANS]
    counts = [mask[span].sum() for span in SPANS]  # as on a GPU, where reading them would synchronize
    value = value_of_batch(values, counts, SIZES, CPU)
    value.backward()
    assert value == 6.5
    assert rows.grad.equal(mask * 0.5)


def test_gradients_that_reach_the_sum_by_another_path_are_kept():
    rows = torch.tensor([1.0, 2.0], requires_grad=True)
    sums = [rows[0:1].sum(), rows[1:2].sum()]
    counts = [torch.tensor(0.0), torch.tensor(1.0)]
    values = [total / count for total, count in zip(sums, counts, strict=True)]
    value = value_of_batch(values, counts, [1, 1], CPU)
    (value + sums[0]).backward()
    assert rows.grad.tolist() == [1, 1]
