"""Launchers of script processes, which run the user's script again for each further device of this host.

Until the ranks have connected, only this process can detect that a rank exits, for example because of an error in the
script. Otherwise it would wait for the rank until the timeout. Later, the failure monitor of each rank detects exits
(:mod:`lightning_strategies_ext.failure.failure_monitor`). Lightning's observer of script processes is not used: it
kills all ranks at once, including ranks that are saving a checkpoint or writing a report.
"""

import atexit
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from typing_extensions import override

from lightning_strategies_ext import discovery, host_store, rank_variables
from lightning_strategies_ext._lightning import launching
from lightning_strategies_ext._system.gpu_sync import has_single_visible_gpu
from lightning_strategies_ext._system.interpreters import current_options, python_module
from lightning_strategies_ext.failure.failure_detector import describe_exit
from lightning_strategies_ext.failure.failure_monitor import current_monitor, known_failure
from lightning_strategies_ext.failure.failure_report import print_line, print_report
from lightning_strategies_ext.failure.policies import GRACE_S, KILL_MARGIN_S
from lightning_strategies_ext.failure.process_exit import exit_now, fail_at_exit
from lightning_strategies_ext.failure.rank_status import format_ranks
from lightning_strategies_ext.launch.strategy_protocols import LaunchableStrategy, announcing_failures

#: Seconds between two checks whether a process has exited.
_POLL_S = 0.1
#: Seconds that a process has to exit if the ranks have not connected.
_EXIT_TIMEOUT_S = 3.0
#: Seconds that local rank 0 waits at its exit for the other ranks before it reports that it waits.
_WARN_AFTER_S = 10.0

_WORLD_SIZE = "WORLD_SIZE"
_started: list["subprocess.Popen[Any]"] = []
#: The user's values of environment variables that are replaced during a stage.
_replaced: dict[str, str | None] = {}


@contextmanager
def running_script_processes(launcher: Any, are_connected: Callable[[], bool]) -> Generator[None, None, None]:
    """Starts the processes of a launcher of Lightning, unless they run already.

    The processes are terminated if the context fails before ``are_connected`` returns that the ranks have connected, so
    that failure monitors run.
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
                    name="script monitor",
                ).start()
        if isinstance(environment, LightningEnvironment):
            _replaced.setdefault(_WORLD_SIZE, os.environ.get(_WORLD_SIZE))
            os.environ[_WORLD_SIZE] = str(launcher.num_processes * launcher.num_nodes)
        launching.set_num_threads_if_needed(num_processes=launcher.num_processes)
        yield
    except BaseException:
        if not are_connected():
            _terminate(launcher.procs)
        raise
    finally:
        if _started:  # so that it runs before the exit handler of the failure monitor, which detects hung ranks
            atexit.unregister(_wait_for_all)
            atexit.register(_wait_for_all)


def environment_of_child(environment: ClusterEnvironment | None) -> ClusterEnvironment | None:
    """Returns the user's environment. By default, a process that a rank has started gets one that starts new ranks."""
    if environment is None and rank_variables.drop_inherited():
        return LightningEnvironment()
    return environment


def devices_of_ranks(
    devices: list[torch.device], environment: ClusterEnvironment, num_nodes: int
) -> list[torch.device]:
    """Returns the devices of the ranks of this host; if each process sees only one GPU, each rank has that GPU.

    For example with ``--gpus-per-task=1`` of SLURM: a process cannot name the GPUs of other ranks.
    """
    if not environment.creates_processes_externally or not has_single_visible_gpu(devices):
        return devices
    num_tasks = os.environ.get("SLURM_NTASKS_PER_NODE") if isinstance(environment, SLURMEnvironment) else None
    return devices * (int(num_tasks) if num_tasks else max(1, environment.world_size() // num_nodes))


def tear_down(environment: ClusterEnvironment) -> None:
    """Tears a cluster environment down at the end of a stage, and restores the user's environment variables.

    ``LightningEnvironment`` deletes ``WORLD_SIZE``, even if the user has set it.
    """
    user_value = _replaced.pop(_WORLD_SIZE, os.environ.get(_WORLD_SIZE))
    environment.teardown()
    if user_value is not None:
        os.environ[_WORLD_SIZE] = user_value


def _start(launcher: Any) -> None:
    """Starts the script for each further device and appends the processes to ``launcher.procs``."""
    environment = launcher.cluster_environment
    if environment.local_rank() != 0:
        raise RuntimeError(
            f"Local rank {environment.local_rank()} cannot start the other ranks of its host; only local rank 0 can."
            f" `creates_processes_externally` of {type(environment).__name__} must be True in the other ranks."
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


def _terminate(processes: "Sequence[subprocess.Popen[Any]]") -> None:
    """Terminates processes that wait for this process to connect, and stops monitoring them."""
    _started[:] = [process for process in _started if process not in processes]
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()


def get_exit_code(pid: int) -> int | None:
    """Returns the exit code of a script process, negative for a signal; None if it runs or is another process."""
    return next((process.poll() for process in _started if process.pid == pid), None)


def _wait_for_all() -> None:
    """Waits for the other ranks when the process that the user has started exits; only briefly if a rank has failed."""
    warn_at, deadline = time.monotonic() + _WARN_AFTER_S, inf
    monitor = current_monitor()
    while any(process.poll() is None for process in _started) and time.monotonic() < deadline:
        if monitor is not None and known_failure() is None:
            monitor.announce_script_end()
        if known_failure() is not None:
            if monitor is not None:
                monitor.finish_stage()  # under Fabric, the last stage ends here: no rank waits for this rank any more
            deadline = min(deadline, time.monotonic() + GRACE_S + KILL_MARGIN_S)
        elif time.monotonic() > warn_at:
            running = [rank for rank, process in enumerate(_started, 1) if process.poll() is None]
            print_line(f"rank 0 has finished; waiting for {format_ranks(running)}.")
            warn_at = inf
        time.sleep(_POLL_S)
    failed = {rank: process for rank, process in enumerate(_started, 1) if process.poll() != 0}
    failure = known_failure()
    if failure is not None and not failure.is_self_reported:  # the failed ranks cannot report it
        print_report(failure)
        fail_at_exit()
    for rank, process in failed.items():
        fail_at_exit()
        if failure is None:
            outcome = "does not exit" if process.returncode is None else f"exited with exit code {process.returncode}"
            print_line(f"rank {rank} (pid {process.pid}) {outcome}. Exiting with code 1.")


def _wait_until_connected(processes: "list[subprocess.Popen[Any]]", are_connected: Callable[[], bool]) -> None:
    while not are_connected() and all(process in _started for process in processes):
        for rank, process in enumerate(processes, 1):
            exit_code = process.poll()
            if exit_code is not None and not are_connected() and process in _started:
                print_line(
                    f"rank {rank} (pid {process.pid}) {describe_exit(exit_code)} before the ranks had connected."
                    " Terminating all ranks."
                )
                _terminate(processes)
                exit_now(1)
        time.sleep(_POLL_S)


# --- the command of a rank ---

_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def find_command() -> tuple[list[str], str | None]:
    """Returns the command of another rank, and its working directory, which is None for the current directory.

    The other rank runs the script from its beginning. Its command is the one with which the current interpreter was
    started, with the same options, in the initial directory, even if the script has removed arguments from ``sys.argv``
    or changed the directory.

    If ``sys.argv`` was set on purpose, as tests and sweeps do, the command follows it:

    - If ``sys.argv[0]`` is the path of another script or module, the command runs that with the arguments in
      ``sys.argv``, in the current directory.
    - If arguments in ``sys.argv`` were added or replaced, and not only removed, the command has the arguments in
      ``sys.argv``.

    A module (``python -m``) is searched on the module path of this process, not in the directory: the script may have
    changed to a directory of other users before it imported torch.

    Raises:
        RuntimeError: If the script was read from the standard input, which can be read only once.
    """
    kind, rest = _find_target()
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    entry, arguments = sys.argv[0], sys.argv[1:]
    if spec is not None and spec.origin == entry and spec.name != "__main__":
        if kind != "-m" or _package(rest[0]) != _package(spec.name):
            return python_module(spec.name, *arguments, options=current_options()), None
    elif entry != kind and os.path.isfile(entry):
        return [sys.executable, *current_options(), os.path.abspath(entry), *arguments], None
    if kind in ("", "-"):
        raise RuntimeError(
            "The script was read from standard input, so it cannot run again for each rank. Save it to a file, or use"
            " `strategy='ddp_spawn_ext'`."
        )
    target, original = (rest[0], rest[1:]) if kind in ("-c", "-m") else (_path_of_script(kind), rest)
    unmatched = iter(original)
    if all(argument in unmatched for argument in arguments):  # arguments were only removed
        arguments = original
    if kind == "-m":
        return python_module(target, *arguments, options=current_options()), discovery.INITIAL_DIRECTORY
    option = [kind] if kind == "-c" else []
    return [sys.executable, *current_options(), *option, target, *arguments], discovery.INITIAL_DIRECTORY


def _path_of_script(path: str) -> str:
    """Returns the absolute path of the script, even if the script changed the directory before it imported torch.

    Another directory may have a file of the same name, which may belong to another user.
    """
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is not None and os.path.isabs(file) and os.path.basename(file) == os.path.basename(path):
        return str(file)
    return os.path.join(discovery.INITIAL_DIRECTORY, path)


def _find_target() -> tuple[str, list[str]]:
    """Returns what the interpreter runs, a script, ``-c``, ``-m``, ``-``, or "", and the arguments that follow."""
    options = sys.orig_argv[1:]
    while options and options[0].startswith("-") and options[0] not in ("-", "-c", "-m"):
        del options[: 2 if options[0] in _WITH_VALUE else 1]
    return (options[0], options[1:]) if options else ("", [])


def _package(module: str) -> str:
    return module.removesuffix(".__main__")


# --- launchers of Lightning ---


class ScriptLauncher(launching.SubprocessScriptLauncher):
    """Runs the user's script again for each further device of this host (``start_method="popen"``)."""

    def __init__(self, strategy: LaunchableStrategy) -> None:
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        strategy = self._strategy
        strategy.check_before_launch(trainer)
        with running_script_processes(self, lambda: strategy.has_joined), announcing_failures(strategy):
            return function(*args, **kwargs)


class FabricScriptLauncher(launching.FabricSubprocessScriptLauncher):
    """Runs the user's script again for each further device of this host, for Fabric."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        strategy = self._strategy
        with running_script_processes(self, lambda: strategy.has_joined):
            return function(*args, **kwargs)
