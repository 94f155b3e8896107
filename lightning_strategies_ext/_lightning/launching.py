"""Private names of Lightning's launchers."""

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

# Sets the number of OpenMP threads, as in each process that Lightning's script launchers start (2.5 to 2.6).
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as set_num_threads_if_needed
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.strategies.launchers.launcher import _Launcher as Launcher
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as SubprocessScriptLauncher,
)
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.imports import RequirementCache

# Base classes of this package's launchers (2.5 to 2.6). On Ctrl-C, the Trainer checks whether the launcher is
# a `_SubprocessScriptLauncher`; Fabric checks for its `_MultiProcessingLauncher`. In the Trainer, a launcher must not
# be a `_MultiProcessingLauncher`: the prediction loop then refuses to return predictions. `_Launcher` is abstract.
__all__ = [
    "FabricMultiProcessingLauncher",
    "FabricSubprocessScriptLauncher",
    "Launcher",
    "SubprocessScriptLauncher",
    "hydra_command",
    "set_rank_zero_only_rank",
    "set_num_threads_if_needed",
]


def hydra_command(local_rank: int) -> tuple[Sequence[str], str] | None:
    """Returns the command and directory with which Lightning starts a rank of a Hydra script; None for other scripts.

    ``_call_children_scripts`` of both script launchers chooses between this command and another one (2.5 to 2.6).
    """
    if not RequirementCache("hydra-core"):
        return None
    is_in_use = import_module("hydra.core.hydra_config").HydraConfig.initialized()
    return _hydra_subprocess_cmd(local_rank) if is_in_use else None


def set_rank_zero_only_rank(rank: int) -> None:
    """Sets the rank of this process in Lightning's ``rank_zero_only``, which limits output and files to rank 0."""
    for decorator in (fabric_rank_zero_only, rank_zero_only):
        decorator.rank = rank  # type: ignore[attr-defined]
