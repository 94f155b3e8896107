"""The strategies' faces for Lightning Fabric. They hold no logic of their own beyond Fabric's method names.

``Fabric(strategy="ddp_ext")`` finds them by name; to pass arguments, construct one::

    from lightning_strategies_ext.fabric import DDPStrategy

    fabric = Fabric(strategy=DDPStrategy(static_graph=True), devices=2)

Classes load when they are first asked for: not everybody has Horovod.
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
