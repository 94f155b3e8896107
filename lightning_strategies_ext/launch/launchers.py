"""The Trainer's launchers, with a check before the first process starts.

Starting is Lightning's launchers' work. These add one thing: what is known to be impossible is refused while there is
still one process, so that the user sees one error and there is nothing to clean up.
"""

from collections.abc import Callable
from typing import Any, Literal

from lightning_strategies_ext import _lightning


class ScriptLauncher(_lightning.SubprocessScriptLauncher):
    """Runs the user's script once more for each further device of this host (``start_method="popen"``).

    Args:
        strategy: Its ``check_before_launch(trainer)`` raises to refuse a run.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._check = strategy.check_before_launch
        self._note_failure = strategy.note_failure

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Starts the processes if they are not there yet, and runs ``function`` in this one."""
        self._check(trainer)
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except BaseException as exception:
            # Before the callbacks' `on_exception`, which may save a checkpoint, with a barrier, and take long.
            self._note_failure(exception)
            raise


class WorkerLauncher(_lightning.MultiProcessingLauncher):
    """Runs a function in one worker process per device (``start_method`` "fork", "spawn" or "forkserver").

    Args:
        strategy: Its ``check_before_launch(trainer)`` raises to refuse a run.
        start_method: As in ``multiprocessing``.
    """

    def __init__(self, strategy: Any, start_method: Literal["spawn", "fork", "forkserver"]) -> None:
        super().__init__(strategy, start_method=start_method)
        self._num_processes: int = strategy.num_processes
        self._check = strategy.check_before_launch

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Starts the workers, runs ``function`` in each, and returns what it returned in the first.

        Raises:
            ValueError: If the processes are there already, started by torchrun or the like.
        """
        environment = self._strategy.cluster_environment
        if environment is not None and environment.creates_processes_externally and self._num_processes > 1:
            raise ValueError(
                f"`start_method={self._start_method!r}` would start {self._num_processes} workers in each of the"
                f" processes that were started for {type(environment).__name__} already. Use"
                " `strategy='ddp_ext'`, or start the script once."
            )
        self._check(trainer)
        return super().launch(function, *args, trainer=trainer, **kwargs)
