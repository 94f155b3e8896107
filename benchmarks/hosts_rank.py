"""One rank of :mod:`benchmarks.hosts`: trains with one contender after another, and writes down what it has seen."""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, Dataset

from benchmarks.contenders import silence_lightning
from examples.transformer import Transformer, documentation
from lightning_strategies_ext import DDPStrategy
from lightning_strategies_ext.torch_distributed import process_group
from lightning_strategies_ext.torch_distributed.bucket_search import BucketSearch

#: Steps before the clock starts: those in which compressions send all, and buckets are made.
NUM_WARMUP_STEPS = 12
SENT_BYTES = Path("/sys/class/net/eth0/statistics/tx_bytes")


BY_TRIAL = "ddp_ext, buckets by trial"
#: Name → what makes the strategy, anew for each training. torch's PowerSGD hook is not among them: with several buckets
#: its ranks begin collectives in different orders, and gloo ends the process.
CONTENDERS: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "ddp_ext": DDPStrategy,
    BY_TRIAL: partial(DDPStrategy, bucket_cap_mb="auto"),
    "ddp_ext over shm": partial(DDPStrategy, process_group_backend="shm"),
    "bf16 hook of torch": lambda: DDPStrategy(ddp_comm_hook=default_hooks.bf16_compress_hook),
    "bf16": partial(DDPStrategy, compression="bf16"),
    "powersgd": partial(DDPStrategy, compression="powersgd"),
    "topk": partial(DDPStrategy, compression="topk"),
    "localsgd": partial(DDPStrategy, compression="localsgd"),
    "diloco": partial(DDPStrategy, compression="diloco"),
}


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


class Clock(Callback):
    """Times the steps after the first ones, and counts what leaves the host meanwhile.

    Args:
        num_warmup_steps: How many are the first ones.
    """

    def __init__(self, num_warmup_steps: int) -> None:
        self._num_warmup_steps = num_warmup_steps

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Begins, and ends, when models are the same again, if they are not always."""
        if trainer.global_step in (self._num_warmup_steps, trainer.max_steps):
            now = time.perf_counter(), int(SENT_BYTES.read_text())
            if trainer.global_step == self._num_warmup_steps:
                self.begin = now
            else:
                self.end = now


def num_warmup_steps(name: str, model: Learner) -> int:
    """Steps that are not timed: those in which a size of buckets is found, too."""
    if name != BY_TRIAL:
        return NUM_WARMUP_STEPS
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    return NUM_WARMUP_STEPS + BucketSearch(num_bytes, torch.device("cpu")).num_steps_left


def train(job: Job, name: str) -> Seen:
    """Trains with one contender."""
    pl.seed_everything(1, verbose=False)
    model = Learner(job.context, job.width, job.num_layers, lr=1e-3)
    model.bits_of_steps = []
    num_untimed = num_warmup_steps(name, model)
    clock, max_steps = Clock(num_untimed), num_untimed + job.num_steps
    trainer = pl.Trainer(
        strategy=CONTENDERS[name](),
        accelerator="cpu",
        devices=job.num_ranks,
        num_nodes=job.num_hosts,
        max_steps=max_steps,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    size = job.num_hosts * job.num_ranks
    trainer.fit(
        model, DataLoader(Windows(job.context, max_steps * size * job.batch_size), job.batch_size, shuffle=True)
    )
    (began, sent_before), (ended, sent) = clock.begin, clock.end
    bits = torch.stack(model.bits_of_steps).to(torch.float64)
    dist.all_reduce(bits)
    return Seen(
        1000 * (ended - began) / job.num_steps,
        (sent - sent_before) / 1e6 / job.num_steps,
        (bits / size).tolist(),
    )


def main() -> None:
    """Trains with all."""
    job = Job(**json.loads(sys.argv[1]))
    silence_lightning()
    torch.set_num_threads(1)
    seen = {}
    for index, name in enumerate(job.contenders):
        os.environ["MASTER_PORT"] = str(job.port + index)
        seen[name] = asdict(train(job, name))
        process_group.stop()
    rank = int(os.environ["NODE_RANK"]) * job.num_ranks + int(os.environ["LOCAL_RANK"])
    Path(job.directory, f"{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
