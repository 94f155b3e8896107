"""What makes a worker on another host like the main process: as far as hosts may be alike."""

import os
from dataclasses import dataclass

from lightning_strategies_ext.launch.processes.conditions import Conditions

#: Environment variables that say something of a host, or of the process that Ray has started on it.
OF_A_HOST = frozenset(
    {
        *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LD_PRELOAD", "PATH"),
        *("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "HOSTNAME", "HOME", "USER", "LOGNAME", "SHELL", "SHLVL"),
        *("PWD", "OLDPWD", "TMPDIR", "TEMP", "TMP", "LANG", "TERM", "DISPLAY", "_"),
        *("SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY"),
    }
)

_brought: set[str] = set()


@dataclass
class ConditionsElsewhere(Conditions):
    """:class:`.Conditions` on a host that may have other directories, paths and devices."""

    def __post_init__(self) -> None:
        """Removes variables of the host and of Ray, with its token, before the main process sends them."""
        self.environment = {
            name: value
            for name, value in self.environment.items()
            if name not in OF_A_HOST and not name.startswith(("RAY_", "XDG_"))
        }

    def enter_directory(self) -> None:
        """Changes to the main process's directory where there is one, and stays where Ray has put it otherwise."""
        if os.path.isdir(self.directory):
            os.chdir(self.directory)

    def set_environment(self) -> None:
        """Sets the main process's variables, and removes those that an earlier job has set and this one lacks."""
        for name in _brought - self.environment.keys():
            os.environ.pop(name, None)
        _brought.clear()
        _brought.update(self.environment)
        os.environ.update(self.environment)
