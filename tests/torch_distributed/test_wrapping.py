"""DDP is created in a side stream of the GPU, which is synchronized with the current stream before and after."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_strategies_ext.torch_distributed import wrapping
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes


def wrap_three_times_on_a_gpu() -> list[str]:
    """Simulates a GPU on a CPU: streams that record their waits, and a DDP that accepts any device."""
    events: list[str] = []

    class Stream:
        def __init__(self, device: Any = None) -> None:
            self.name = f"stream {len(made)}"
            made.append(self)

        def wait_stream(self, other: "Stream") -> None:
            events.append(f"{self.name} waits for {other.name}")

    made: list[Stream] = []
    current = [Stream()]

    @contextmanager
    def stream(of_block: Stream) -> Generator[None, None, None]:
        current.append(of_block)
        yield
        current.pop()

    class OnAnyDevice(DistributedDataParallel):
        def __init__(self, module: nn.Module, device_ids: Any, output_device: Any = None, **kwargs: Any) -> None:
            events.append(f"DDP on {device_ids} in {current[-1].name}")
            super().__init__(module, **kwargs)

    torch.cuda.Stream, torch.cuda.stream = Stream, stream  # type: ignore[misc, assignment]
    torch.cuda.current_stream = lambda device=None: current[-1]  # type: ignore[assignment, return-value]
    wrapping.DistributedDataParallel = wrapping.DistributedModel = OnAnyDevice  # type: ignore[misc, assignment]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cuda", 0)
    model = wrapping.wrap_in_ddp(nn.Linear(2, 2), device)
    for _ in range(2):
        wrapping.rewrap_in_ddp(model, device)
    dist.destroy_process_group()
    return events


def test_the_side_stream_is_the_same_each_time_and_joined_before_and_after():
    once = ["stream 1 waits for stream 0", "DDP on [0] in stream 1", "stream 0 waits for stream 1"]
    assert run_ranks(wrap_three_times_on_a_gpu, world_size=1) == [once * 3]
