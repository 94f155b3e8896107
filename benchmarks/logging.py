"""Cost of values that ranks log together: per training step, and at the end of an epoch.

    python -m benchmarks.logging
    python -m benchmarks.logging --hosts              # two hosts that are network namespaces, at 1 Gbit/s; needs root
    python -m benchmarks.logging --hosts --delays 1   # only with a relay that delays each packet by 1 ms
    python -m benchmarks.logging --quick

Two CPU ranks, one torch thread each, the MLP of :mod:`benchmarks.step_time` with h=32. A step logs 0, 1, 5, or 20
values, with ``sync_dist=True`` and without. An epoch ends with 40 synchronized keys, or with a MetricCollection of ten
metrics of torchmetrics. The end of an epoch takes from the end of the last validation batch to the hooks at the end of
the validation, in which the values of all ranks are available. The slowest rank of a round counts, and ratios are
computed within a round. "Added by 20 synchronized" is the additional time of 20 values with ``sync_dist=True``: a
training logs them with and without it in turns, and the median of the differences between one step and the next counts,
because trainings differ from each other by more than this time.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import MeanMetric, MetricCollection

from benchmarks import network_namespaces
from benchmarks.contenders import Batches, Case, Classifier, Length, StepTimer, silence_lightning
from benchmarks.rank_launcher import join, run_ranks
from benchmarks.report import Spread, of_slowest_rank, paired_ratio, parse, print_table, rotated, write_json

STOCK = "ddp"
EXT = "ddp_ext, shm"
EXT_OVER_GLOO = "ddp_ext, gloo"
#: Contender → strategy and backend.
CONTENDERS = {STOCK: ("ddp", "gloo"), EXT: ("ddp_ext", "shm"), EXT_OVER_GLOO: ("ddp_ext", "gloo")}
NUMBERS = (0, 1, 5, 20)
NUM_EPOCH_KEYS = 40
NUM_METRICS = 10
MLP = Case(32)
KEYS, METRICS = "40 keys", "10 metrics"
_PORT = 29700
_TIMEOUT_S = 1200


def step_label(number: int, is_synchronized: bool) -> str:
    """Returns the row of a step."""
    return f"{number} values{', synchronized' if is_synchronized else ''}"


def added_label(number: int) -> str:
    """Returns the row of the time that synchronization adds to a step."""
    return f"added by {number} synchronized"


class TurnsTimer(pl.Callback):
    """Compares each step with an odd number with the step before it."""

    def __init__(self, length: Length) -> None:
        self.length = length
        self.starts: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Reads the clock. Lightning may read the logged values of a step after all hooks of the step."""
        self.starts.append(time.perf_counter())

    @property
    def added_ms(self) -> float:
        """Median of the additional milliseconds."""
        ms = [(end - start) * 1e3 for start, end in pairwise(self.starts)]
        first = self.length.warmup + self.length.warmup % 2
        return median(odd - even for even, odd in zip(ms[first::2], ms[first + 1 :: 2], strict=False))


class LogsInStep(Classifier):
    """Logs a number of values in each training step.

    Args:
        number: Number of values.
        is_synchronized: Whether they are synchronized; None: in each step with an odd number.
    """

    def __init__(self, number: int, is_synchronized: bool | None) -> None:
        super().__init__(MLP)
        self.is_synchronized = is_synchronized
        # Lightning requires the same arguments for a key in all steps.
        self.names = {flag: [f"value_{index}_{flag}" for index in range(number)] for flag in (False, True)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Returns the loss."""
        loss = super().training_step(batch, batch_idx)
        is_synchronized = batch_idx % 2 == 1 if self.is_synchronized is None else self.is_synchronized
        for name in self.names[is_synchronized]:
            self.log(name, loss, sync_dist=is_synchronized)
        return loss


class LogsInEpoch(Classifier):
    """Logs synchronized keys, or metrics of torchmetrics, in each validation step."""

    def __init__(self, content: str) -> None:
        super().__init__(MLP)
        self.names = [f"value_{index}" for index in range(NUM_EPOCH_KEYS)] if content == KEYS else []
        metrics = {f"metric_{index}": MeanMetric() for index in range(NUM_METRICS)} if content == METRICS else {}
        self.metrics = MetricCollection(metrics, compute_groups=False)  # type: ignore[arg-type]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Logs everything."""
        loss = super().training_step(batch, batch_idx).detach()
        for name in self.names:
            self.log(name, loss, sync_dist=True)
        if self.metrics:
            self.metrics.update(loss)
            self.log_dict(self.metrics)


class EpochEndTimer(pl.Callback):
    """Times each end of a validation, except the first ones."""

    NUM_WARMUP = 5

    def __init__(self) -> None:
        self.began_at = 0.0
        self.times_ms: list[float] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        """Reads the clock; the ranks begin together."""
        dist.barrier()
        self.began_at = time.perf_counter()

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        """Reads the values, and the clock."""
        assert trainer.callback_metrics
        self.times_ms.append((time.perf_counter() - self.began_at) * 1e3)

    @property
    def median_ms(self) -> float:
        """Milliseconds per end of an epoch."""
        return median(self.times_ms[self.NUM_WARMUP :])


def make_trainer(strategy: str, callback: pl.Callback, **settings: Any) -> pl.Trainer:
    """Returns a Trainer without loggers, checkpoints, and output."""
    return pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("NUM_LOCAL_RANKS", dist.get_world_size())),
        num_nodes=int(os.environ.get("NUM_HOSTS", 1)),
        strategy=strategy,
        max_epochs=1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        log_every_n_steps=10**9,
        **settings,
    )


def time_steps(number: int, is_synchronized: bool, strategy: str, length: Length) -> float:
    """Returns milliseconds per training step."""
    timer = StepTimer(length)
    make_trainer(strategy, timer).fit(LogsInStep(number, is_synchronized), Batches(MLP, length))
    return timer.ms_per_step


def time_added(number: int, strategy: str, length: Length) -> float:
    """Returns the milliseconds that a training step takes longer if it synchronizes its values."""
    timer = TurnsTimer(length)
    make_trainer(strategy, timer).fit(LogsInStep(number, None), Batches(MLP, length))
    return timer.added_ms


def time_epoch_ends(content: str, strategy: str, length: Length) -> float:
    """Returns milliseconds per end of a validation, one after each training batch."""
    timer = EpochEndTimer()
    short = Length(timer.NUM_WARMUP, max(5, length.steps // 2))
    trainer = make_trainer(strategy, timer, val_check_interval=1, limit_val_batches=1)
    trainer.fit(LogsInEpoch(content), Batches(MLP, short), Batches(MLP, short))
    return timer.median_ms


def rows() -> dict[str, Callable[[str, Length], float]]:
    """Returns the rows of the first table: label → function of the strategy and the length."""
    steps = {
        step_label(number, is_synchronized): partial(time_steps, number, is_synchronized)
        for number in NUMBERS
        for is_synchronized in ((False, True) if number else (False,))
    }
    return {**steps, **{f"end of epoch, {content}": partial(time_epoch_ends, content) for content in (KEYS, METRICS)}}


def added_rows() -> dict[str, Callable[[str, Length], float]]:
    """Returns the rows with additional times, as :func:`rows`."""
    return {added_label(number): partial(time_added, number) for number in NUMBERS if number}


def measure(names: list[str], rounds: int, steps: int, switches_groups: bool = True) -> dict[str, dict[str, Any]]:
    """Measures all rows of all contenders, round by round. Runs on every rank.

    Returns:
        Contender → row → milliseconds in each round.
    """
    silence_lightning()
    length, functions = Length(warmup=8, steps=steps), rows() | added_rows()
    ms: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in names}
    for round_index in range(rounds):
        for name in rotated(names, round_index):
            strategy, backend = CONTENDERS[name]
            if switches_groups:
                join(backend)
            for label in rotated([*functions], round_index):
                gc.collect()
                dist.barrier()
                ms[name][label].append(functions[label](strategy, length))
    return ms


def summarize(per_rank: list[dict[str, dict[str, list[float]]]]) -> dict[str, Any]:
    """Merges the measurements of the ranks."""
    ms = {name: of_slowest_rank([rank[name] for rank in per_rank]) for name in per_rank[0]}
    stock = ms[STOCK]
    return {
        "ms": {name: {label: vars(Spread.of(times)) for label, times in each.items()} for name, each in ms.items()},
        "added_by_20_over_added_by_1": {
            name: median(each[added_label(20)]) / median(each[added_label(1)]) for name, each in ms.items()
        },
        "times_stock": {
            name: {label: vars(paired_ratio(stock[label], each[label])) for label in rows()}
            for name, each in ms.items()
            if name != STOCK
        },
        "rounds_ms": ms,
    }


def present(title: str, summary: dict[str, Any]) -> None:
    """Prints the tables."""
    names = [*summary["ms"]]
    table = [
        [label, *(Spread(**summary["ms"][name][label]).text(3) for name in names)] for label in rows() | added_rows()
    ]
    table.append(
        ["added by 20 / added by 1", *(f"{summary['added_by_20_over_added_by_1'][name]:.2f}" for name in names)]
    )
    print_table(f"{title}: ms per step, or per end of an epoch", ["row", *names], table)
    contenders = [*summary["times_stock"]]
    ratios = [
        [label, *(Spread(**summary["times_stock"][name][label]).text() for name in contenders)] for label in rows()
    ]
    print_table(f"{title}: times the speed of {STOCK}", ["row", *contenders], ratios)


def measure_on_hosts(names: list[str], rounds: int, steps: int, rate: float, delay_ms: float) -> list[dict[str, Any]]:
    """Runs :func:`measure` in one rank on each of two hosts, over gloo.

    Args:
        names: Contenders.
        rounds: Rounds per row.
        steps: Timed steps per training.
        rate: Megabits per second between the hosts.
        delay_ms: Milliseconds that each packet takes longer.

    Raises:
        RuntimeError: If a rank has failed.
    """
    with tempfile.TemporaryDirectory() as name:
        with network_namespaces.hosts(2, Path(name), delay_ms=delay_ms) as hosts:
            ranks = []
            for node, host in enumerate(hosts):
                host.set_rate(rate)
                variables = {"NODE_RANK": node, "LOCAL_RANK": 0, "RANK": node, "WORLD_SIZE": 2, "MASTER_PORT": _PORT}
                variables |= {"MASTER_ADDR": hosts[0].address, "NUM_HOSTS": 2, "NUM_LOCAL_RANKS": 1}
                variables |= {"OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "eth0"}
                environment = {**os.environ, **{key: str(value) for key, value in variables.items()}}
                task = json.dumps([names, rounds, steps, str(Path(name, f"{node}.json"))])
                command = [*host.enter(), sys.executable, "-m", "benchmarks.logging", "--rank", task]
                ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
            try:
                errors = [rank.communicate(timeout=_TIMEOUT_S)[1] for rank in ranks]
            finally:
                for host in hosts:
                    host.kill_all()
            if any(rank.returncode for rank in ranks):
                raise RuntimeError("\n".join(error[-3000:] for error in errors))
        return [json.loads(Path(name, f"{node}.json").read_text()) for node in range(2)]


def run_rank(task: str) -> None:
    """Runs one rank of :func:`measure_on_hosts`."""
    names, rounds, steps, path = json.loads(task)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Path(path).write_text(json.dumps(measure(names, rounds, steps, switches_groups=False)))
    with suppress(RuntimeError):  # the other rank may have exited
        dist.destroy_process_group()


def main() -> None:
    """Measures, prints the tables, and writes the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="rounds per row")
    parser.add_argument("--steps", type=int, default=48, help="timed steps per training")
    parser.add_argument("--hosts", action="store_true", help="measure on two hosts, which are network namespaces")
    parser.add_argument("--rate", type=float, default=1000.0, help="megabits per second between these hosts")
    parser.add_argument(
        "--delays", type=float, nargs="+", help="with --hosts: milliseconds by which a relay delays each packet"
    )
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parse(parser, "two rounds of 12 steps", rounds=2, steps=12)
    if arguments.rank:
        run_rank(arguments.rank)
        return
    numbers = arguments.rounds, arguments.steps
    settings: dict[str, Any] = {"rounds": arguments.rounds, "steps": arguments.steps}
    if arguments.delays and not arguments.hosts:
        parser.error("--delays requires --hosts.")
    if not arguments.hosts:
        summary = summarize(run_ranks(measure, [*CONTENDERS], *numbers))
        present("one host", summary)
        write_json(arguments.output, "logging", {"settings": settings, "results": summary})
        return
    summaries = {}
    for delay_ms in arguments.delays or (0.0, 1.0):
        title = f"two hosts, {arguments.rate:g} Mbit/s" + (f", delayed by {delay_ms:g} ms" if delay_ms else "")
        per_rank = measure_on_hosts([STOCK, EXT_OVER_GLOO], *numbers, arguments.rate, delay_ms)
        summaries[title] = summarize(per_rank)
        present(title, summaries[title])
    settings["rate"] = arguments.rate
    write_json(arguments.output, "logging_hosts", {"settings": settings, "results": summaries})


if __name__ == "__main__":
    main()
