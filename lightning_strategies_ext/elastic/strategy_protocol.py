"""Interface of a strategy that an elastic ``fit`` uses."""

from contextlib import AbstractContextManager
from typing import Protocol

import lightning.pytorch as pl

from lightning_strategies_ext.collectives import Collectives
from lightning_strategies_ext.elastic.world_transition import RankChangingStrategy


class ElasticStrategyProtocol(RankChangingStrategy, Protocol):
    """Interface of a strategy that an elastic ``fit`` uses."""

    @property
    def global_rank(self) -> int:
        """Rank of this process in this world."""

    @property
    def world_size(self) -> int:
        """Number of ranks of this world."""

    @property
    def collectives(self) -> Collectives:
        """Collectives of the ranks of this world."""

    def barrier(self, name: str) -> None:
        """Returns when every rank has called it."""

    def activate_collectives(self) -> None:
        """Makes this rank take part in the collectives of its world from now on."""

    def with_local_collectives(self) -> AbstractContextManager[None]:
        """Returns a context manager in which this rank's collectives return its own values."""

    def enter_world(self, trainer: "pl.Trainer") -> None:
        """Starts the failure monitor, the stop agreement, and the gradient exchange of this world."""

    def leave_world(self, *, is_coordinated: bool) -> None:
        """Stops the failure monitor, the stop agreement, and the gradient exchange of this world.

        Args:
            is_coordinated: Whether all ranks leave before the same step; otherwise some may have exited.
        """
