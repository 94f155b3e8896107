"""Ranks under Fabric end together: when one fails in the user's loop, or does not come, all do.

Fabric calls nothing when the loop fails. In a script, what nobody catches passes through ``sys.excepthook``; in a
worker, through its job. Whether a signal asks ranks to stop is for the loop to ask, see ``stopping_together``.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from torch.distributed import Store
from typing_extensions import Self, override

from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext.arguments import check_hang_timeout, check_no_old_names
from lightning_strategies_ext.collectives import Collectives
from lightning_strategies_ext.failure.failure_report import texts_of_exception
from lightning_strategies_ext.failure.process_exit import install_excepthook
from lightning_strategies_ext.failure.rank_status import CollectiveProgress
from lightning_strategies_ext.launch.script_launcher import environment_of_child, get_exit_code
from lightning_strategies_ext.stage_context import StageContext


class EndsTogether:
    """What Fabric's strategies with several processes have for it. They have ``collectives``, ``global_rank`` and such.

    Args:
        hang_timeout: See the strategies.
    """

    collectives: Collectives
    world_size: int

    def __init__(
        self,
        *args: Any,
        cluster_environment: ClusterEnvironment | None,
        hang_timeout: float | timedelta | None,
        **kwargs: Any,
    ) -> None:
        self._hang_timeout_s = check_hang_timeout(hang_timeout)
        self._world = StageContext(self._engine)
        kwargs["cluster_environment"] = environment_of_child(cluster_environment)
        super().__init__(*args, **kwargs)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Rejects arguments by their names in earlier versions."""
        check_no_old_names(cls, kwargs)
        return super().__new__(cls)

    @property
    def has_joined(self) -> bool:
        """Whether this process has met the other ranks, as far as there are any."""
        return self._world.failure_monitor is not None

    def announce_failure(self, exception: BaseException) -> None:
        """Says to the other ranks that this one has failed, and ends those of this host that do not end by themselves.

        Ctrl-C is no failure: it reaches all.
        """
        world = self._world
        world.mark_failed(exception, world.rank, world.size)
        if world.failure_monitor is not None and not isinstance(exception, KeyboardInterrupt):
            world.failure_monitor.fail_and_kill_local_peers(texts_of_exception(exception)[1])

    def explain_exception(self, exception: BaseException) -> BaseException:
        """The exception that the user should see: the given one, or one that it came from by way of a collective."""
        return self._world.explain_exception(exception)

    @contextmanager
    def stopping_together(self, signum: int = signal.SIGTERM) -> Iterator[Callable[[], bool]]:
        """Lets a signal on any rank stop the loops of all ranks before the same step, off the training path.

        All ranks enter the block, and call what it gives before each step::

            with fabric.strategy.stopping_together() as must_stop:
                for batch in loader:
                    if must_stop():
                        fabric.save("stopped.ckpt", state)
                        break
                    ...

        Outside of the block the signal does what it did before. One that comes on this rank after the last call takes
        effect then, when the block is left.

        Args:
            signum: The signal. Schedulers send SIGTERM before they take a machine away, or what they are told to.

        Yields:
            A function that takes nothing and returns whether to stop: on all ranks the same at the same call. It waits
            for the other ranks only if one has been asked to stop.

        Raises:
            RuntimeError: If the ranks have not met (``fabric.launch()`` comes first), or a thread other than the main
                one calls it, in which Python handles no signals.
        """
        world = self._world
        if self.world_size > 1 and not self.has_joined:
            raise RuntimeError("`stopping_together` is called before the ranks have met. Call `fabric.launch()` first.")
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("`stopping_together` must be called in the main thread: others handle no signals.")
        usual = signal.signal(signum, lambda *_: world.request_stop())
        try:
            world.start_stop_agreement()
            yield world.has_decision_before_train_step
        finally:
            world.leave(is_over=False)
            signal.signal(signum, signal.SIG_DFL if usual is None else usual)  # None is one of C's
        if world.was_stop_requested:
            world.was_stop_requested = False
            signal.raise_signal(signum)

    def _engine(self) -> Collectives:
        return self.collectives

    @override
    def __getstate__(self) -> dict[str, Any]:
        # What belongs to this process stays here: a worker has a world of its own.
        return {name: value for name, value in vars(self).items() if name != "_world"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._world = StageContext(self._engine)

    def _end_together(
        self,
        rank: int,
        world_size: int,
        store: Store | None,
        wake: Callable[[Sequence[Peer]], None],
        progress: CollectiveProgress,
    ) -> None:
        self._world = StageContext(self._engine, rank, world_size, store, previous=self._world)
        if store is None:
            return
        self._world.start_failure_monitor(wake, progress, self._hang_timeout_s, get_exit_code)
        assert self._world.failure_monitor is not None
        self._world.failure_monitor.set_step_source(lambda: "the loop under Fabric")
        install_excepthook(self._fail_with)

    def _fail_with(self, exception: BaseException) -> BaseException:
        explained = self.explain_exception(exception)
        self.announce_failure(explained)
        return explained
