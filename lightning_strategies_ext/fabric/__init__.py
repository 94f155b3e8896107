"""Strategies for Lightning Fabric. They adapt this package's engines to Fabric's methods.

``Fabric(strategy="ddp_ext")`` finds a strategy by name; to pass arguments, construct it::

    from lightning_strategies_ext.fabric import DDPStrategy

    fabric = Fabric(strategy=DDPStrategy(static_graph=True), devices=2)

Classes are imported at their first use, because Horovod may not be installed.
"""

from typing import TYPE_CHECKING

from lightning_strategies_ext.discovery import lazy_names

if TYPE_CHECKING:
    from lightning_strategies_ext.fabric.ddp import DDPStrategy as DDPStrategy
    from lightning_strategies_ext.fabric.dp import DataParallelStrategy as DataParallelStrategy
    from lightning_strategies_ext.fabric.horovod import HorovodStrategy as HorovodStrategy

_EXPORTS = {
    "DDPStrategy": "lightning_strategies_ext.fabric.ddp",
    "DataParallelStrategy": "lightning_strategies_ext.fabric.dp",
    "HorovodStrategy": "lightning_strategies_ext.fabric.horovod",
}

__all__ = [*_EXPORTS]
__getattr__, __dir__ = lazy_names(__name__, _EXPORTS)
