"""Collectives over tensors and objects. Strategies call them; they do not depend on a strategy."""

from lightning_strategies_ext.collectives.base import Collectives
from lightning_strategies_ext.collectives.local import LocalCollectives

__all__ = ["Collectives", "LocalCollectives"]
