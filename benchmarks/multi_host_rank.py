"""One rank of :mod:`benchmarks.multi_host`: trains with one contender after another, and writes down results."""

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

#: Steps before the clock starts: ten in which compressions send all and buckets are made, and the first that are
#: compressed, of which a dozen take up to half as long again, with memory that is new to them.
NUM_WARMUP_STEPS = 32
SENT_BYTES = Path("/sys/class/net/eth0/statistics/tx_bytes")


BY_TRIAL = "ddp_ext, buckets by trial"
PAPERS_DILOCO = "diloco, momentum 0.9"
HOROVOD = "horovod_ext"
#: Name → what makes the Trainer's strategy, anew for each training.
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
    """torch's, by a name that it does not refuse on CPUs."""
    return default_hooks.bf16_compress_hook(group, bucket)


#: Name → hook of torch's DDP in a loop without Lightning. torch's PowerSGD hook is not among them: with several buckets
#: its ranks begin collectives in different orders, and gloo ends the process.
BY_HAND: dict[str, Callable[..., Any] | None] = {
    "torch's DDP": None,
    "torch's DDP, bf16 hook": bf16_hook,
}
CONTENDERS = (*STRATEGIES, *BY_HAND)


@dataclass(frozen=True)
class Job:
    """What all ranks do.

    Attributes:
        contenders: Names, in order.
        num_hosts: Hosts.
        num_ranks: Ranks per host.
        num_steps: Steps that are timed.
        width: Of the transformer.
        num_layers: Of the transformer.
        context: Bytes per window.
        batch_size: Windows per rank and step.
        port: First of those at which groups are made, one per contender.
        directory: For the ranks' results.
        horovod_port: Where ranks of Horovod meet, on the first host.
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
        """Of all hosts."""
        return self.num_hosts * self.num_ranks

    @property
    def rank(self) -> int:
        """That of this process."""
        return int(os.environ["NODE_RANK"]) * self.num_ranks + int(os.environ["LOCAL_RANK"])


@dataclass
class Seen:
    """What a rank has seen of a contender.

    Attributes:
        step_ms: Milliseconds per step, the mean.
        sent_mb: Megabytes (10^6) per step that have left the host; the same for all of its ranks.
        bits: Per byte, of each step.
    """

    step_ms: float
    sent_mb: float
    bits: list[float]


class Windows(Dataset[tuple[Tensor]]):
    """Windows of the standard library's documentation, again and again.

    Args:
        context: Bytes per window, without the one after it.
        number: Of windows.
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
    """A transformer that keeps its learning rate, and logs nothing: that would be a collective of its own."""

    bits_of_steps: list[Tensor]

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        """Bits per byte of one batch."""
        bits = self.bits(batch[0])
        self.bits_of_steps.append(bits.detach())
        return bits

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), self.lr, fused=True)


class Clock:
    """Times the steps after the first ones, and counts what leaves the host meanwhile.

    Args:
        job: What is done.
        num_warmup_steps: How many are the first ones.

    Attributes:
        num_steps: All of them.
    """

    def __init__(self, job: Job, num_warmup_steps: int) -> None:
        self._job = job
        self._num_warmup_steps = num_warmup_steps
        self.num_steps = num_warmup_steps + job.num_steps

    def tick(self, num_done: int) -> None:
        """Says how many steps are done. It begins, and ends, when models are the same again, if they are not always."""
        if num_done in (self._num_warmup_steps, self.num_steps):
            now = time.perf_counter(), int(SENT_BYTES.read_text())
            if num_done == self._num_warmup_steps:
                self._begin = now
            else:
                self._end = now

    def seen(self, bits_of_steps: list[Tensor], mean_over_ranks: Callable[[Tensor], Tensor]) -> Seen:
        """What was seen, when all is done."""
        (began, sent_before), (ended, sent) = self._begin, self._end
        return Seen(
            1000 * (ended - began) / self._job.num_steps,
            (sent - sent_before) / 1e6 / self._job.num_steps,
            mean_over_ranks(torch.stack(bits_of_steps).to(torch.float64)).tolist(),
        )


class Ticks(Callback):
    """Tells a clock how many steps the Trainer has done."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Tells it."""
        self._clock.tick(trainer.global_step)


class Bits(nn.Module):
    """What torch's DDP wraps: bits per byte of a batch."""

    def __init__(self, learner: Learner) -> None:
        super().__init__()
        self.learner = learner

    def forward(self, windows: Tensor) -> Tensor:
        """Of a batch of windows of whole numbers, a scalar."""
        return self.learner.bits(windows)


def make_learner(job: Job) -> Learner:
    """The same on all ranks, and for all contenders."""
    pl.seed_everything(1, verbose=False)
    learner = Learner(job.context, job.width, job.num_layers, lr=1e-3)
    learner.bits_of_steps = []
    return learner


def windows_for(job: Job, num_steps: int) -> Windows:
    """As many as all ranks take in so many steps."""
    return Windows(job.context, num_steps * job.num_all_ranks * job.batch_size)


def num_warmup_steps(name: str, model: Learner) -> int:
    """Steps that are not timed: those in which a size of buckets is found, too."""
    if name != BY_TRIAL:
        return NUM_WARMUP_STEPS
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    return NUM_WARMUP_STEPS + BucketSearch(num_bytes, torch.device("cpu")).num_steps_left


def train(job: Job, name: str) -> Seen:
    """Trains with a strategy."""
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


def train_by_hand(job: Job, name: str) -> Seen:
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


def train_by_horovod(job: Job) -> Seen:
    """Trains with Horovod, which finds what it would have from ``horovodrun`` while it does."""
    import horovod.torch as hvd

    place = int(os.environ["NODE_RANK"]), int(os.environ["LOCAL_RANK"])
    variables = variables_of_rank(*place, job.num_hosts, job.num_ranks, os.environ["MASTER_ADDR"], job.horovod_port)
    with patch.dict(os.environ, variables):
        one = train(job, HOROVOD)
        hvd.shutdown()
    return one


def main() -> None:
    """Trains with all."""
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
