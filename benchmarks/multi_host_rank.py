"""One rank of :mod:`benchmarks.multi_host`: trains with one contender after another, and writes results."""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.contenders import silence_lightning
from benchmarks.horovod_commands import variables_of_rank
from examples.transformer import Transformer, documentation
from lightning_strategies_ext import DDPStrategy, DiLoCo
from lightning_strategies_ext.torch_distributed import process_group
from lightning_strategies_ext.torch_distributed.bucket_search import BucketSearch

#: Number of steps before the clock starts: ten in which compressions send whole gradients and DDP builds its buckets,
#: and the first compressed steps, about a dozen of which take up to 50 % longer, because they allocate memory.
NUM_WARMUP_STEPS = 32
SENT_BYTES = Path("/sys/class/net/eth0/statistics/tx_bytes")


BY_TRIAL = "ddp_ext, buckets by trial"
PAPERS_DILOCO = "diloco, momentum 0.9"
HOROVOD = "horovod_ext"
#: Name → function that creates the Trainer's strategy, for each training.
STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "ddp_ext": DDPStrategy,
    BY_TRIAL: partial(DDPStrategy, bucket_cap_mb="auto"),
    "ddp_ext over gloo": partial(DDPStrategy, process_group_backend="gloo"),
    "bf16": partial(DDPStrategy, compression="bf16"),
    "powersgd": partial(DDPStrategy, compression="powersgd"),
    "topk": partial(DDPStrategy, compression="topk"),
    "localsgd": partial(DDPStrategy, compression="localsgd"),
    "diloco": partial(DDPStrategy, compression="diloco"),
    PAPERS_DILOCO: partial(DDPStrategy, compression=DiLoCo(momentum=0.9)),
    HOROVOD: lambda: HOROVOD,
}


def bf16_hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Calls torch's hook, under a name that torch accepts on CPUs."""
    return default_hooks.bf16_compress_hook(group, bucket)


#: Name → hook of torch's DDP in a loop without Lightning. torch's PowerSGD hook is not among them: with several buckets
#: its ranks start collectives in different orders, and gloo aborts the process.
BY_HAND: dict[str, Callable[..., Any] | None] = {
    "torch's DDP": None,
    "torch's DDP, bf16 hook": bf16_hook,
}
CONTENDERS = (*STRATEGIES, *BY_HAND)


@dataclass(frozen=True)
class Job:
    """Settings of all ranks.

    Attributes:
        contenders: Names of the contenders, in order.
        num_hosts: Number of hosts.
        num_ranks: Number of ranks per host.
        num_steps: Number of timed steps.
        width: Width of the transformer.
        num_layers: Number of layers of the transformer.
        context: Number of bytes per window.
        batch_size: Number of windows per rank and step.
        port: First port of the process groups, one per contender.
        directory: Directory of the ranks' results.
        horovod_port: Port of Horovod's rendezvous server on the first host.
    """

    contenders: list[str]
    num_hosts: int
    num_ranks: int
    num_steps: int
    width: int
    num_layers: int
    context: int
    batch_size: int
    port: int
    directory: str
    horovod_port: int = 0

    @property
    def num_all_ranks(self) -> int:
        """Number of ranks on all hosts."""
        return self.num_hosts * self.num_ranks

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return int(os.environ["NODE_RANK"]) * self.num_ranks + int(os.environ["LOCAL_RANK"])


@dataclass
class Traffic:
    """Measurements of a contender on one rank.

    Attributes:
        step_ms: Mean number of milliseconds per step.
        sent_mb: Megabytes (10^6) per step that the host has sent; the same for all of its ranks.
        bits: Bits per byte of each step.
    """

    step_ms: float
    sent_mb: float
    bits: list[float]


class Windows(Dataset[tuple[Tensor]]):
    """Windows of the standard library's documentation, which repeat.

    Args:
        context: Number of bytes per window, without the byte to predict.
        number: Number of windows.
    """

    def __init__(self, context: int, number: int) -> None:
        text = torch.frombuffer(bytearray(b"".join(documentation())), dtype=torch.uint8)
        self._windows = text.unfold(0, context + 1, context)
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> tuple[Tensor]:
        return (self._windows[index % len(self._windows)].long(),)


class Learner(Transformer):
    """Transformer with a constant learning rate. It logs nothing, because logging would add a collective."""

    bits_of_steps: list[Tensor]

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        """Returns the bits per byte of one batch."""
        bits = self.bits(batch[0])
        self.bits_of_steps.append(bits.detach())
        return bits

    def configure_optimizers(self) -> Any:
        """Returns AdamW."""
        return torch.optim.AdamW(self.parameters(), self.lr, fused=True)


class Clock:
    """Times the steps after the warm-up steps, and counts the bytes that the host sends meanwhile.

    Args:
        job: Settings of the ranks.
        num_warmup_steps: Number of warm-up steps.

    Attributes:
        num_steps: Number of all steps.
    """

    def __init__(self, job: Job, num_warmup_steps: int) -> None:
        self._job = job
        self._num_warmup_steps = num_warmup_steps
        self.num_steps = num_warmup_steps + job.num_steps

    def tick(self, num_done: int) -> None:
        """Receives the number of steps. Timing starts and ends after steps with equal models on all ranks."""
        if num_done in (self._num_warmup_steps, self.num_steps):
            now = time.perf_counter(), int(SENT_BYTES.read_text())
            if num_done == self._num_warmup_steps:
                self._begin = now
            else:
                self._end = now

    def seen(self, bits_of_steps: list[Tensor], mean_over_ranks: Callable[[Tensor], Tensor]) -> Traffic:
        """Returns the measurements after the last step."""
        (began, sent_before), (ended, sent) = self._begin, self._end
        return Traffic(
            1000 * (ended - began) / self._job.num_steps,
            (sent - sent_before) / 1e6 / self._job.num_steps,
            mean_over_ranks(torch.stack(bits_of_steps).to(torch.float64)).tolist(),
        )


class Ticks(Callback):
    """Reports the number of the Trainer's steps to a clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Reports the number of steps."""
        self._clock.tick(trainer.global_step)


class Bits(nn.Module):
    """Module for torch's DDP, which computes the bits per byte of a batch."""

    def __init__(self, learner: Learner) -> None:
        super().__init__()
        self.learner = learner

    def forward(self, windows: Tensor) -> Tensor:
        """Returns the bits per byte of a batch of windows, as a scalar."""
        return self.learner.bits(windows)


def make_learner(job: Job) -> Learner:
    """Returns the model, which is the same on all ranks, and for all contenders."""
    pl.seed_everything(1, verbose=False)
    learner = Learner(job.context, job.width, job.num_layers, lr=1e-3)
    learner.bits_of_steps = []
    return learner


def windows_for(job: Job, num_steps: int) -> Windows:
    """Returns the loader of the windows of a number of steps on all ranks."""
    return Windows(job.context, num_steps * job.num_all_ranks * job.batch_size)


def num_warmup_steps(name: str, model: Learner) -> int:
    """Returns the number of steps that are not timed, including the steps of the bucket search."""
    if name != BY_TRIAL:
        return NUM_WARMUP_STEPS
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    return NUM_WARMUP_STEPS + BucketSearch(num_bytes, torch.device("cpu")).num_remaining_steps


def train(job: Job, name: str) -> Traffic:
    """Trains with a strategy of the Trainer."""
    model = make_learner(job)
    clock = Clock(job, num_warmup_steps(name, model))
    trainer = pl.Trainer(
        strategy=STRATEGIES[name](),
        accelerator="cpu",
        devices=job.num_ranks,
        num_nodes=job.num_hosts,
        max_steps=clock.num_steps,
        callbacks=[Ticks(clock)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(windows_for(job, clock.num_steps), job.batch_size, shuffle=True))
    return clock.seen(model.bits_of_steps, partial(trainer.strategy.reduce, reduce_op="mean"))


def train_by_hand(job: Job, name: str) -> Traffic:
    """Trains with torch's DDP in a loop."""
    dist.init_process_group("gloo", rank=job.rank, world_size=job.num_all_ranks)
    learner = make_learner(job)
    clock = Clock(job, NUM_WARMUP_STEPS)
    model = DistributedDataParallel(Bits(learner))
    if BY_HAND[name] is not None:
        model.register_comm_hook(None, BY_HAND[name])
    optimizer = learner.configure_optimizers()
    windows = windows_for(job, clock.num_steps)
    loader = DataLoader(windows, job.batch_size, sampler=DistributedSampler(windows, seed=1))
    for step, (batch,) in enumerate(loader):
        bits = model(batch)
        learner.bits_of_steps.append(bits.detach())
        optimizer.zero_grad()
        bits.backward()
        optimizer.step()
        clock.tick(step + 1)

    def mean_over_ranks(values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values / job.num_all_ranks

    return clock.seen(learner.bits_of_steps, mean_over_ranks)


def train_by_horovod(job: Job) -> Traffic:
    """Trains with Horovod, with the environment variables of ``horovodrun``."""
    import horovod.torch as hvd

    node_and_local_rank = int(os.environ["NODE_RANK"]), int(os.environ["LOCAL_RANK"])
    variables = variables_of_rank(
        *node_and_local_rank, job.num_hosts, job.num_ranks, os.environ["MASTER_ADDR"], job.horovod_port
    )
    with patch.dict(os.environ, variables):
        one = train(job, HOROVOD)
        hvd.shutdown()
    return one


def main() -> None:
    """Trains with all contenders."""
    job = Job(**json.loads(sys.argv[1]))
    silence_lightning()
    torch.set_num_threads(1)
    seen = {}
    for index, name in enumerate(job.contenders):
        os.environ["MASTER_PORT"] = str(job.port + index)
        if name == HOROVOD:
            one = train_by_horovod(job)
        else:
            one = train(job, name) if name in STRATEGIES else train_by_hand(job, name)
        seen[name] = asdict(one)
        process_group.stop()
    Path(job.directory, f"{job.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
