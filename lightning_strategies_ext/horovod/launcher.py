"""The launchers of ranks that no launcher of Horovod's has started: the user's script runs once more for each."""

from collections.abc import Callable
from typing import Any

from lightning_strategies_ext.horovod.launch import serve_rendezvous
from lightning_strategies_ext.launch.script_launcher import FabricScriptLauncher, ScriptLauncher


class HorovodLauncher(ScriptLauncher):
    """Starts the further ranks of this host, unless ``horovodrun`` or ``mpirun`` has.

    Args:
        strategy: Its ``check_before_launch(trainer)`` raises to refuse a run.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Starts the ranks if they are not there yet, and runs ``function`` in this one."""
        if not self.cluster_environment.creates_processes_externally:
            serve_rendezvous(self.num_processes)
        return super().launch(function, *args, trainer=trainer, **kwargs)


class FabricHorovodLauncher(FabricScriptLauncher):
    """The same for Fabric."""

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Starts the ranks if they are not there yet, and runs ``function`` in this one."""
        if not self.cluster_environment.creates_processes_externally:
            serve_rendezvous(self.num_processes)
        return super().launch(function, *args, **kwargs)
