"""Launchers for scripts without ``horovodrun`` or ``mpirun``: they run the user's script again for each other rank."""

from collections.abc import Callable
from typing import Any

from lightning_strategies_ext.horovod.launch_info import serve_rendezvous
from lightning_strategies_ext.launch.script_launcher import FabricScriptLauncher, ScriptLauncher


class HorovodLauncher(ScriptLauncher):
    """Starts the other ranks of this host, unless ``horovodrun`` or ``mpirun`` has started them.

    Args:
        strategy: Strategy whose ``check_before_launch(trainer)`` raises to reject a run.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Starts the other ranks if no launcher has started them, and runs ``function`` in this process."""
        if not self.cluster_environment.creates_processes_externally:
            serve_rendezvous(self.num_processes)
        return super().launch(function, *args, trainer=trainer, **kwargs)


class FabricHorovodLauncher(FabricScriptLauncher):
    """Starts the other ranks of this host under Fabric, unless ``horovodrun`` or ``mpirun`` has started them."""

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Starts the other ranks if no launcher has started them, and runs ``function`` in this process."""
        if not self.cluster_environment.creates_processes_externally:
            serve_rendezvous(self.num_processes)
        return super().launch(function, *args, **kwargs)
