"""Starts :mod:`.elastic_training`, with ``horovodrun`` and a discovery script, torchrun or by itself, and reads what it
left."""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.horovod_launch import FIRST, SECOND, count_ranks, elastic_horovodrun
from tests.support.elastic_training import NUM_EPOCHS, NUM_TRAINED
from tests.support.ranks import SELDOM, run_command

STRATEGY = {"commit_every_n_steps": 20}
#: What an undisturbed run with two ranks comes to; `test_an_undisturbed_run` holds it to that.
UNDISTURBED_ACCURACY = 0.98
#: How far from that a run may come whose ranks change. The step at which they do, which is another one on a busy
#: machine, and whose dropout and means of batches go on from there, decide over single images of the 360: each of 33
#: runs came to between 351 and 357 of them. A batch that is left out or comes twice, or a wrong learning rate, is found
#: by what else is asserted.
LEARNING_NOISE = 0.02
#: Pauses while one of two is not there.
UNTIL_IT_JOINS: dict[str, Any] = {"pause_s": 0.04, "pauses_in": [1]}


def awaits(after: int = 0) -> dict[str, Any]:
    """An event: who is started anew comes when the others have gone on, however slow they were."""
    return {"do": "await", "at": "setup", "step": 0, "rank": "any", "after": after}


@dataclass
class Run:
    """What a run has left.

    Attributes:
        output: Of all ranks.
        code: Exit code of ``horovodrun``.
        lines: Of all processes, in the order of time; ``pid`` says whose.
        checkpoints: Paths of checkpoints in the run's own directory, to what is in them.
    """

    output: str
    code: int
    lines: list[dict[str, Any]]
    checkpoints: dict[str, Any]

    def having(self, key: str) -> list[dict[str, Any]]:
        """The lines with a key."""
        return [line for line in self.lines if key in line]

    @property
    def ends(self) -> list[dict[str, Any]]:
        """What the ranks that came to the end say, in the order of ranks."""
        return sorted(self.having("accuracy"), key=lambda line: line["rank"])

    @property
    def worlds(self) -> list[tuple[int, int]]:
        """(ranks, step at which they began) of each world."""
        return [(line["world"], line["step"]) for line in self.having("world") if line["rank"] == 0]

    def logged(self) -> dict[tuple[int, int], tuple[float, ...]]:
        """Samples, those that a metric has counted, and mean loss as ``self.log`` has them, by rank and epoch.

        Where an epoch was repeated, they are those of the last time.
        """
        names = "seen", "counted", "loss_epoch"
        return {(line["rank"], line["epoch"]): tuple(line[name] for name in names) for line in self.having("seen")}

    def counts_per_epoch(self) -> list[Counter]:
        """How often each sample counts, by epoch of the first `fit`: what a later world has begun before is undone."""
        kept: list[dict[str, Any]] = []
        for line in self.lines:
            if "validated" in line:
                break
            if "world" in line and line["rank"] == 0:
                begin = line["epoch"], line["batch"]
                kept = [other for other in kept if (other["epoch"], other["batch"]) < begin]
            elif "samples" in line:
                kept.append(line)
        counts = [Counter() for _ in range(1 + max(line["epoch"] for line in kept))]
        for line in kept:
            counts[line["epoch"]].update(line["samples"])
        return counts


def run_elastic(
    hosts: tuple[str, ...] = (FIRST, SECOND),
    min_ranks: int = 1,
    arguments: tuple[str, ...] = (),
    timeout_s: float = 150,
    keep: Path | None = None,
    enter: tuple[str, ...] = (),
    variables: dict[str, str] | None = None,
    **plan: Any,
) -> Run:
    """Runs the script.

    Args:
        hosts: At the start, with one rank each, or as many as stand after a colon.
        min_ranks: ``--min-np``.
        arguments: Further ones of ``horovodrun``.
        timeout_s: Seconds until the run is given up.
        keep: Its directory; a temporary one if None.
        enter: What stands before a command to run it on a certain host.
        variables: Of the environment.
        plan: Of the script. Its pauses end when the ranks change, if it does not say in how large worlds they are.
    """
    plan["num_ranks"] = count_ranks(hosts)

    def command(directory: Path) -> list[str]:
        interface = "eth0" if enter else "lo"
        start = elastic_horovodrun(directory, hosts, min_ranks, *arguments, interface=interface)
        return [*enter, *start]

    return _run(command, plan, timeout_s, keep, variables)


def run_workers(workers: int, timeout_s: float = 150, keep: Path | None = None, **plan: Any) -> Run:
    """Runs the script, whose ``fit`` starts its ranks.

    Args:
        workers: How many.
        timeout_s: Seconds until the run is given up.
        keep: Its directory; a temporary one if None.
        plan: Of the script.
    """
    plan |= {"num_ranks": workers, "workers": workers}
    return _run(lambda directory: [], plan, timeout_s, keep)


def run_on_ray(
    workers: int, variables: dict[str, str], timeout_s: float, enter: tuple[str, ...] = (), **plan: Any
) -> Run:
    """Runs the script, whose ``fit`` has Ray start its ranks.

    Args:
        workers: How many.
        variables: Of the environment, by which it finds the cluster.
        timeout_s: Seconds until the run is given up.
        enter: What stands before a command to run it on a certain host.
        plan: Of the script.
    """
    plan |= {"num_ranks": workers, "workers": workers, "is_on_ray": True}
    return _run(lambda directory: [*enter], plan, timeout_s, None, variables)


def run_torchrun(ranks: int, timeout_s: float = 150, **plan: Any) -> Run:
    """Runs the script with torchrun, whose agent starts all ranks anew when one fails.

    Args:
        ranks: How many.
        timeout_s: Seconds until the run is given up.
        plan: Of the script.
    """
    plan |= {"num_ranks": ranks, "local_ranks": ranks}

    def command(directory: Path) -> list[str]:
        run_id = f"--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --rdzv-id={directory.name}"
        options = f"--nproc-per-node={ranks} --max-restarts=3 --monitor-interval=0.1 {run_id}"
        return [sys.executable, "-m", "torch.distributed.run", *options.split(), "--no-python"]

    return _run(command, plan, timeout_s, None)


def _run(
    command: Callable[[Path], list[str]],
    plan: dict[str, Any],
    timeout_s: float,
    keep: Path | None,
    variables: dict[str, str] | None = None,
) -> Run:
    with tempfile.TemporaryDirectory() as temporary:
        directory = temporary if keep is None else str(keep)
        result = run_command(
            *command(Path(directory)),
            *(sys.executable, "-m", "tests.support.elastic_training", directory, json.dumps(plan)),
            env={"OMP_NUM_THREADS": "1", **SELDOM, **(variables or {})},
            timeout_s=timeout_s,
        )
        return read_run(Path(directory), result.stdout, result.returncode)


def read_run(directory: Path, output: str, code: int) -> Run:
    """What a run has left in its directory, so far."""
    import torch

    lines = [
        {**json.loads(line), "pid": path.name}
        for path in directory.glob("process*")
        for line in path.read_text().splitlines()
    ]
    checkpoints = {str(path): torch.load(path, weights_only=False) for path in directory.glob("*.ckpt")}
    return Run(output, code, sorted(lines, key=lambda line: line["time"]), checkpoints)


def check_is_as_good_as_undisturbed(
    run: Run, num_epochs: int = NUM_EPOCHS, *, from_disk: bool = False, within: float = LEARNING_NOISE
) -> None:
    """Whether all samples of all epochs have counted once, and what was learned is worth as much.

    What ranks have added up within an epoch is in no checkpoint on disk, as with Lightning.
    """
    assert run.code == 0, run.output
    assert run.ends, run.output
    # After another `fit`, of one epoch with the first learning rate, it may be a little less.
    learned = [line["validated"] for line in run.having("validated")] or [end["accuracy"] for end in run.ends]
    assert learned == [pytest.approx(UNDISTURBED_ACCURACY, abs=within)] * len(learned)
    for end in run.ends:
        assert end["accuracy"] > 0.95
        assert end["weights"] == run.ends[0]["weights"]
    counts = run.counts_per_epoch()
    assert len(counts) == num_epochs
    assert from_disk or {(seen, counted) for seen, counted, _ in run.logged().values()} == {(NUM_TRAINED, NUM_TRAINED)}
    for count in counts:
        assert len(count) == NUM_TRAINED
        assert set(count.values()) == {1}
