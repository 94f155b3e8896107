"""The strategies' faces for Lightning Fabric. They hold no logic of their own beyond Fabric's method names.

``Fabric(strategy="ddp_ext")`` finds them by name; to pass arguments, construct one::

    from lightning_strategies_ext.fabric import DDPStrategy

    fabric = Fabric(strategy=DDPStrategy(static_graph=True), devices=2)

Classes load when they are first asked for: not everybody has Horovod.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
