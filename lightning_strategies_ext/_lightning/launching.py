"""What is private in how Lightning starts processes."""

from collections.abc import Sequence
from importlib import import_module

from lightning.fabric.strategies.launchers.multiprocessing import (
    _MultiProcessingLauncher as FabricMultiProcessingLauncher,
)
from lightning.fabric.strategies.launchers.subprocess_script import (
    _hydra_subprocess_cmd,
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
from lightning_utilities.core.imports import RequirementCache

# The launcher classes (2.5 to 2.6): the Trainer asks `isinstance(launcher, _SubprocessScriptLauncher)` on Ctrl-C, and
# Fabric asks for its `_MultiProcessingLauncher`, so ours must be of those classes. In the Trainer, ours must not be a
# `_MultiProcessingLauncher`: the prediction loop refuses to return predictions then. `_Launcher` is the abstract base.
__all__ = [
    "FabricMultiProcessingLauncher",
    "FabricSubprocessScriptLauncher",
    "Launcher",
    "SubprocessScriptLauncher",
    "hydra_command",
    "say_rank",
    "set_num_threads_if_needed",
]


def hydra_command(local_rank: int) -> tuple[Sequence[str], str] | None:
    """The command and the directory with which Lightning starts a rank of a script of Hydra; None for other scripts.

    ``_call_children_scripts`` of both script launchers decides between it and a command for other scripts (2.5 to 2.6).
    """
    if not RequirementCache("hydra-core"):
        return None
    is_in_use = import_module("hydra.core.hydra_config").HydraConfig.initialized()
    return _hydra_subprocess_cmd(local_rank) if is_in_use else None


def say_rank(rank: int) -> None:
    """Tells Lightning which rank this is, for what only rank 0 prints or writes."""
    for decorator in (fabric_rank_zero_only, rank_zero_only):
        decorator.rank = rank  # type: ignore[attr-defined]
