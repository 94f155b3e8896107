"""Starts one run of a contender of :mod:`benchmarks.rank_loss`, and computes figures from the records of its ranks."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import IO

from benchmarks.rank_launcher import end_tree, free_port
from benchmarks.rank_loss_training import NUM_RANKS, PLAIN, RESTARTED, SPAWN, STOCK, TORCHFT, Job, Step, read_steps

HAS_TORCHFT = find_spec("torchft") is not None
#: Time limit of one run, in seconds, which only a hang reaches.
LIMIT_S = 400.0
_POLL_S = 0.01

TORCHRUN = (
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    str(NUM_RANKS),
    "--monitor-interval",
    "0.1",
)
RESTARTS = ("--max-restarts", "3", "-m")


def run(job: Job, heartbeat_timeout_ms: int) -> dict[str, float]:
    """Trains once.

    Args:
        job: The run. This function creates its directory.
        heartbeat_timeout_ms: Time after which torchft's lighthouse treats an unresponsive replica as exited.

    Returns:
        The figures by name, see :func:`figures`.

    Raises:
        RuntimeError: If the run fails.
    """
    with tempfile.TemporaryDirectory() as directory:
        job = replace(job, directory=directory)
        with open(Path(directory, "output"), "w+") as output:
            try:
                START[job.contender](job, output, heartbeat_timeout_ms)
            except RuntimeError as error:
                output.seek(0)
                raise RuntimeError(f"{job.contender}: {error}\n{output.read()[-20_000:]}") from error
        return figures(job, read_steps(job))


def run_torchrun(script: str, *options: str, **variables: str) -> Callable[[Job, IO[str], int], None]:
    """Returns the command that runs a script under torchrun."""
    return lambda job, output, _: wait_for([start([*TORCHRUN, *options, script, job.argument], output, **variables)])


def run_spawn(job: Job, output: IO[str], _: int) -> None:
    """Runs a script that starts its own workers."""
    wait_for([start(["-m", "benchmarks.rank_loss_lightning", job.argument], output)])


def run_torchft(job: Job, output: IO[str], heartbeat_timeout_ms: int) -> None:
    """Runs two replica groups and a lighthouse, and restarts a group immediately after the kill."""
    port = free_port()
    # As in torchft's README, except for the address.
    options = {
        "bind": f"127.0.0.1:{port}",
        "min_replicas": 1,
        "quorum_tick_ms": 100,
        "join_timeout_ms": 10_000,
        "heartbeat_timeout_ms": heartbeat_timeout_ms,
    }
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    # The function of torchft's command `torchft_lighthouse`, whose path depends on how torchft was installed.
    script = Path(job.directory, "lighthouse.py")
    script.write_text("from torchft._torchft import lighthouse_main\n\nlighthouse_main()\n")
    lighthouse = start([str(script), *arguments], output)

    def start_group(group: int) -> "subprocess.Popen[bytes]":
        arguments = ["-m", "benchmarks.rank_loss_torchft", job.argument, str(group)]
        return start(arguments, output, TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{port}")

    try:
        wait_for([start_group(group) for group in range(NUM_RANKS)], start_group)
    finally:
        end_tree(lighthouse)


START: dict[str, Callable[[Job, IO[str], int], None]] = {
    PLAIN: run_torchrun("benchmarks.rank_loss_plain", "-m"),
    SPAWN: run_spawn,
    RESTARTED: run_torchrun("benchmarks.rank_loss_lightning", *RESTARTS),
    # With torch 2.13, some restarts of stock wait indefinitely, because of entries of exited ranks in a shared store.
    STOCK: run_torchrun("benchmarks.rank_loss_lightning", *RESTARTS, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
    TORCHFT: run_torchft,
}


def start(arguments: list[str], output: IO[str], **variables: str) -> "subprocess.Popen[bytes]":
    """Starts this Python with arguments. Its ranks have one thread each, and use the loopback interface."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    return subprocess.Popen([sys.executable, *arguments], stdout=output, stderr=subprocess.STDOUT, env=environment)


def wait_for(
    processes: list["subprocess.Popen[bytes]"],
    start_again: Callable[[int], "subprocess.Popen[bytes]"] | None = None,
) -> None:
    """Waits until all processes have exited; kills the remaining ones and their descendants after an error.

    Args:
        processes: The processes.
        start_again: Called once, with the index of the first process that was killed.

    Raises:
        RuntimeError: If a process fails, or the time limit is reached.
    """
    deadline = time.monotonic() + LIMIT_S
    try:
        while any(process.poll() is None for process in processes):
            for index, process in enumerate(processes):
                if process.poll() == -signal.SIGKILL and start_again is not None:
                    processes[index], start_again = start_again(index), None
                elif process.returncode:
                    raise RuntimeError(f"The process exited with code {process.returncode}.")
            if time.monotonic() > deadline:
                raise RuntimeError(f"The process has not exited within {LIMIT_S:g} s.")
            time.sleep(_POLL_S)
        if any(process.returncode for process in processes):
            raise RuntimeError("It failed.")
    finally:
        for process in processes:
            end_tree(process)


def figures(job: Job, steps: list[Step]) -> dict[str, float]:
    """Computes the figures of a run.

    Returns:
        ``step_ms``, the median time between the ends of two steps without a commit between them; ``commit_ms``, the
        additional time with a commit. Except for the plain loop: ``next_s`` and ``back_s``, seconds from the kill to
        the end of the next step of any rank, and to the end of the first step with all ranks that has the number of
        the last step before the kill; ``redone``, samples of discarded steps; ``twice`` and ``lost``, samples that the
        final training has more than once, and not at all; ``loading_s``, the time in which stock loads its checkpoint.
    """
    # Until the kill, all ranks do the same steps, so the record of one rank suffices. The first commit with Adam's
    # moments allocates memory, so the figures start after it.
    ends = [step for step in steps if step.rank == 0 and not step.is_after and step.number <= job.kill_at]
    periods = [
        (before.number, after.at - before.at) for before, after in pairwise(ends) if before.number > job.interval
    ]
    ordinary = median(period for number, period in periods if number % job.interval)
    found = {
        "step_ms": 1e3 * ordinary,
        "commit_ms": 1e3 * (median(period for number, period in periods if number % job.interval == 0) - ordinary),
    }
    return found if job.contender == PLAIN else {**found, **after_kill(job, steps)}


def after_kill(job: Job, steps: list[Step]) -> dict[str, float]:
    """Computes the costs of the kill, see :func:`figures`."""
    killed_at = float(job.killed.read_text())
    after = [step for step in steps if step.is_after or step.number > job.kill_at]
    restored_step = min(step.number for step in after) - 1
    before = [step for step in steps if not (step.is_after or step.number > job.kill_at)]
    counted = [*(step for step in before if step.number <= restored_step), *after]
    times_trained = Counter(sample for step in counted for sample in step.samples)
    loading = Path(job.directory, "loading")
    return {
        "next_s": after[0].at - killed_at,
        "back_s": next(step.at for step in after if step.number >= job.kill_at and step.world_size == NUM_RANKS)
        - killed_at,
        "redone": sum(len(step.samples) for step in before if step.number > restored_step),
        "twice": times_trained.total() - len(times_trained),
        "lost": job.num_samples - len(times_trained),
        "loading_s": sum(map(float, loading.read_text().split())) if loading.exists() else 0.0,
    }
