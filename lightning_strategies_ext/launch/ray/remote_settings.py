"""Settings of the main process that its workers on other hosts receive."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from typing_extensions import override

from lightning_strategies_ext.launch.processes.process_settings import ProcessSettings

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
_PREFIXES_OF_A_HOST = ("RAY_", "XDG_")
#: Variables that ranks receive even if the user lists only others: the secret of the job, seeds, the network.
_OF_ALL_RANKS = ("LIGHTNING_STRATEGIES_EXT_*", "PL_GLOBAL_SEED", "PL_SEED_WORKERS", "GLOO_SOCKET_IFNAME")

#: Names of the variables that the last task has set.
_received: set[str] = set()


@dataclass
class RemoteProcessSettings(ProcessSettings):
    """:class:`.ProcessSettings` on a host that may have other directories, paths and devices."""

    def __post_init__(self) -> None:
        """Removes variables of the host and of Ray, including its token, before the main process sends them."""
        self.environment = {name: value for name, value in self.environment.items() if not _is_of_a_host(name)}

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
        if _is_of_a_host(name):
            raise ValueError(
                f"`environment_variables` contains {name!r}: variables of Ray or of a host are never sent to workers."
                " Leave out the entry; `runtime_env={'env_vars': {...}}` sets variables on workers."
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
    allowed += _OF_ALL_RANKS
    return {
        name: value
        for name, value in environment.items()
        if _matches(name, allowed) and not _matches(name, denied) and not _is_of_a_host(name)
    }


def _is_of_a_host(name: str) -> bool:
    return name in HOST_VARIABLES or name.startswith(_PREFIXES_OF_A_HOST)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
