"""The processes that run the user's script once more, for each further device of this host.

Until the ranks have met, only this process can notice that one of them ends, at an error in the script, say: it would
wait for it until the timeout. From then on each rank's failure monitor does
(:mod:`lightning_strategies_ext.failure.failure_monitor`). Lightning has an observer for the same, which kills all ranks
at once, also ranks that still save a checkpoint or write a report.
"""

import atexit
import os
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment

from lightning_strategies_ext import host_store, rank_variables
from lightning_strategies_ext._lightning import launching
from lightning_strategies_ext._system.gpu_sync import sees_one_gpu
from lightning_strategies_ext.failure.failure_detector import describe_exit
from lightning_strategies_ext.failure.failure_monitor import GRACE_S, KILL_MARGIN_S, current_monitor, known_failure
from lightning_strategies_ext.failure.failure_report import print_line, print_report
from lightning_strategies_ext.failure.process_exit import exit_now, fail_at_exit
from lightning_strategies_ext.launch.command import find_command

#: How often a process is asked whether it has ended, in seconds.
_POLL_S = 0.1
#: How long a process may take to end that has done nothing yet, in seconds.
_END_S = 3.0
#: How long the process that has started others waits for them at its end without a word, in seconds.
_WARN_AFTER_S = 10.0

_WORLD_SIZE = "WORLD_SIZE"
_started: list["subprocess.Popen[Any]"] = []
#: The user's values of variables that have others during a stage.
_replaced: dict[str, str | None] = {}


@contextmanager
def running_script_processes(launcher: Any, are_connected: Callable[[], bool]) -> Generator[None, None, None]:
    """Starts the processes of a launcher of Lightning's, unless they are there already.

    They end with what is done in it, if that fails before the ranks have met.

    Args:
        launcher: The launcher.
        are_connected: Whether this process has met the others, so that it need not look after them.
    """
    environment = launcher.cluster_environment
    environment.validate_settings(num_devices=launcher.num_processes, num_nodes=launcher.num_nodes)
    try:
        if not environment.creates_processes_externally:
            _start(launcher)
            _started.extend(launcher.procs)
            if launcher.procs:
                threading.Thread(
                    target=_wait_until_connected,
                    args=(list(launcher.procs), are_connected),
                    daemon=True,
                    name="script watch",
                ).start()
        if isinstance(environment, LightningEnvironment):
            _replaced.setdefault(_WORLD_SIZE, os.environ.get(_WORLD_SIZE))
            os.environ[_WORLD_SIZE] = str(launcher.num_processes * launcher.num_nodes)
        launching.set_num_threads_if_needed(num_processes=launcher.num_processes)
        yield
    except BaseException:
        if not are_connected():
            _end(launcher.procs)
        raise
    finally:
        if _started:  # before the watch ends, which knows if one of them is stuck
            atexit.unregister(_wait_for_all)
            atexit.register(_wait_for_all)


def environment_of_child(environment: ClusterEnvironment | None) -> ClusterEnvironment | None:
    """The cluster environment of a strategy; in a process that a rank has started, one in which it starts ranks.

    Args:
        environment: As the user has chosen it; then it stays.
    """
    if environment is None and rank_variables.drop_inherited():
        return LightningEnvironment()
    return environment


def devices_of_ranks(
    devices: list[torch.device], environment: ClusterEnvironment, num_nodes: int
) -> list[torch.device]:
    """The devices of the ranks of this host; where each process sees one GPU only, each rank has that GPU.

    With SLURM's ``--gpus-per-task=1``, for example: a process cannot name the GPUs of the others.

    Args:
        devices: As passed to the Trainer or Fabric.
        environment: Where ranks come from.
        num_nodes: Number of hosts.
    """
    if not environment.creates_processes_externally or not sees_one_gpu(devices):
        return devices
    num_tasks = os.environ.get("SLURM_NTASKS_PER_NODE") if isinstance(environment, SLURMEnvironment) else None
    return devices * (int(num_tasks) if num_tasks else max(1, environment.world_size() // num_nodes))


def tear_down(environment: ClusterEnvironment) -> None:
    """Tears a cluster environment down at the end of a stage, and restores the user's environment variables.

    Lightning's deletes ``WORLD_SIZE``, also that of the user.
    """
    user_value = _replaced.pop(_WORLD_SIZE, os.environ.get(_WORLD_SIZE))
    environment.teardown()
    if user_value is not None:
        os.environ[_WORLD_SIZE] = user_value


def _start(launcher: Any) -> None:
    """Starts the script for each further device, and appends the processes to ``launcher.procs``."""
    environment = launcher.cluster_environment
    if environment.local_rank() != 0:
        raise RuntimeError(
            f"Local rank {environment.local_rank()} would start the other ranks of its host, which only local rank 0"
            f" does. `creates_processes_externally` of {type(environment).__name__} must be True in the other ranks."
        )
    local_ranks = range(1, launcher.num_processes)
    commands = {rank: launching.hydra_command(rank) or find_command() for rank in local_ranks}
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    os.environ["NODE_RANK"] = str(environment.node_rank())
    os.environ["LOCAL_RANK"] = "0"
    if launcher.num_nodes == 1 and host_store.is_available():
        name = host_store.new_name()
        os.environ[rank_variables.STORE] = rank_variables.store_variable(name, os.environ["MASTER_PORT"])
        os.environ.pop(rank_variables.OWNER, None)  # this process becomes a rank of its own launch
    else:
        os.environ.pop(rank_variables.STORE, None)
    world_size = str(launcher.num_processes * launcher.num_nodes)
    inherited = {_WORLD_SIZE: world_size, **rank_variables.environment_for_ranks()}
    for rank, (command, directory) in commands.items():
        variables = {**inherited, "LOCAL_RANK": str(rank)}
        launcher.procs.append(subprocess.Popen(command, env=variables, cwd=directory))


def _end(processes: "Sequence[subprocess.Popen[Any]]") -> None:
    """Ends processes that wait for this one to meet them, and would for long; nobody need look after them any more."""
    _started[:] = [process for process in _started if process not in processes]
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()


def get_exit_code(pid: int) -> int | None:
    """The exit code of one of the processes, negative for a signal; None if it runs, or is none of them."""
    for process in _started:
        if process.pid == pid:
            return process.poll()
    return None


def _wait_for_all() -> None:
    """At the end of this process, which the user has started: waits for the others, not for long if one has failed."""
    say_at, deadline = time.monotonic() + _WARN_AFTER_S, inf
    watch = current_monitor()
    while any(process.poll() is None for process in _started) and time.monotonic() < deadline:
        if watch is not None and known_failure() is None:
            watch.announce_script_end()
        if known_failure() is not None:
            if watch is not None:
                watch.finish_stage()  # under Fabric its last one is not over before: the others need nothing more of it
            deadline = min(deadline, time.monotonic() + GRACE_S + KILL_MARGIN_S)
        elif time.monotonic() > say_at:
            ranks = [str(rank) for rank, process in enumerate(_started, 1) if process.poll() is None]
            print_line(f"rank 0 has come to its end; rank {' and '.join(ranks)} still works.")
            say_at = inf
        time.sleep(_POLL_S)
    failed = {rank: process for rank, process in enumerate(_started, 1) if process.poll() != 0}
    failure = known_failure()
    if failure is not None and not failure.is_self_reported:  # they could not say it, whatever they ended with
        print_report(failure)
        fail_at_exit()
    for rank, process in failed.items():
        fail_at_exit()
        if failure is None:
            how = "does not end" if process.returncode is None else f"has ended with exit code {process.returncode}"
            print_line(f"rank {rank} (pid {process.pid}) {how}; the exit code of this one is 1.")


def _wait_until_connected(processes: "list[subprocess.Popen[Any]]", are_connected: Callable[[], bool]) -> None:
    while not are_connected() and all(process in _started for process in processes):
        for rank, process in enumerate(processes, 1):
            exit_code = process.poll()
            if exit_code is not None and not are_connected() and process in _started:
                print_line(
                    f"rank {rank} (pid {process.pid}) {describe_exit(exit_code)}, before the ranks had met; all end."
                )
                _end(processes)
                exit_now(1)
        time.sleep(_POLL_S)
