"""``bucket_cap_mb="auto"`` tries several sizes during training, on all ranks together, without other changes."""

import logging
import re
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.nn.parallel import DistributedDataParallel

from lightning_strategies_ext import CommunicationMonitor, DDPSpawnStrategy, DDPStrategy
from lightning_strategies_ext.torch_distributed import bucket_search
from lightning_strategies_ext.torch_distributed.exchange_timer import DDPExchangeTimer
from tests.support.models import (
    MLP,
    TwoOptimizers,
    WithBatchNorm,
    WithUnusedParameters,
    assert_same_bits,
    fit,
    state_of,
)
from tests.support.ranks import run_ranks

#: Bucket sizes in mebibytes, so small that the models of the tests have several buckets.
SIZES_MB = (2**-12, 2**-11, 2**-5)
NUM_STEPS = (len(SIZES_MB) + 1) * bucket_search.NUM_REPEATS * (bucket_search.NUM_WARMUP + bucket_search.NUM_MEASURED)
NUM_PROFILED = 5

CASES: dict[str, tuple[dict[str, Any], type[pl.LightningModule], dict[str, Any]]] = {
    "buffers": ({}, WithBatchNorm, {}),
    "buffers of each rank": ({"broadcast_buffers": False}, WithBatchNorm, {}),
    "accumulation": ({}, MLP, {"accumulate_grad_batches": 2}),
    "gradients kept twice": ({"gradient_as_bucket_view": False}, MLP, {}),
    "static graph": ({"static_graph": True}, MLP, {}),
    "unused parameters": ({"find_unused_parameters": True}, WithUnusedParameters, {}),
    "manual optimization": ({"find_unused_parameters": True}, TwoOptimizers, {}),
    "bf16": ({}, MLP, {"precision": "bf16-mixed"}),
}


class Observe(Callback):
    """A callback that records the bucket sizes of the steps, and the all-reduces of the last steps."""

    def __init__(self) -> None:
        self.model: DistributedDataParallel | None = None
        self.reducer: Any = None
        self.caps: list[int] = []
        self.num_steps_since = 0
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.model = trainer.strategy.model
        if self.model.reducer is not self.reducer:
            self.reducer = self.model.reducer
            self.caps.append(self.model.bucket_bytes_cap)
        if len(self.caps) > len(SIZES_MB) * 2 + 2:
            self.num_steps_since += 1
            if self.num_steps_since == 4:
                self.profiler.start()
            elif self.num_steps_since == 4 + NUM_PROFILED:
                self.profiler.stop()
                trainer.should_stop = True

    def on_train_end(self, trainer, pl_module):
        self.num_buckets = DDPExchangeTimer(self.model).num_buckets
        self.model = self.reducer = None

    def num_all_reduces(self) -> int:
        return sum(event.name.startswith("shm:all_reduce") for event in self.profiler.events())


@dataclass
class Training:
    state: dict[str, torch.Tensor]
    caps: list[int]
    num_buckets: int
    num_all_reduces: int
    num_steps: int
    log_text: str


def train(cap: Any, case: str, **options: Any) -> Training:
    arguments, kind, more = CASES[case]
    observe, lines = Observe(), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    strategy = DDPStrategy(bucket_cap_mb=cap, **arguments)
    trainer, model = fit(strategy, kind, callbacks=[observe], **{"max_epochs": 1000, **more, **options})
    logger.removeHandler(handler)
    log_text = "\n".join(line for line in lines if line.startswith("`bucket_cap_mb"))
    num_all_reduces = observe.num_all_reduces() if observe.num_steps_since else 0
    return Training(state_of(model), observe.caps, observe.num_buckets, num_all_reduces, trainer.global_step, log_text)


def train_all() -> dict[str, tuple[Training, Training]]:
    bucket_search.SIZES_MB = SIZES_MB  # type: ignore[misc]
    found = {}
    for case in CASES:
        tried = train("auto", case)
        found[case] = tried, train(25, case, max_steps=tried.num_steps)
    return found


@pytest.mark.processes
def test_sizes_are_tried_in_turn_and_weights_are_those_of_any_size():
    first, second = run_ranks(train_all)
    turns = [25 * 2**20, *(int(size * 2**20) for size in SIZES_MB)] * bucket_search.NUM_REPEATS
    for case, (tried, default) in first.items():
        assert_same_bits(tried.state, default.state)
        chosen = re.match(
            r"`bucket_cap_mb='auto'`: set to (?:bucket_cap_mb=(\S+)\. |DDP's default sizes)", tried.log_text
        )
        assert chosen, f"{case}: {tried.log_text}"
        assert tried.caps == [*turns, turns[0] if chosen[1] is None else round(float(chosen[1]) * 2**20)], case
        if case in ("buffers", "gradients kept twice", "static graph", "bf16"):  # each step exchanges each bucket once
            per_step, rest = divmod(tried.num_all_reduces, NUM_PROFILED)
            assert per_step > 0 == rest, case
            assert tried.num_buckets in (per_step, 0), case  # DDP of torch 2.5 does not report the number
        other, default = second[case]
        assert_same_bits(other.state, default.state)
        assert (other.caps, other.num_all_reduces, other.log_text) == (tried.caps, tried.num_all_reduces, ""), case


def train_little() -> list[str]:
    found = []
    for bucket_search.SIZES_MB in (SIZES_MB, (1.0,)):  # type: ignore[misc]
        found.append(train("auto", "buffers", max_steps=3).log_text)
    return found


@pytest.mark.processes
def test_a_bucket_search_with_too_few_steps_or_gradients_is_reported():
    too_short, too_small = run_ranks(train_little)[0]
    assert (
        too_short
        == f"`bucket_cap_mb='auto'`: no size was chosen, because the search requires {NUM_STEPS - 2} more steps."
    )
    assert (
        too_small
        == "`bucket_cap_mb='auto'`: all gradients fit into the smallest bucket, so there is no size to choose."
    )


def train_observed() -> tuple[dict[str, torch.Tensor], float]:
    bucket_search.SIZES_MB = SIZES_MB  # type: ignore[misc]
    monitor = CommunicationMonitor(every_n_steps=4, observed_steps=2, plot=False)
    strategy = DDPStrategy(bucket_cap_mb="auto")
    _, model = fit(strategy, callbacks=[monitor], max_steps=NUM_STEPS + 8, max_epochs=-1)
    return state_of(model), [times.num_bytes for times in monitor.rank_times]


@pytest.mark.processes
def test_a_monitor_follows_from_size_to_size(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state, num_bytes = run_ranks(train_observed)[0]
    assert num_bytes == [sum(tensor.nbytes for tensor in state.values())] * 2


@pytest.mark.parametrize(
    "arguments",
    [
        {"compression": "bf16"},
        {"uneven_inputs": "join"},
        {"ddp_comm_hook": lambda state, bucket: None},
        {"delay_all_reduce_named_params": [("weight", None)]},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
@pytest.mark.parametrize("kind", [DDPStrategy, DDPSpawnStrategy])
def test_arguments_that_cannot_be_combined_with_a_bucket_search_are_refused(kind, arguments):
    with pytest.raises(
        ValueError, match=f"tries buckets of several sizes.*`{next(iter(arguments))}=.*Omit that argument"
    ):
        kind(bucket_cap_mb="auto", **arguments)
