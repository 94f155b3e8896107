"""Training that goes on: what an earlier ``fit`` left in the optimizers, put into those of the next one."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

Optimizers = tuple[Sequence[Optimizer], Sequence[Any]]


def carry_over(earlier: Optimizers, current: Optimizers) -> None:
    """Gives optimizers and schedulers the state of those of an earlier ``fit`` of the same module.

    Where the module configures others by now (of another class, with other groups), they start anew, and it says so.

    Args:
        earlier: Optimizers and ``LRSchedulerConfig`` of the earlier ``fit``.
        current: Those of this one.
    """
    if _shapes(earlier) != _shapes(current):
        rank_zero_warn(
            "`configure_optimizers` returns other optimizers or schedulers than in the `fit` before: they start anew."
        )
        return
    for old, new in zip(earlier[0], current[0], strict=True):
        new.load_state_dict(old.state_dict())
    for old_config, new_config in zip(earlier[1], current[1], strict=True):
        new_config.scheduler.load_state_dict(old_config.scheduler.state_dict())


def _shapes(optimizers: Optimizers) -> Any:
    return (
        [
            (type(optimizer), [[parameter.shape for parameter in group["params"]] for group in optimizer.param_groups])
            for optimizer in optimizers[0]
        ],
        [type(config.scheduler) for config in optimizers[1]],
    )
