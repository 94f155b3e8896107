"""Seconds and memory around training in spawned workers: Lightning's ``ddp_spawn`` and our ``ddp_spawn_ext``.

    python -m benchmarks.spawn
    python -m benchmarks.spawn --sizes 400 --rounds 15
    python -m benchmarks.spawn --quick

Two CPU workers on this host, a tiny model, data in memory. What is measured:

* start: from the call of ``trainer.fit`` to the first batch in rank 0's worker, and the same for ``trainer.validate``
  and then ``trainer.test`` of the same Trainer (the stock strategy refuses a second ``fit``);
* bring back: from the end of ``fit`` in rank 0's worker (its ``teardown`` hook) to the return of ``trainer.fit``, when
  the worker has changed 10, 100 or 400 MB of frozen weights, in tensors of 10 MB;
* predictions: 3200 rows of 8192 floats, 100 MB, from the call to the result in the main process, and from rank 0's last
  batch. The stock strategy returns none, so its contender does what its users do: each rank writes a file
  (``BasePredictionWriter``), and the main process loads them and puts the rows in the order of the dataset;
* script: ``fit``, ``test`` and ``predict`` in a new interpreter, from its start to its exit.

How it is measured: each sample is taken in an interpreter of its own, the contenders taking turns in an order that
changes from round to round; a first, uncounted turn fills the file cache. Workers and main process read the same clock.
Ratios are taken within a round. Every measurement checks that the result has arrived.

Peak extra memory is that of the main process only: its largest resident size, sampled from outside, while results come
back, less its size when that began (rank 0's end of ``fit``, or its last batch of ``predict``), over the result's size.
What lies in workers, files and memory that the main process has not mapped is not in it. It is sampled every
millisecond: the few in which ours brings back 10 MB may be missed. MB are 2**20 bytes.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.contenders import silence_lightning
from benchmarks.report import DEFAULT_OUTPUT, Panel, Spread, draw, paired_ratio, print_table, rotated, write_json

OURS = "ddp_spawn_ext"
NUM_WORKERS = 2
TENSOR_MB = 10
FLOATS_PER_MB = 2**20 // 4
#: Samples, and floats predicted for each: 100 MB.
PREDICTIONS = (3200, 8192)
PREDICTIONS_MB = PREDICTIONS[0] * PREDICTIONS[1] // FLOATS_PER_MB
FEW = (64, 1)
BATCH_SIZE = 32
SAMPLE_MEMORY_EVERY_S = 0.001

#: Largest time of ours over the stock strategy's that we want.
TIME_GOALS = {
    "start: fit": 0.8,
    "start: validate after fit": 0.05,
    "start: test after validate": 0.05,
    "bring back 400 MB": 0.5,
}
#: Largest extra memory over the size of the result that we want.
MEMORY_GOAL = 1.2


# --- what a sample's interpreter and its workers run ---


@dataclass(frozen=True)
class Case:
    """What one interpreter measures.

    Attributes:
        kind: "start", "bring back", "predictions" or "script".
        result_mb: The size of what comes back, where memory is measured.
    """

    kind: str
    result_mb: int = 0

    @property
    def label(self) -> str:
        """The case in words."""
        return f"{self.kind} {self.result_mb} MB" if self.result_mb else self.kind


class Model(pl.LightningModule):
    """One linear layer that is trained; frozen weights that change nevertheless; predictions of any width."""

    def __init__(self, frozen_mb: int = 0, prediction_width: int = 1) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        # Frozen, so that neither gradients nor their all-reduce take part. Not zeros: their pages would not exist yet.
        self.frozen = nn.ParameterList(
            nn.Parameter(torch.ones(TENSOR_MB * FLOATS_PER_MB), requires_grad=False)
            for _ in range(frozen_mb // TENSOR_MB)
        )
        self.prediction_width = prediction_width

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Something to differentiate."""
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Nothing: its start is what counts."""

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Nothing."""

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Rows that tell which sample they belong to."""
        return batch[0].repeat(1, self.prediction_width)

    def on_train_end(self) -> None:
        """Changes the frozen weights, so that they have to come back."""
        for weights in self.frozen:
            weights.add_(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.layer.parameters(), lr=1e-6)


class Clock(pl.Callback):
    """Writes into files when rank 0's worker gets where: the stock strategy brings no callback's state back."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def note(self, trainer: pl.Trainer, event: str) -> None:
        """Writes the time, on the clock that all processes of a host share."""
        if trainer.is_global_zero:
            now = time.monotonic()
            (self.directory / event).write_text(repr(now))

    def time_of(self, event: str) -> float:
        """The last time of an event."""
        return float((self.directory / event).read_text())

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """The first batch counts."""
        if batch_idx == 0:
            self.note(trainer, "train")

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        """The first batch counts."""
        if batch_idx == 0:
            self.note(trainer, "validate")

    def on_test_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        """The first batch counts."""
        if batch_idx == 0:
            self.note(trainer, "test")

    def on_predict_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        """The last batch counts."""
        self.note(trainer, "predict")

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        """The last hook of a callback in a worker."""
        self.note(trainer, "end")


class FileWriter(BasePredictionWriter):
    """How predictions leave the workers of the stock strategy: a file per rank."""

    def __init__(self, directory: Path) -> None:
        super().__init__(write_interval="epoch")
        self.directory = directory

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        """Writes this rank's batches, with the places of their samples in the dataset."""
        torch.save((predictions, batch_indices[0]), self.directory / f"{trainer.global_rank}.pt")

    def read(self, shape: tuple[int, int]) -> Tensor:
        """Reads all ranks' files into one tensor, in the order of the dataset."""
        result = torch.empty(shape)
        for file in sorted(self.directory.glob("*.pt")):
            for batch, indices in zip(*torch.load(file), strict=True):
                result[torch.tensor(indices)] = batch
        return result


class Contender:
    """A Trainer with a strategy and a clock.

    Args:
        strategy: As ``Trainer(strategy=...)`` takes it.
        directory: An empty directory for the clock and the stock strategy's predictions.
    """

    def __init__(self, strategy: str, directory: Path) -> None:
        self.clock = Clock(directory)
        self.writer = None if strategy == OURS else FileWriter(directory)
        self.trainer = pl.Trainer(
            accelerator="cpu",
            devices=NUM_WORKERS,
            strategy=strategy,
            max_epochs=1,
            callbacks=[self.clock, *([self.writer] if self.writer else [])],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )

    def predict(self, model: Model, shape: tuple[int, int]) -> Any:
        """The predictions, in the order of the dataset: a list of batches, or one tensor where they came in files."""
        if self.writer is None:
            return self.trainer.predict(model, make_loader(shape[0]))
        self.trainer.predict(model, make_loader(shape[0]), return_predictions=False)
        return self.writer.read(shape)


def make_loader(num_samples: int) -> DataLoader[Any]:
    """Each sample is its own index."""
    samples = torch.arange(num_samples, dtype=torch.float32).unsqueeze(1)
    return DataLoader(TensorDataset(samples), batch_size=BATCH_SIZE)


def measure_start(contender: Contender, case: Case) -> dict[str, Any]:
    """Seconds from the call of three stages of one Trainer to the first batch of each."""
    model, loader, trainer = Model(), make_loader(FEW[0]), contender.trainer
    stages = {
        "start: fit": ("train", trainer.fit),
        "start: validate after fit": ("validate", trainer.validate),
        "start: test after validate": ("test", trainer.test),
    }
    seconds = {}
    for label, (event, stage) in stages.items():
        called_at = time.monotonic()
        stage(model, loader)
        seconds[label] = contender.clock.time_of(event) - called_at
    return {"seconds": seconds}


def measure_bring_back(contender: Contender, case: Case) -> dict[str, Any]:
    """Seconds from the end of training in a worker to the return of ``fit``."""
    model = Model(frozen_mb=case.result_mb)
    contender.trainer.fit(model, make_loader(FEW[0]))
    returned_at = time.monotonic()
    check_arrived(all(bool((weights == 2).all()) for weights in model.frozen), "weights")
    ended_at = contender.clock.time_of("end")
    return {"seconds": {case.label: returned_at - ended_at}, "window": (ended_at, returned_at)}


def measure_predictions(contender: Contender, case: Case) -> dict[str, Any]:
    """Seconds to have large predictions in the main process: of the whole call, and after the last batch."""
    model = Model(prediction_width=PREDICTIONS[1])
    called_at = time.monotonic()
    predictions = contender.predict(model, PREDICTIONS)
    returned_at = time.monotonic()
    check_predictions(predictions, PREDICTIONS)
    ended_at = contender.clock.time_of("predict")
    seconds = {f"{case.label}: call": returned_at - called_at, f"{case.label}: last batch": returned_at - ended_at}
    return {"seconds": seconds, "window": (ended_at, returned_at)}


def run_script(contender: Contender, case: Case) -> dict[str, Any]:
    """What a short script does; timed from outside."""
    model, loader = Model(), make_loader(FEW[0])
    contender.trainer.fit(model, loader)
    contender.trainer.test(model, loader)
    check_predictions(contender.predict(model, FEW), FEW)
    return {"seconds": {}}


KINDS = {
    "start": measure_start,
    "bring back": measure_bring_back,
    "predictions": measure_predictions,
    "script": run_script,
}


def check_predictions(predictions: Any, shape: tuple[int, int]) -> None:
    """Refuses predictions that are not those of all samples in order."""
    rows = torch.cat([batch[:, [0, -1]] for batch in predictions]) if isinstance(predictions, list) else predictions
    expected = torch.arange(shape[0], dtype=torch.float32)
    check_arrived(len(rows) == shape[0] and bool((rows == expected.unsqueeze(1)).all()), "predictions")


def check_arrived(has_arrived: bool, what: str) -> None:
    """Refuses to time a contender that did not do its work.

    Raises:
        RuntimeError: If it did not.
    """
    if not has_arrived:
        raise RuntimeError(f"The {what} in the main process are not those of the workers.")


# --- what starts the interpreters and sums up ---


class MemorySampler(threading.Thread):
    """Samples the resident memory of another process until that ends; that process does nothing for it.

    Args:
        pid: The process.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.samples: list[tuple[float, int]] = []

    def run(self) -> None:
        """Samples."""
        process = psutil.Process(self.pid)
        while True:
            try:
                self.samples.append((time.monotonic(), process.memory_info().rss))
            except psutil.Error:  # it has ended
                return
            if not self.samples[-1][1]:  # it has ended and nobody has asked for its exit code yet
                return
            time.sleep(SAMPLE_MEMORY_EVERY_S)

    def peak_extra_mb(self, started_at: float, ended_at: float) -> float:
        """The largest size in a window, less the size at its start, in MB."""
        before = [rss for at, rss in self.samples if at <= started_at][-1]
        within = [rss for at, rss in self.samples if started_at < at <= ended_at]
        return (max([before, *within]) - before) / 2**20


def take_sample(case: Case, strategy: str) -> tuple[dict[str, float], float | None]:
    """Measures once, in a new interpreter.

    Returns:
        Seconds by label, and the peak extra memory in MB where the case has a result.

    Raises:
        RuntimeError: If the interpreter fails.
    """
    with TemporaryDirectory() as directory, TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
        request = json.dumps({**asdict(case), "strategy": strategy, "directory": directory})
        started_at = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.spawn", "--measure", request], stdout=output, stderr=errors
        )
        sampler = MemorySampler(process.pid)
        if case.result_mb:
            sampler.start()
        exit_code = process.wait()
        ended_at = time.monotonic()
        output.seek(0)
        errors.seek(0)
        if exit_code != 0:
            raise RuntimeError(f"{case.label} with {strategy} ended with exit code {exit_code}:\n{errors.read()}")
        measured = json.loads(output.read().splitlines()[-1])
    seconds = measured["seconds"] or {f"{case.label}: fit, test, predict": ended_at - started_at}
    return seconds, sampler.peak_extra_mb(*measured["window"]) if case.result_mb else None


def take_sample_here(request: str) -> None:
    """What the new interpreter does: measures, and prints the outcome as its last line."""
    silence_lightning()
    arguments = json.loads(request)
    contender = Contender(arguments.pop("strategy"), Path(arguments.pop("directory")))
    case = Case(**arguments)
    print(json.dumps(KINDS[case.kind](contender, case)))


def measure(case: Case, peer: str, rounds: int) -> list[dict[str, Any]]:
    """Measures a case round by round.

    Returns:
        A summary per label: of seconds, and of memory where the case has a result.
    """
    names = (peer, OURS)
    seconds: dict[str, dict[str, list[float]]] = {}
    extra_mb: dict[str, list[float]] = {name: [] for name in names}
    for round_index in range(rounds):
        for name in rotated(names, round_index):
            by_label, extra = take_sample(case, name)
            for label, value in by_label.items():
                seconds.setdefault(label, {name: [] for name in names})[name].append(value)
            if extra is not None:
                extra_mb[name].append(extra)
    print(f"measured {case.label}", file=sys.stderr, flush=True)
    summaries = [summarize_time(label, peer, samples) for label, samples in seconds.items()]
    return [*summaries, *([summarize_memory(case, extra_mb)] if case.result_mb else [])]


def summarize_time(label: str, peer: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, the ratio within rounds, and the goal as the least such ratio."""
    goal = TIME_GOALS.get(label)
    return {
        "case": label,
        "seconds": {name: vars(Spread.of(samples)) for name, samples in seconds.items()},
        "ratios": {f"{peer}/{OURS}": vars(paired_ratio(seconds[peer], seconds[OURS]))},
        "goal": None if goal is None else {"least_ratio": round(1 / goal, 4)},
        "rounds_seconds": {name: [round(sample, 4) for sample in samples] for name, samples in seconds.items()},
    }


def summarize_memory(case: Case, extra_mb: dict[str, list[float]]) -> dict[str, Any]:
    """Peak extra memory in sizes of the result."""
    return {
        "case": case.label,
        "result_mb": case.result_mb,
        "extra_over_result": {
            name: vars(Spread.of([sample / case.result_mb for sample in samples])) for name, samples in extra_mb.items()
        },
        "goal": {"largest_extra_over_result": MEMORY_GOAL},
        "rounds_extra_mb": {name: [round(sample, 1) for sample in samples] for name, samples in extra_mb.items()},
    }


def present(summaries: list[dict[str, Any]], directory: Path) -> None:
    """Prints the tables and draws the plot."""
    times = [summary for summary in summaries if "seconds" in summary]
    memory = [summary for summary in summaries if "extra_over_result" in summary]
    names, (ratio,) = list(times[0]["seconds"]), times[0]["ratios"]
    time_spreads = {name: [Spread(**summary["seconds"][name]) for summary in times] for name in names}
    ratios = [Spread(**summary["ratios"][ratio]) for summary in times]
    memory_spreads = {name: [Spread(**summary["extra_over_result"][name]) for summary in memory] for name in names}
    least = [summary["goal"] and summary["goal"]["least_ratio"] for summary in times]
    print_table(
        "seconds, 2 CPU workers, a fresh interpreter per sample: median [quartiles]",
        ["case", *names, ratio, "goal", "met"],
        [
            [
                summary["case"],
                *(time_spreads[name][row].text(3) for name in names),
                ratios[row].text(),
                "" if least[row] is None else f"≥ {least[row]:g}",
                "" if least[row] is None else in_words(ratios[row].median >= least[row]),
            ]
            for row, summary in enumerate(times)
        ],
        caption=f"A ratio above 1 means that {OURS} is faster.",
    )
    print_table(
        "peak extra memory of the main process over the size of the result: median [quartiles]",
        ["case", *names, "goal", "met"],
        [
            [
                summary["case"],
                *(memory_spreads[name][row].text() for name in names),
                f"< {MEMORY_GOAL}",
                in_words(memory_spreads[OURS][row].median < MEMORY_GOAL),
            ]
            for row, summary in enumerate(memory)
        ],
    )
    labels = [summary["case"] for summary in times]
    draw(
        directory,
        "spawn",
        "Spawned workers, 2 CPU ranks",
        [
            Panel("seconds", labels, time_spreads, is_logarithmic=True),
            Panel(f"time over {OURS}'s", labels, {ratio: ratios}, line_at=1, line_label="equal", is_logarithmic=True),
            Panel(
                "peak extra memory over size of result",
                [summary["case"] for summary in memory],
                memory_spreads,
                line_at=MEMORY_GOAL,
                line_label="goal",
            ),
        ],
    )


def in_words(is_met: bool) -> str:
    """Whether a goal is met."""
    return "yes" if is_met else "NO"


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default="ddp_spawn", help="Lightning's strategy to compare with, by name")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100, 400], help="MB of weights to bring back")
    parser.add_argument("--rounds", type=int, default=7, help="rounds per case")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="directory of the JSON and the plot")
    parser.add_argument("--quick", action="store_true", help="two rounds, up to 100 MB: to see that it runs")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # how the program calls itself
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.sizes = 2, [10, 100]
    if arguments.rounds < 1:
        parser.error("--rounds must be positive")
    if any(size < 1 or size % TENSOR_MB for size in arguments.sizes):
        parser.error(f"--sizes must be multiples of {TENSOR_MB}")
    if arguments.peer == OURS:
        parser.error(f"--peer {OURS} would compare {OURS} with itself")
    return arguments


def main() -> None:
    """Measures, then prints, writes and draws."""
    arguments = parse_arguments()
    if arguments.measure:
        take_sample_here(arguments.measure)
        return
    cases = [
        Case("start"),
        *(Case("bring back", size) for size in arguments.sizes),
        Case("predictions", PREDICTIONS_MB),
        Case("script"),
    ]
    for name in (arguments.peer, OURS):
        take_sample(Case("start"), name)
    summaries = [summary for case in cases for summary in measure(case, arguments.peer, arguments.rounds)]
    present(summaries, arguments.output)
    settings = {"peer": arguments.peer, "rounds": arguments.rounds, "sizes": arguments.sizes}
    write_json(arguments.output, "spawn", {"settings": settings, "results": summaries})


if __name__ == "__main__":
    main()
