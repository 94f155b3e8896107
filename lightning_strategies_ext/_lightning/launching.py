"""What is private in how Lightning starts processes."""

from typing import Any

from lightning.fabric.strategies.launchers.multiprocessing import (
    _MultiProcessingLauncher as FabricMultiProcessingLauncher,
)
from lightning.fabric.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as FabricSubprocessScriptLauncher,
)

# What each process that the script launchers start does with OpenMP's threads (2.5 to 2.6).
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as set_num_threads_if_needed
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.strategies.launchers.launcher import _Launcher as Launcher
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as SubprocessScriptLauncher,
)
from lightning.pytorch.utilities.rank_zero import rank_zero_only

# The launcher classes (2.5 to 2.6): the Trainer asks `isinstance(launcher, _SubprocessScriptLauncher)` on Ctrl-C, and
# Fabric asks for its `_MultiProcessingLauncher`, so ours must be of those classes. In the Trainer, ours must not be a
# `_MultiProcessingLauncher`: the prediction loop refuses to return predictions then. `_Launcher` is the abstract base.
__all__ = [
    "FabricMultiProcessingLauncher",
    "FabricSubprocessScriptLauncher",
    "Launcher",
    "SubprocessScriptLauncher",
    "call_children_scripts",
    "say_rank",
    "set_num_threads_if_needed",
]


def call_children_scripts(launcher: Any) -> None:
    """Starts the script once more for each further device; ``launcher.procs`` has the processes then (2.5 to 2.6).

    ``launch`` of both script launchers calls it, and an observer after it, which kills all ranks when one fails.
    """
    launcher._call_children_scripts()


def say_rank(rank: int) -> None:
    """Tells Lightning which rank this is, for what only rank 0 prints or writes."""
    for decorator in (fabric_rank_zero_only, rank_zero_only):
        decorator.rank = rank  # type: ignore[attr-defined]
