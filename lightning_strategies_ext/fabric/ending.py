"""Ranks under Fabric end together: when one fails in the user's loop, or does not come, all do.

Fabric calls nothing when the loop fails. In a script, what nobody catches passes through ``sys.excepthook``; in a
worker, through its job.
"""

import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

from torch.distributed import Store
from typing_extensions import override

from lightning_strategies_ext.arguments import check_patience
from lightning_strategies_ext.collectives import Collectives
from lightning_strategies_ext.failure.signs import Progress
from lightning_strategies_ext.launch.scripts import exit_code_of
from lightning_strategies_ext.peers import Peer
from lightning_strategies_ext.world import World


class EndsTogether:
    """What Fabric's strategies with several processes have for it. They have ``collectives``, ``global_rank`` and such.

    Args:
        patience: See the strategies.
    """

    collectives: Collectives

    def __init__(self, *args: Any, patience: float | timedelta | None, **kwargs: Any) -> None:
        self._patience_s = check_patience(patience)
        self._world = World(self._engine)
        super().__init__(*args, **kwargs)

    @property
    def has_met(self) -> bool:
        """Whether this process has met the other ranks, as far as there are any."""
        return self._world.watch is not None

    def note_failure(self, exception: BaseException) -> None:
        """Says to the other ranks that this one has failed, and ends those of this host that do not end by themselves.

        Ctrl-C is no failure: it reaches all.
        """
        world = self._world
        world.fail(exception, world.rank, world.size)
        if world.watch is not None and not isinstance(exception, KeyboardInterrupt):
            world.watch.reconciliate("".join(traceback.format_exception(exception)))

    def explained(self, exception: BaseException) -> BaseException:
        """The exception that the user should see: the given one, or one that it came from by way of a collective."""
        return self._world.explained(exception)

    def _engine(self) -> Collectives:
        return self.collectives

    @override
    def __getstate__(self) -> dict[str, Any]:
        # What belongs to this process stays here: a worker has a world of its own.
        return {name: value for name, value in vars(self).items() if name != "_world"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._world = World(self._engine)

    def _end_together(
        self,
        rank: int,
        world_size: int,
        store: Store | None,
        wake: Callable[[Sequence[Peer]], None],
        progress: Progress,
    ) -> None:
        self._world = World(self._engine, rank, world_size, store, before=self._world)
        if store is None:
            return
        self._world.end_together(wake, progress, self._patience_s, exit_code_of)
        assert self._world.watch is not None
        self._world.watch.describe(lambda: "the loop under Fabric")
        usual = sys.excepthook

        def note(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
            sys.excepthook = usual
            explained = self.explained(value)
            self.note_failure(explained)
            sys.excepthook(type(explained), explained, explained.__traceback__ or trace)

        sys.excepthook = note
