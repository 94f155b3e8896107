"""One rank of :mod:`benchmarks.scaling`: measures its links and its steps, and writes the results."""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.futures import Future
from torch.nn import functional

from benchmarks.all_reduce_sizes import calibrate, time_block
from benchmarks.contenders import (
    LEARNING_RATE,
    NUM_CLASSES,
    NUM_FEATURES,
    Batch,
    Batches,
    Case,
    Length,
    StepTimer,
    silence_lightning,
)
from benchmarks.report import rotated
from lightning_strategies_ext import DDPStrategy
from lightning_strategies_ext.torch_distributed.compression.codecs import Residuals
from lightning_strategies_ext.torch_distributed.compression.power_sgd import PowerSGDCodec

COMPUTE, PLAIN, BF16, POWERSGD, LOCALSGD = "compute", "plain", "bf16", "powersgd", "localsgd"
#: Key of the computation of ranks that do not synchronize in each step.
APART = "compute, apart"
#: Number of bytes that exceeds the caches of a machine's cores.
_CACHES_NUM_BYTES = 2**28
#: Exchange → number of timed steps after the warm-up steps: whole periods of local SGD, which are 32 steps.
LENGTHS = {
    COMPUTE: Length(3, 10),
    APART: Length(3, 10),
    PLAIN: Length(3, 10),
    BF16: Length(3, 10),
    POWERSGD: Length(12, 10),
    LOCALSGD: Length(2, 32),
}


@dataclass(frozen=True)
class Job:
    """Settings of all ranks.

    Attributes:
        num_hosts: Number of hosts.
        num_ranks: Number of ranks per host.
        exchanges: Measured exchanges, in addition to the computation alone.
        rounds: Number of rounds, in each of which all exchanges alternate.
        sizes: Message sizes in bytes.
        width: Width of the layers of the model.
        num_layers: Number of layers of the model between the first and the last layer.
        batch_size: Number of samples per rank and step.
        bucket_mb: Bucket size of DDP in mebibytes.
        directory: Directory of the ranks' results.
    """

    num_hosts: int
    num_ranks: int
    exchanges: tuple[str, ...]
    rounds: int
    sizes: tuple[int, ...]
    width: int
    num_layers: int
    batch_size: int
    bucket_mb: float
    directory: str = ""


class Stack(pl.LightningModule):
    """Linear layers, whose gradients are computed at a constant rate, as those of a transformer."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [NUM_FEATURES, *[job.width] * (job.num_layers + 1)]
        inner = [each for pair in pairwise(widths) for each in (nn.Linear(*pair), nn.ReLU())]
        self.net = nn.Sequential(*inner, nn.Linear(job.width, NUM_CLASSES))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Returns the cross entropy."""
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns SGD."""
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


class BackwardPasses(Callback):
    """Records the durations of backward passes, and the times at which each bucket is complete.

    The hook divides gradients, as DDP does, and exchanges none.

    Args:
        synchronizes: Whether ranks synchronize at the end of each backward pass, as they do with exchanges. A step then
            takes as long as on the slowest rank, which is more than the mean of any rank.
    """

    def __init__(self, *, synchronizes: bool) -> None:
        self._synchronizes = synchronizes
        self.seconds: list[float] = []
        self.buckets: list[list[tuple[int, float]]] = []
        self._began = 0.0

    def on_before_backward(self, *_: Any) -> None:
        """Records the start of the pass."""
        self.buckets.append([])
        self._began = time.perf_counter()

    def on_after_backward(self, *_: Any) -> None:
        """Records the end of the pass."""
        self.seconds.append(time.perf_counter() - self._began)

    def hook(self, state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        """Records the time of a bucket; communication hook of DDP."""
        buffer = bucket.buffer().div_(dist.get_world_size())
        self.buckets[-1].append((buffer.nbytes, time.perf_counter() - self._began))
        if not (self._synchronizes and bucket.is_last()) or dist.get_world_size() == 1:
            future: Future[Tensor] = Future()
            future.set_result(buffer)
            return future
        first_future: Future[Any] = dist.all_reduce(torch.zeros(1), async_op=True).get_future()
        return first_future.then(lambda _: buffer)

    def summary(self, length: Length) -> dict[str, Any]:
        """Returns medians over the timed steps: seconds of the pass; bytes of each bucket, and seconds to its end."""
        counted = self.buckets[length.warmup :]
        sizes = [num_bytes for num_bytes, _ in counted[-1]]
        ready = [median(times) for times in zip(*([at for _, at in one] for one in counted), strict=True)]
        return {"backward_s": median(self.seconds[length.warmup :]), "buckets": list(zip(sizes, ready, strict=True))}


def train(job: Job, exchange: str) -> dict[str, Any]:
    """Trains once; returns the seconds per step, and the records of :class:`BackwardPasses` without exchanges."""
    length, passes = LENGTHS[exchange], BackwardPasses(synchronizes=exchange == COMPUTE)
    is_none, none = exchange in (COMPUTE, APART), {"ddp_comm_hook": passes.hook}
    options_of_mode: dict[str, dict[str, Any]] = {COMPUTE: none, APART: none, PLAIN: {}}
    timer = StepTimer(length)
    trainer = pl.Trainer(
        strategy=DDPStrategy(bucket_cap_mb=job.bucket_mb, **options_of_mode.get(exchange, {"compression": exchange})),
        accelerator="cpu",
        devices=job.num_ranks,
        num_nodes=job.num_hosts,
        max_epochs=1,
        callbacks=[timer, passes] if is_none else [timer],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        log_every_n_steps=10**9,
    )
    trainer.fit(Stack(job), Batches(Case(job.width, batch_size=job.batch_size), length))
    summary = passes.summary(length) if is_none else {}
    return {"step_s": timer.ms_per_step / 1e3, **summary}


def reduce_messages(job: Job) -> dict[str, list[float]]:
    """Returns the seconds per all-reduce by size in bytes, one value per round, over the group of the gradients."""
    whole = torch.ones(max(job.sizes) // 4)
    seconds: dict[str, list[float]] = {}
    for size in job.sizes:
        tensor = whole[: size // 4]
        num_calls, _ = calibrate("all-reduce", dist.all_reduce, tensor)
        seconds[str(size)] = [time_block(dist.all_reduce, tensor, num_calls) for _ in range(job.rounds)]
    return seconds


def compress(job: Job) -> dict[str, list[float]]:
    """Returns the seconds per step of compressing and restoring gradients, while all ranks do so.

    As in a step, the caches of the cores do not contain the gradients, because the whole model is read before.
    """
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    parameters = [parameter.detach() for parameter in Stack(job).parameters()]
    flat = torch.randn(sum(parameter.numel() for parameter in parameters))
    codec = PowerSGDCodec(2, Residuals())
    works: dict[str, Callable[[Tensor], Any]] = {
        BF16: lambda gradients: gradients.copy_(gradients.to(torch.bfloat16)),
        POWERSGD: lambda gradients: codec.sum(parameters, gradients, 1.0, own),
    }
    cache_filler = torch.zeros(_CACHES_NUM_BYTES // 4)

    def timed(work: Callable[[Tensor], Any]) -> float:
        times = []
        for _ in range(5):
            cache_filler.add_(1)
            times.append(time_block(work, flat, 1))
        return median(times)

    return {name: [timed(work) for _ in range(job.rounds)] for name, work in works.items()}


def main() -> None:
    """Measures links, compression, and steps."""
    given = json.loads(sys.argv[1])
    job = Job(**{**given, "exchanges": tuple(given["exchanges"]), "sizes": tuple(given["sizes"])})
    silence_lightning()
    torch.set_num_threads(1)
    contenders = [COMPUTE, *([APART] if LOCALSGD in job.exchanges else []), *job.exchanges]
    train(job, COMPUTE)  # creates the process group
    is_alone = dist.get_world_size() == 1
    seen: dict[str, Any] = {"messages": {} if is_alone else reduce_messages(job)}
    seen["compression"] = compress(job) if {BF16, POWERSGD} & set(job.exchanges) else {}
    seen["trainings"] = {name: [] for name in contenders}
    for index in range(job.rounds):
        for name in rotated(contenders, index):
            dist.barrier()
            seen["trainings"][name].append(train(job, name))
    rank = int(os.environ["NODE_RANK"]) * job.num_ranks + int(os.environ["LOCAL_RANK"])
    Path(job.directory, f"{rank}.json").write_text(json.dumps(seen))


def arguments_of(job: Job) -> list[str]:
    """Parses the command line of a rank."""
    return ["-m", "benchmarks.scaling_rank", json.dumps(asdict(job))]


if __name__ == "__main__":
    main()
