"""Training of all contenders of :mod:`benchmarks.rank_loss`, and the record that each rank writes."""

import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

PLAIN = "plain torch DDP"
SPAWN, RESTARTED = "ddp_spawn_elastic_ext", "ddp_elastic_ext"
STOCK = "ddp, checkpoints on disk"
TORCHFT = "torchft"
CONTENDERS = (PLAIN, SPAWN, RESTARTED, STOCK, TORCHFT)
WIDTH = 1000
BATCH_SIZE = 32
NUM_RANKS = 2
#: Number of different rows; data of any length consists of these rows, in memory.
NUM_ROWS = 1024
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Job:
    """One run of one contender.

    Attributes:
        directory: Directory of the records, as text.
        contender: Name of the contender.
        millions: Number of parameters, in millions.
        interval: Number of steps between commits, or between checkpoints.
        killed_rank: The rank that kills itself.
    """

    directory: str
    contender: str
    millions: int
    interval: int
    killed_rank: int

    @classmethod
    def this_process(cls) -> "Job":
        """Returns the job that this script was started for."""
        return cls(**json.loads(sys.argv[1]))

    @property
    def argument(self) -> str:
        """Command-line arguments of the script."""
        return json.dumps(asdict(self))

    @property
    def kill_at(self) -> int:
        """Number of steps before the kill, in the middle between two commits, so that the lost work is the average."""
        return self.interval * 7 // 2

    @property
    def num_steps(self) -> int:
        """Number of steps of the epoch, with two ranks."""
        return self.interval * 9 // 2

    @property
    def num_samples(self) -> int:
        """Number of samples of the epoch."""
        return self.num_steps * NUM_RANKS * BATCH_SIZE

    @property
    def killed(self) -> Path:
        """File in which the rank records the time of the kill."""
        return Path(self.directory, "killed")

    def net(self) -> nn.Module:
        """Returns the model, with the same weights in each call."""
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(self.millions)))


class Numbered(Dataset[tuple[int, Tensor]]):
    """Samples with their indices.

    Args:
        num_samples: Number of samples.
    """

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.rows = torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.rows[index % NUM_ROWS]


@dataclass(frozen=True)
class Step:
    """A training step of a rank.

    Attributes:
        at: End of the step, in seconds of the host's monotonic clock.
        number: Number of completed steps, as counted by the rank.
        rank: The rank.
        world_size: Number of ranks.
        is_after: Whether the rank had been restarted, or had returned to a commit.
        samples: Indices of the samples.
    """

    at: float
    number: int
    rank: int
    world_size: int
    is_after: bool
    samples: list[int]


class StepLog:
    """Record of a rank, with one line per step, so that a SIGKILL leaves whole lines. Kills the rank at its step.

    Args:
        job: The run.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._is_after = job.killed.exists()
        path = Path(job.directory, f"steps{os.getpid()}")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def exit_if_due(self, rank: int, num_done: int) -> None:
        """Kills this rank in its step. Called in each step, before gradients are exchanged."""
        if (rank, num_done) == (self._job.killed_rank, self._job.kill_at) and not self._is_after:
            self._job.killed.write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

    def step(self, number: int, rank: int, world_size: int, samples: Tensor | None) -> None:
        """Records a step. Called at the end of each step, without samples if the samples of this rank do not count."""
        numbers = [] if samples is None else samples.tolist()
        step = Step(time.monotonic(), number, rank, world_size, self._is_after, numbers)
        os.write(self._file, json.dumps(vars(step)).encode() + b"\n")


def read_steps(job: Job) -> list[Step]:
    """Returns the records of all ranks, in the order of time."""
    lines = [line for path in Path(job.directory).glob("steps*") for line in path.read_text().splitlines()]
    return sorted((Step(**json.loads(line)) for line in lines), key=lambda step: step.at)
