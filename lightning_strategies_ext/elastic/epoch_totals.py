"""Totals: values that ranks accumulate over an epoch, each a part, reduced over all ranks at a commit.

The parts of a lost rank are therefore not lost, for ``self.log(on_epoch=True, sync_dist=True)`` and metrics of
torchmetrics, and a rank that joins continues from the totals.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_max, dim_zero_min, dim_zero_sum

from lightning_strategies_ext._lightning import trainer_logging, user_modules
from lightning_strategies_ext.collectives import Collectives

#: Reduction of each state over ranks. Unknown for a list of tensors, a mean, and custom functions, which are omitted.
_MERGED_BY: dict[Callable[..., Any], str] = {dim_zero_sum: "sum", dim_zero_max: "max", dim_zero_min: "min"}


@dataclass(frozen=True)
class MetricPart:
    """A state of which each rank has a part.

    Attributes:
        module: Name of the metric in the module; None for values of ``self.log``.
        key: Name of the state in the metric; for a logged value, Lightning's key of the value and name of the state.
        op: "sum", "max" or "min".
        value: Part of this rank, or value over all ranks.
    """

    module: str | None
    key: tuple[str, ...]
    op: str
    value: Tensor


@dataclass(frozen=True)
class EpochTotals:
    """Values that all ranks have accumulated, the same on each rank.

    Attributes:
        parts: States with their values over all ranks, on the CPU.
        position: Position of ``self.log`` in the epoch.
    """

    parts: list[MetricPart]
    position: Any

    @classmethod
    def gather(cls, trainer: "pl.Trainer", collectives: Collectives) -> "EpochTotals | None":
        """Computes the totals between two steps. Collective: all ranks call it.

        Returns:
            The totals; None if the ranks have different states, for example because they have logged different values.
        """
        parts = list(_parts_of(trainer))
        device = trainer.lightning_module.device
        if not _are_alike(parts, device, collectives):
            return None
        sums = _reduced([part for part in parts if part.op == "sum"], "sum", device, collectives)
        extremes = _reduced([part for part in parts if part.op != "sum"], "max", device, collectives)
        return cls([*sums, *extremes], trainer_logging.logging_position(trainer))

    def restore(self, trainer: "pl.Trainer", rank: int) -> None:
        """Restores the totals on rank 0, and neutral values on the other ranks, so that a reduction is unchanged."""
        logged: dict[str, dict[str, Any]] = {}
        modules = dict(trainer.lightning_module.named_modules())
        for part in self.parts:
            value = part.value.clone() if rank == 0 or part.op != "sum" else torch.zeros_like(part.value)
            *key, state = part.key
            if part.module is None:
                logged.setdefault(key[0], {})[state] = value
            else:
                metric = modules[part.module]
                setattr(metric, state, value.to(getattr(metric, state).device))
        trainer_logging.add_logged_sums(trainer, (self.position, logged))


def _parts_of(trainer: "pl.Trainer") -> Iterator[MetricPart]:
    _, logged = trainer_logging.logged_sums(trainer)
    for key, op in sorted(trainer_logging.logged_reductions(trainer).items()):
        for state, value in sorted(logged.get(key, {}).items()):
            yield MetricPart(None, (key, state), op, value)
    for name, module in trainer.lightning_module.named_modules():
        if isinstance(module, Metric):
            for state, merged_by in user_modules.metric_reductions(module).items():
                value = getattr(module, state)
                if merged_by in _MERGED_BY and isinstance(value, Tensor) and not value.is_complex():
                    yield MetricPart(name, (state,), _MERGED_BY[merged_by], value)


def _are_alike(parts: list[MetricPart], device: torch.device, collectives: Collectives) -> bool:
    """Returns whether all ranks have the same states. Collective: all ranks call it."""
    said = repr([(part.module, part.key, part.op, tuple(part.value.shape)) for part in parts])
    number = int.from_bytes(blake2b(said.encode(), digest_size=6).digest(), "big")  # exact as a float64
    seen = torch.tensor([number, -number], dtype=torch.float64, device=device)
    largest, smallest = collectives.reduce(seen, reduce_op="max").tolist()
    return bool(largest == -smallest)


def _reduced(parts: list[MetricPart], op: str, device: torch.device, collectives: Collectives) -> list[MetricPart]:
    """Returns the parts with their values over all ranks; minima are computed as maxima of negated values."""
    if not parts:
        return []
    signs = [-1 if part.op == "min" else 1 for part in parts]
    values = [part.value.detach().to(device, torch.float64).flatten() for part in parts]
    own = torch.cat([sign * each for sign, each in zip(signs, values, strict=True)])
    whole = collectives.reduce(own, reduce_op=op).cpu().split([len(each) for each in values])
    return [
        replace(part, value=(sign * each).view(part.value.shape).to(part.value.dtype))
        for part, sign, each in zip(parts, signs, whole, strict=True)
    ]
