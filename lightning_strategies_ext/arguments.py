"""Arguments that the strategies of the Trainer and of Fabric share: types, defaults, checks."""

import platform
import socket
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.multiprocessing
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment

from lightning_strategies_ext.launch.processes.process_settings import is_interactive
from lightning_strategies_ext.registry import StrategyUnavailableError

#: Method that starts the other processes of a host.
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
#: Default timeout of the rendezvous and of every collective.
DEFAULT_TIMEOUT = timedelta(minutes=30)
#: Default time that ranks wait in a collective for an inactive rank.
DEFAULT_HANG_TIMEOUT = timedelta(minutes=5)


def barrier_name(*args: Any, **kwargs: Any) -> str | None:
    """Returns the name among the arguments of ``barrier(*args, **kwargs)``, or None."""
    name = kwargs.get("name", args[0] if args else None)
    return None if name is None else str(name)


def check_hang_timeout(hang_timeout: Any) -> float | None:
    """Returns the hang timeout in seconds.

    Raises:
        TypeError: If the value is neither a number of seconds, nor a ``timedelta``, nor None.
        ValueError: If the value is not positive.
    """
    advice = " None lets ranks wait indefinitely."
    return None if hang_timeout is None else check_seconds("hang_timeout", hang_timeout, advice)


def check_seconds(name: str, value: Any, advice: str = "") -> float:
    """Returns a time argument in seconds.

    Args:
        name: Name of the argument.
        value: Value that the user passed.
        advice: Text to append to the error message.

    Raises:
        TypeError: If the value is neither a number of seconds nor a ``timedelta``.
        ValueError: If the value is not positive.
    """
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"`{name}` must be seconds or a datetime.timedelta, got {value!r}.{advice}")
    if not seconds > 0:
        raise ValueError(f"`{name}` must be positive, got {value!r}.{advice}")
    return float(seconds)


def check_plugins(accelerator: Any, cluster_environment: Any, checkpoint_io: Any) -> None:
    """Rejects plugins of the wrong type.

    Raises:
        TypeError: If an argument is not an instance of its class.
    """
    for name, value, kind in (
        ("accelerator", accelerator, Accelerator),
        ("cluster_environment", cluster_environment, ClusterEnvironment),
        ("checkpoint_io", checkpoint_io, CheckpointIO),
    ):
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"`{name}` must be a {kind.__module__.rpartition('.')[0]}.{kind.__name__}, got {value!r}.")


def check_not_interactive(argument: str) -> None:
    """Rejects, in a notebook or at a prompt, a start method that requires a script.

    Lightning rejects it too, but later, and recommends its own strategy.

    Args:
        argument: Argument that selects the start method, as the user writes it.

    Raises:
        RuntimeError: If this process is a notebook, a prompt, or ``python -i``.
    """
    if is_interactive():
        raise RuntimeError(
            f"{argument} does not work in a notebook or at a prompt, because new processes would run a script. Use"
            " `strategy='ddp_spawn_ext'`, which sends the definitions of the notebook to worker processes,"
            " `strategy='ddp_notebook_ext'`, which forks worker processes, or `strategy='dp_ext'`, which starts no"
            " process; or run a script."
        )


def check_devices(devices: Any) -> None:
    """Rejects an invalid list of devices for one process each.

    Raises:
        TypeError: If it is not a list of ``torch.device``.
        ValueError: If it mixes types, repeats a GPU, or contains an unavailable GPU.
    """
    if devices is None:
        return
    if not isinstance(devices, (list, tuple)) or not all(isinstance(device, torch.device) for device in devices):
        raise TypeError(f"`parallel_devices` must be a list of torch.device, got {devices!r}.")
    types = {device.type for device in devices}
    if len(types) > 1:
        raise ValueError(f"`parallel_devices` must be devices of one type, got {', '.join(sorted(types))}.")
    if types != {"cuda"}:
        return
    indices = [device.index for device in devices]
    if len(set(indices)) < len(indices):
        raise ValueError(f"`parallel_devices={devices}` contains a GPU twice. List each GPU once.")
    count = torch.cuda.device_count()
    missing = [index for index in indices if index is None or index >= count]
    if missing:
        raise ValueError(
            f"`parallel_devices={devices}` contains a GPU that does not exist: this host has {count} GPUs, with"
            " indices from 0. List existing GPUs only."
        )


def check_start_method(start_method: str) -> None:
    """Rejects a start method that is unknown or that this platform does not support.

    Raises:
        StrategyUnavailableError: If this system cannot pass open files to workers.
        ValueError: If the start method is unknown or unsupported.
    """
    if start_method in ("spawn", "fork", "forkserver") and not hasattr(socket, "send_fds"):
        raise StrategyUnavailableError(
            f"`start_method={start_method!r}` passes open files to workers over Unix sockets, which"
            f" {platform.system()} does not support. Use `strategy='ddp_ext'`, which runs the script once per device."
        )
    available = ["popen", *torch.multiprocessing.get_all_start_methods()]
    if start_method not in available:
        raise ValueError(
            f"`start_method={start_method!r}` is not available on this system. Use one of {', '.join(available)}."
        )


def check_start_method_interactive(start_method: str) -> None:
    """Rejects, in a notebook or at a prompt, a start method that requires a script.

    Raises:
        RuntimeError: If this process is a notebook or a prompt and the start method is "popen".
    """
    if start_method == "popen":
        check_not_interactive("`strategy='ddp_ext'` (`start_method='popen'`)")
