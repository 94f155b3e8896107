"""What is private in Lightning's strategies."""

from collections.abc import Callable
from typing import Any

from lightning.fabric.strategies.strategy import _BackwardSyncControl as BackwardSyncControl
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

__all__ = [
    "BackwardSyncControl",
    "checkpoint_io_of",
    "layer_sync",
    "set_checkpoint_io",
    "set_layer_sync",
]


def layer_sync(strategy: Any) -> Any:
    """The LayerSync plugin that ``Trainer(sync_batchnorm=True)`` sets on a strategy, or None.

    The Trainer's connector writes it to this attribute and there is no public way to read it (2.5 to 2.6).
    """
    return strategy._layer_sync


def set_layer_sync(strategy: Any, layer_sync: Any) -> None:
    """Sets what :func:`layer_sync` reads."""
    strategy._layer_sync = layer_sync


def checkpoint_io_of(strategy: Any, default: Callable[[], Any]) -> Any:
    """How a strategy writes checkpoints; as ``default`` does if the user has named no other way.

    A writer that hands checkpoints on to another, as ``AsyncCheckpointIO`` does, gets it as that other one; its setter
    keeps one that the user has given. Lightning's strategies do the same with Lightning's own writer, and its
    connectors ask for the attribute, which is None until then. The class has no public name either (2.5 to 2.6).
    """
    if strategy._checkpoint_io is None:
        strategy._checkpoint_io = default()
    elif isinstance(strategy._checkpoint_io, _WrappingCheckpointIO):
        strategy._checkpoint_io.checkpoint_io = default()
    return strategy._checkpoint_io


def set_checkpoint_io(strategy: Any, checkpoint_io: Any) -> None:
    """Sets how a strategy writes checkpoints; see :func:`checkpoint_io_of`."""
    strategy._checkpoint_io = checkpoint_io
