"""State that workers receive from the main process: directory, environment variables, random states, torch settings.

The environment variables that depend on the rank are chosen in :mod:`.worker_group`, the variables that leave this host
in :func:`selected`, and the options of the interpreter in :mod:`.interpreters`.
"""

import os
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from typing_extensions import override


@dataclass
class ProcessSettings:
    """Global state of the main process when it sends a task, for the workers that run the task."""

    directory: str
    environment: dict[str, str]
    rng: "RngState"
    num_threads: int
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    is_deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)
    only_warns: bool = field(default_factory=torch.is_deterministic_algorithms_warn_only_enabled)
    cudnn_benchmark: bool = field(default_factory=lambda: bool(torch.backends.cudnn.benchmark))
    cudnn_deterministic: bool = field(default_factory=lambda: bool(torch.backends.cudnn.deterministic))
    matmul_precision: str = field(default_factory=torch.get_float32_matmul_precision)

    def apply(self) -> None:
        """Applies the settings to this process."""
        self.enter_directory()
        self.set_environment()
        torch.set_num_threads(self.num_threads)
        torch.set_default_dtype(self.default_dtype)
        torch.use_deterministic_algorithms(self.is_deterministic, warn_only=self.only_warns)
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        torch.set_float32_matmul_precision(self.matmul_precision)
        self.rng.apply()

    def enter_directory(self) -> None:
        """Changes to the working directory of the main process."""
        os.chdir(self.directory)

    def set_environment(self) -> None:
        """Replaces all environment variables by those of the main process."""
        for name in set(os.environ) - set(self.environment):
            del os.environ[name]
        os.environ.update(self.environment)


@dataclass
class RngState:
    """States of the random number generators of Python, NumPy, and torch, and of this rank's GPU if CUDA is in use."""

    python: Any
    numpy: Any
    torch_cpu: bytes
    torch_cuda: bytes | None

    @classmethod
    def now(cls) -> "RngState":
        """Returns the current states of this process."""
        cuda = bytes(torch.cuda.get_rng_state().numpy()) if torch.cuda.is_initialized() else None
        kind, keys, *rest = np.random.get_state(legacy=True)
        numpy = (kind, bytes(keys), *rest)  # type: ignore[arg-type]
        return cls(random.getstate(), numpy, bytes(torch.get_rng_state().numpy()), cuda)

    def is_same(self, other: "RngState") -> bool:
        """Whether the states of the CPU generators are equal."""
        return (self.python, self.numpy, self.torch_cpu) == (other.python, other.numpy, other.torch_cpu)

    def apply(self) -> None:
        """Sets the generators of this process to these states."""
        random.setstate(self.python)
        kind, keys, *rest = self.numpy
        np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch_cpu), dtype=torch.uint8))
        if self.torch_cuda is not None and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(self.torch_cuda), dtype=torch.uint8))


def is_interactive() -> bool:
    """Whether this process is a notebook or has a prompt, so that no other process can import its definitions."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


# --- on other hosts ---

#: Environment variables that describe a host, or a process or session on it. They are never sent to another host.
HOST_VARIABLES = frozenset(
    {
        *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LD_PRELOAD", "PATH"),
        *("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "HOSTNAME", "HOME", "USER", "LOGNAME", "SHELL", "SHLVL"),
        *("PWD", "OLDPWD", "TMPDIR", "TEMP", "TMP", "LANG", "TERM", "DISPLAY", "_"),
        *("SSH_AUTH_SOCK", "SSH_AGENT_PID", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY"),
        *("DBUS_SESSION_BUS_ADDRESS", "GPG_AGENT_INFO", "GPG_TTY", "KRB5CCNAME", "WAYLAND_DISPLAY", "XAUTHORITY"),
        *("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "INVOCATION_ID", "JOURNAL_STREAM", "MAIL", "TMUX", "STY"),
    }
)
#: Prefixes of names of such variables. Ray's variables include its authentication token.
_HOST_PREFIXES = ("RAY_", "XDG_")
#: Variables that ranks receive even if the user lists only others: the secret of the job, seeds, the network.
_RANK_PATTERNS = ("LIGHTNING_STRATEGIES_EXT_*", "PL_GLOBAL_SEED", "PL_SEED_WORKERS", "GLOO_SOCKET_IFNAME")

#: Names of the variables that the last task has set.
_received: set[str] = set()


@dataclass
class RemoteProcessSettings(ProcessSettings):
    """:class:`.ProcessSettings` on a host that may have other directories, paths and devices."""

    def __post_init__(self) -> None:
        """Removes variables of the host and of Ray, including its token, before the main process sends them."""
        self.environment = {name: value for name, value in self.environment.items() if not _is_host_specific(name)}

    @override
    def enter_directory(self) -> None:
        """Changes to the main process's directory if it exists here; otherwise keeps the directory that Ray has set."""
        if os.path.isdir(self.directory):
            os.chdir(self.directory)

    @override
    def set_environment(self) -> None:
        """Sets the main process's variables, and removes those that only the last task had."""
        for name in _received - self.environment.keys():
            os.environ.pop(name, None)
        _received.clear()
        _received.update(self.environment)
        os.environ.update(self.environment)


def check_environment_variables(names: Any) -> None:
    """Checks the argument `environment_variables`.

    Raises:
        TypeError: If it is neither None nor a list of names.
        ValueError: If an entry is not a name, or names a variable that is never sent.
    """
    if names is None:
        return
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            "`environment_variables` must be a list of names and patterns, such as ['WANDB_*'] or ['!AWS_*'], or None,"
            f" got {names!r}."
        )
    for name in names:
        if not name.removeprefix("!") or "=" in name:
            raise ValueError(
                f"`environment_variables` contains {name!r}, which is not a variable's name. Use the name without a"
                " value; `runtime_env={'env_vars': {...}}` sets variables on workers."
            )
        if _is_host_specific(name):
            raise ValueError(
                f"`environment_variables` contains {name!r}: variables of Ray or of a host are never sent to workers."
                " Omit the entry; `runtime_env={'env_vars': {...}}` sets variables on workers."
            )


def selected(environment: Mapping[str, str], names: Sequence[str] | None) -> dict[str, str]:
    """Returns the variables of an environment that workers receive.

    Args:
        environment: All variables.
        names: Names and patterns as in the argument `environment_variables`.
    """
    denied = [name[1:] for name in names or () if name.startswith("!")]
    allowed = [name for name in names or () if not name.startswith("!")]
    if names is None or (denied and not allowed):
        allowed = ["*"]
    allowed += _RANK_PATTERNS
    return {
        name: value
        for name, value in environment.items()
        if _matches(name, allowed) and not _matches(name, denied) and not _is_host_specific(name)
    }


def _is_host_specific(name: str) -> bool:
    return name in HOST_VARIABLES or name.startswith(_HOST_PREFIXES)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
