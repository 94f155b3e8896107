"""The bucket search: tried sizes, their duration, and the choice, with a simulated clock and without ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_strategies_ext.collectives import LocalCollectives
from lightning_strategies_ext.torch_distributed import bucket_search
from lightning_strategies_ext.torch_distributed.bucket_search import BucketChoice, BucketSearch, BucketTuning, caps_for
from lightning_strategies_ext.torch_distributed.feature import FeatureContext
from lightning_strategies_ext.torch_distributed.gradient_sync import GradientSyncOptions

MIB = 2**20


@pytest.mark.parametrize(
    ("num_bytes", "caps"),
    [
        (10, [None]),
        (MIB, [None]),
        (MIB + 4, [None, 1, 4]),
        (10 * MIB, [None, 1, 4, 16]),
        (100 * MIB, [None, 1, 4, 16, 64, 256]),
        (1000 * MIB, [None, 1, 4, 16, 64, 256]),
    ],
)
def test_sizes_are_tried_up_to_one_bucket_for_all(num_bytes, caps):
    assert list(caps_for(num_bytes)) == caps


def search_with(monkeypatch, passes_s: dict[float | None, list[float]]) -> tuple[BucketSearch, int]:
    """Runs a search with the given durations of passes by size; returns the search and the number of steps."""
    now = 0.0
    monkeypatch.setattr(bucket_search.time, "perf_counter", lambda: now)
    search = BucketSearch(2 * MIB, torch.device("cpu"))
    num_steps = 0
    while not search.is_over:
        for has_exchanged in (False, True):  # as with accumulated gradients
            passes = passes_s[search.cap]
            search.begin_pass()
            now += passes[num_steps % len(passes)] if has_exchanged else 1000.0
            search.end_pass(has_exchanged)
            assert not search.is_over
            search.end_step()
        num_steps += 1
        assert search.num_remaining_steps == 3 * 2 * 8 - num_steps
    return search, num_steps


def test_the_fastest_is_chosen_by_what_passes_with_an_exchange_take_on_all_ranks(monkeypatch):
    search, num_steps = search_with(monkeypatch, {None: [1.0], 1: [0.8], 4: [0.9, 0.2]})
    assert num_steps == 48
    seen = []

    def mean_over_ranks(times):
        seen.append(times.tolist())
        return (times + torch.tensor([1.0, 1.2, 0.6])) / 2  # the times of the other rank

    choice = search.choose(mean_over_ranks)
    assert seen == [pytest.approx([1.0, 0.8, 0.55], abs=0.36)]  # medians of odd numbers of passes
    assert choice.cap == 4
    assert "bucket_cap_mb=4" in str(choice)
    assert "1e+03 ms with DDP's default sizes" in str(choice)


def test_a_small_gain_does_not_change_the_bucket_size():
    assert BucketChoice({None: 1.0, 1.0: 0.98, 4.0: 1.2}).cap is None
    assert BucketChoice({None: 1.0, 1.0: 0.96, 4.0: 0.95}).cap == 4.0


def test_a_step_with_several_passes_counts_once(monkeypatch):
    now = 0.0
    monkeypatch.setattr(bucket_search.time, "perf_counter", lambda: now)
    search = BucketSearch(2 * MIB, torch.device("cpu"))
    for _ in range(search.num_remaining_steps):
        for seconds in (1.0, 2.0):
            search.begin_pass()
            now += seconds
            search.end_pass(has_exchanged=True)
        search.end_step()
    assert search.is_over
    assert search.choose(lambda times: times).seconds == {None: 3.0, 1.0: 3.0, 4.0: 3.0}


@pytest.mark.forked
def test_a_search_starts_again_when_other_parameters_are_trained() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(nn.Linear(1024, 1024))
    used: list[Any] = []
    context = FeatureContext(GradientSyncOptions(), {}, torch.device("cpu"), LocalCollectives(0, 1))
    tuning = BucketTuning(context)

    def rebuild(model: DistributedDataParallel) -> None:
        used.append(context.ddp_kwargs.get("bucket_cap_mb"))
        tuning.after_rebuild(model)

    def step() -> None:
        tuning.before_backward(torch.zeros(()))
        tuning.after_backward()
        tuning.before_step()

    context.rebuild = rebuild
    tuning.wrap(model)
    num_steps = bucket_search.NUM_WARMUP + bucket_search.NUM_MEASURED
    for _ in range(num_steps):
        step()
    assert used == [1]  # after DDP's size
    context.rebuild(model)  # as after a change of the trained parameters
    for _ in range(num_steps):
        step()
    assert used == [1, 1, None, 1]
