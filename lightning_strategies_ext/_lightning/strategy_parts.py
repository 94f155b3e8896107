"""Private names of Lightning's strategies."""

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from lightning.fabric.strategies.ddp import _DDPBackwardSyncControl as DDPBackwardSyncControl
from lightning.fabric.strategies.strategy import _BackwardSyncControl as BackwardSyncControl
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn

from lightning_strategies_ext._lightning import user_modules

__all__ = [
    "BackwardSyncControl",
    "DDPBackwardSyncControl",
    "checkpoint_io_of",
    "layer_sync",
    "refuse_compiled_module",
    "revert_layer_sync",
    "set_checkpoint_io",
    "set_layer_sync",
    "wrap_stages_on_one_device",
    "tear_down",
]

T = TypeVar("T")


def layer_sync(strategy: Any) -> Any:
    """Returns the LayerSync plugin that ``Trainer(sync_batchnorm=True)`` sets on a strategy, or None.

    The Trainer's connector sets this attribute, which has no public getter (2.5 to 2.6).
    """
    return strategy._layer_sync


def set_layer_sync(strategy: Any, layer_sync: Any) -> None:
    """Sets the LayerSync plugin of a strategy, or None."""
    strategy._layer_sync = layer_sync


def revert_layer_sync(strategy: Any) -> None:
    """Makes the LayerSync plugin of a strategy, if it has one, revert its change of the model at the end of ``fit``."""
    trainer, plugin = user_modules.trainer_of(strategy.lightning_module), layer_sync(strategy)
    if plugin is not None and trainer is not None and trainer.state.fn == TrainerFn.FITTING:
        strategy.model = plugin.revert(strategy.model)


def tear_down(strategy: Any) -> None:
    """Moves the module and the optimizers of a strategy to the CPU, and tears down its plugins.

    It does the same as ``Strategy.teardown``, and also works without an accelerator, after an early failure. The
    function that moves optimizers is private (2.5 to 2.6).
    """
    user_modules.move_optimizers(strategy.optimizers, torch.device("cpu"))
    if strategy.lightning_module is not None:
        strategy.lightning_module.cpu()
    strategy.precision_plugin.teardown()
    if strategy.accelerator is not None:
        strategy.accelerator.teardown()
    strategy.checkpoint_io.teardown()


def wrap_stages_on_one_device(begin: Callable[[], bool], end: Callable[[], None]) -> None:
    """Calls ``begin`` before each stage of a Trainer on one device, and ``end`` after it if ``begin`` returned True.

    The strategy of such a Trainer is Lightning's own, so this function changes its class. ``setup_environment`` runs
    before all hooks, and ``teardown`` after all hooks but ``on_fit_end`` and ``teardown``; ``SingleDeviceStrategy``
    inherits both (2.5 to 2.6). Repeated calls are no-ops.
    """
    if "setup_environment" in vars(SingleDeviceStrategy):
        return
    setup_environment, teardown = SingleDeviceStrategy.setup_environment, SingleDeviceStrategy.teardown
    active: WeakSet[Any] = WeakSet()

    def begin_and_setup_environment(self: Any) -> None:
        if begin():
            active.add(self)
        setup_environment(self)

    def teardown_and_end(self: Any) -> None:
        teardown(self)
        if self in active:
            active.remove(self)
            end()

    SingleDeviceStrategy.setup_environment = begin_and_setup_environment  # type: ignore[method-assign]
    SingleDeviceStrategy.teardown = teardown_and_end  # type: ignore[method-assign]


def checkpoint_io_of(strategy: Any, default: Callable[[], Any]) -> Any:
    """Returns the plugin with which a strategy writes checkpoints: the user's plugin, or else ``default()``.

    A wrapping plugin, such as ``AsyncCheckpointIO``, gets the default as its inner plugin. If the user has passed an
    inner plugin, its setter ignores the default. Lightning's strategies do the same with Lightning's own default.
    Lightning's connectors read the attribute, which is None until then. The class has no public name either (2.5 to
    2.6).
    """
    if strategy._checkpoint_io is None:
        strategy._checkpoint_io = default()
    elif isinstance(strategy._checkpoint_io, _WrappingCheckpointIO):
        strategy._checkpoint_io.checkpoint_io = default()
    return strategy._checkpoint_io


def set_checkpoint_io(strategy: Any, checkpoint_io: Any) -> None:
    """Sets the plugin with which a strategy writes checkpoints."""
    strategy._checkpoint_io = checkpoint_io


def refuse_compiled_module(alternatives: str) -> Callable[[type[T]], type[T]]:
    """Returns a decorator for strategies that reject a LightningModule from ``torch.compile``.

    The Trainer rejects such a module as well, but its message names two of Lightning's strategies. It first sets the
    strategy's attribute for the module, and then raises before it calls a method of the strategy. The attribute and the
    mark on a compiled LightningModule are private (2.5 to 2.6).

    Args:
        alternatives: End of the message: the alternatives for the user.
    """

    def decorate(strategy_class: type[T]) -> type[T]:
        strategy_class._lightning_module = _CompiledModuleRefusal(alternatives)  # type: ignore[attr-defined]
        return strategy_class

    return decorate


class _CompiledModuleRefusal:
    """Descriptor without ``__get__``: reads find the module in the strategy's ``__dict__``, without overhead."""

    def __init__(self, alternatives: str) -> None:
        self._alternatives = alternatives

    def __set__(self, strategy: Any, module: Any) -> None:
        if getattr(module, "_compiler_ctx", None) is not None:
            name = type(strategy).__name__
            raise RuntimeError(
                f"`{name}` cannot train a LightningModule that `torch.compile` has compiled. {self._alternatives}"
            )
        vars(strategy)["_lightning_module"] = module
