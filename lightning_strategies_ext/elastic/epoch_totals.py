"""Epoch totals: metrics and logged values of an epoch, reduced over all ranks at a commit.

During an epoch, each rank accumulates ``self.log(on_epoch=True, sync_dist=True)`` and metrics of torchmetrics over its
own batches. The values of a lost rank would be missing at the end of the epoch. Therefore a commit contains the totals
over all ranks, from which the ranks continue after a loss.
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

from lightning_strategies_ext._lightning import logging_state, user_modules
from lightning_strategies_ext.collectives import Collectives

#: Operation for each of torchmetrics' reductions. Totals omit metrics with a state with another reduction (a list, a
#: mean, a function): totals of its other states would not match this state.
_OPERATIONS: dict[Callable[..., Any], str] = {dim_zero_sum: "sum", dim_zero_max: "max", dim_zero_min: "min"}


@dataclass(frozen=True)
class MetricPart:
    """One rank's contribution to a total, or the total itself: a state of a metric or of a logged value.

    Attributes:
        module: Name of the metric in the LightningModule; None for a logged value.
        key: Name of the state in the metric; for a logged value, Lightning's key of the value and name of the state.
        op: Operation that reduces the contributions of the ranks: "sum", "max" or "min".
        value: This rank's contribution, or the total.
    """

    module: str | None
    key: tuple[str, ...]
    op: str
    value: Tensor


@dataclass(frozen=True)
class EpochTotals:
    """Totals of all metrics and logged values; equal on all ranks.

    Attributes:
        parts: Totals, on the CPU.
        position: Lightning's state of ``self.log`` without the values, such as the index of the batch.
    """

    parts: list[MetricPart]
    position: Any

    @classmethod
    def gather(cls, trainer: "pl.Trainer", collectives: Collectives) -> "EpochTotals | None":
        """Computes the totals between two steps. Collective: all ranks call it.

        Returns:
            The totals; None if the ranks have different metrics or logged values.
        """
        parts = list(_parts_of(trainer))
        device = trainer.lightning_module.device
        if not _are_same_states(parts, device, collectives):
            return None
        sums = _reduce([part for part in parts if part.op == "sum"], "sum", device, collectives)
        others = _reduce([part for part in parts if part.op != "sum"], "max", device, collectives)
        return cls([*sums, *others], logging_state.logging_position(trainer))

    def restore(self, trainer: "pl.Trainer", rank: int) -> None:
        """Restores sums on rank 0 only, with zeros on the other ranks, and maxima and minima on all ranks."""
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
        logging_state.add_logged_sums(trainer, (self.position, logged))


def _parts_of(trainer: "pl.Trainer") -> Iterator[MetricPart]:
    _, logged = logging_state.logged_sums(trainer)
    for key, op in sorted(logging_state.logged_reductions(trainer).items()):
        for state, value in sorted(logged.get(key, {}).items()):
            yield MetricPart(None, (key, state), op, value)
    for name, module in trainer.lightning_module.named_modules():
        if isinstance(module, Metric):
            reductions = user_modules.metric_reductions(module)
            values = {state: getattr(module, state) for state in reductions}
            if all(_has_total(value, reductions[state]) for state, value in values.items()):
                for state, value in values.items():
                    yield MetricPart(name, (state,), _OPERATIONS[reductions[state]], value)


def _has_total(value: Any, reduction: Any) -> bool:
    return reduction in _OPERATIONS and isinstance(value, Tensor) and not value.is_complex()


def _are_same_states(parts: list[MetricPart], device: torch.device, collectives: Collectives) -> bool:
    """Returns whether all ranks have the same states. Collective: all ranks call it."""
    description = repr([(part.module, part.key, part.op, tuple(part.value.shape)) for part in parts])
    digest = int.from_bytes(blake2b(description.encode(), digest_size=6).digest(), "big")  # exact as a float64
    digests = torch.tensor([digest, -digest], dtype=torch.float64, device=device)
    largest, negated_smallest = collectives.reduce(digests, reduce_op="max").tolist()
    return bool(largest == -negated_smallest)


def _reduce(parts: list[MetricPart], op: str, device: torch.device, collectives: Collectives) -> list[MetricPart]:
    """Returns the totals; minima are computed as maxima of negated values. Collective: all ranks call it."""
    if not parts:
        return []
    signs = [-1 if part.op == "min" else 1 for part in parts]
    values = [part.value.detach().to(device, torch.float64).flatten() for part in parts]
    local = torch.cat([sign * each for sign, each in zip(signs, values, strict=True)])
    totals = collectives.reduce(local, reduce_op=op).cpu().split([len(each) for each in values])
    return [
        replace(part, value=(sign * each).view(part.value.shape).to(part.value.dtype))
        for part, sign, each in zip(parts, signs, totals, strict=True)
    ]
