"""Collective operations over tensors and objects. They know no strategy; strategies call them."""

from lightning_strategies_ext.collectives.base import Collectives
from lightning_strategies_ext.collectives.local import LocalCollectives

__all__ = ["Collectives", "LocalCollectives"]
