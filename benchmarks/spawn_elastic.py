"""Time until ``ddp_spawn_elastic_ext`` continues after the kill of a worker.

    python -m benchmarks.spawn_elastic
    python -m benchmarks.spawn_elastic --parameters 1 100 --rounds 5

Two CPU workers, one torch thread each, linear layers with the given number of million parameters, Adam, 32 samples per
worker. Each round has a new ``fit``, in the middle of which one worker kills itself. The program measures the time from
the kill to the end of the next step of the other worker, and to the end of the first step with the new worker.
"""

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.contenders import silence_lightning
from benchmarks.report import Spread, parse, print_table, write_json

WIDTH = 1000
KILLED_AT, NUM_STEPS = 30, 400


class Layers(pl.LightningModule):
    """Records the ends of steps; the second worker kills itself once."""

    def __init__(self, millions: int, directory: Path) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(millions)))
        self.directory = directory
        self.num_worlds = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Kills the second worker in its step."""
        mark = self.directory / "killed"
        if self.global_rank == 1 and self.trainer.global_step == KILLED_AT and not mark.exists():
            mark.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        loss: Tensor = self.net(batch[0]).pow(2).mean()
        return loss

    def on_train_start(self) -> None:
        """Counts the worlds of this worker."""
        self.num_worlds += 1

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        """Records the time, and stops after the new worker has joined."""
        if self.global_rank == 0:
            with (self.directory / "steps").open("a") as file:
                file.write(json.dumps([time.time(), self.num_worlds, self.trainer.world_size]) + "\n")
        if (self.directory / "killed").exists() and self.num_worlds > 1 and self.trainer.world_size == 2:
            self.trainer.should_stop = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns Adam, so that the training state has three times the size of the parameters."""
        return torch.optim.Adam(self.parameters())


def measure(millions: int) -> tuple[float, float, float]:
    """Returns the seconds of a step, and from the kill to the next step and to the first step with two workers."""
    with tempfile.TemporaryDirectory() as directory:
        module = Layers(millions, Path(directory))
        trainer = pl.Trainer(
            strategy="ddp_spawn_elastic_ext",
            accelerator="cpu",
            devices=2,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(TensorDataset(torch.randn(64 * NUM_STEPS, WIDTH)), batch_size=32))
        killed_at = float(Path(directory, "killed").read_text())
        steps = [json.loads(line) for line in Path(directory, "steps").read_text().splitlines()]
    before = [at for at, number, _ in steps if number == 1]
    step = statistics.median(later - earlier for earlier, later in pairwise(before[5:]))
    following = next(at for at, number, _ in steps if number > 1)
    joined = next(at for at, number, size in steps if number > 1 and size == 2)
    return step, following - killed_at, joined - killed_at


def main() -> None:
    """Measures, prints the table, and writes the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="+", default=[1], help="millions of parameters")
    parser.add_argument("--rounds", type=int, default=7, help="runs per number of parameters")
    arguments = parse(parser, "one run", rounds=1)
    silence_lightning()
    os.environ["OMP_NUM_THREADS"] = "1"
    names = ["a step", "from the kill to the next step", "to the first step with the new worker"]
    seconds: dict[str, dict[str, Spread]] = {}
    for millions in arguments.parameters:
        samples = [measure(millions) for _ in range(arguments.rounds)]
        spreads = [Spread.of(column) for column in zip(*samples, strict=True)]
        seconds[f"{millions} M"] = dict(zip(names, spreads, strict=True))
    rows = [[label, *(spread.text(3) for spread in own.values())] for label, own in seconds.items()]
    print_table("Seconds: median [quartiles]", ["parameters", *names], rows)
    results = {label: {name: vars(spread) for name, spread in own.items()} for label, own in seconds.items()}
    write_json(arguments.output, "spawn_elastic", {"settings": {"rounds": arguments.rounds}, "seconds": results})


if __name__ == "__main__":
    main()
