"""What ranks add up over an epoch, each a part of it, taken together at a commit.

So a rank that is lost takes along nothing of what ``self.log(on_epoch=True, sync_dist=True)`` and metrics of
torchmetrics have counted, and whoever joins counts from there.
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

#: How what ranks have is made one; of a list of tensors, of a mean and of a function of the user's it is not known.
_MERGED_BY: dict[Callable[..., Any], str] = {dim_zero_sum: "sum", dim_zero_max: "max", dim_zero_min: "min"}


@dataclass(frozen=True)
class Part:
    """A state that each rank has a part of.

    Attributes:
        module: Name of the metric in the module; None for what ``self.log`` adds up.
        key: Of the state in the metric; of a logged value, the name by which Lightning keeps it, and that of the state.
        op: "sum", "max" or "min".
        value: This rank's part, or that of all.
    """

    module: str | None
    key: tuple[str, ...]
    op: str
    value: Tensor


@dataclass(frozen=True)
class Totals:
    """What all ranks together have added up, the same on each.

    Attributes:
        parts: With the values of all, on the CPU.
        position: Where in the epoch ``self.log`` is.
    """

    parts: list[Part]
    position: Any

    @classmethod
    def of(cls, trainer: "pl.Trainer", collectives: Collectives) -> "Totals | None":
        """Takes what the ranks have; called by all together, between two steps.

        Returns:
            The totals; None where some ranks have logged what others have not, so that there is nothing to add it to.
        """
        parts = list(_parts_of(trainer))
        device = trainer.lightning_module.device
        if not _are_alike(parts, device, collectives):
            return None
        sums = _reduced([part for part in parts if part.op == "sum"], "sum", device, collectives)
        extremes = _reduced([part for part in parts if part.op != "sum"], "max", device, collectives)
        return cls([*sums, *extremes], trainer_logging.position_of_logging(trainer))

    def restore(self, trainer: "pl.Trainer", rank: int) -> None:
        """Gives the totals to rank 0, and to the others what changes nothing when all is taken together again."""
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
        trainer_logging.add_sums_of_logging(trainer, (self.position, logged))


def _parts_of(trainer: "pl.Trainer") -> Iterator[Part]:
    _, logged = trainer_logging.sums_of_logging(trainer)
    for key, op in sorted(trainer_logging.merging_of_logging(trainer).items()):
        for state, value in sorted(logged.get(key, {}).items()):
            yield Part(None, (key, state), op, value)
    for name, module in trainer.lightning_module.named_modules():
        if isinstance(module, Metric):
            for state, merged_by in user_modules.merging_of_metric(module).items():
                value = getattr(module, state)
                if merged_by in _MERGED_BY and isinstance(value, Tensor) and not value.is_complex():
                    yield Part(name, (state,), _MERGED_BY[merged_by], value)


def _are_alike(parts: list[Part], device: torch.device, collectives: Collectives) -> bool:
    """Whether all ranks have parts of the same."""
    said = repr([(part.module, part.key, part.op, tuple(part.value.shape)) for part in parts])
    number = int.from_bytes(blake2b(said.encode(), digest_size=6).digest(), "big")  # a float64 has room for it
    seen = torch.tensor([number, -number], dtype=torch.float64, device=device)
    largest, smallest = collectives.reduce(seen, reduce_op="max").tolist()
    return bool(largest == -smallest)


def _reduced(parts: list[Part], op: str, device: torch.device, collectives: Collectives) -> list[Part]:
    """Parts with the values of all ranks; those of minima are negated on the way."""
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
