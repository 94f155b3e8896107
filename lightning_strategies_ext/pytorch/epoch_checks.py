"""Epoch checks: after each training epoch, ranks compare what must be equal for their weights to stay equal.

Gradients are equal on all ranks, so that optimizers with equal settings keep equal weights. A learning rate that one
rank has changed alone makes the weights of the ranks differ more with each step, silently.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from lightning_strategies_ext._lightning import trainer_data
from lightning_strategies_ext.checks import GROUP_FIELDS, TRAINING_FIELDS, ChecksOptions
from lightning_strategies_ext.collectives import Collectives
from lightning_strategies_ext.exceptions import RankDisagreementError
from lightning_strategies_ext.failure.rank_status import MAX_RANKS_LISTED, format_ranks

#: Where a field belongs ("optimizer 0 (SGD), group 1", or "" for the training), and its name → value as text.
Values = dict[tuple[str, str], str]


class EpochChecks:
    """Compares parameter groups, the number of optimizer steps, and the seed of the samplers between ranks.

    Args:
        trainer: The Trainer.
        collectives: Function that returns the collectives of this rank.
        device: Device of this rank.
        options: Options of the checks.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        collectives: Callable[[], Collectives],
        device: torch.device,
        options: ChecksOptions,
    ) -> None:
        self._trainer = trainer
        self._collectives = collectives
        self._device = device
        self._fields = {*GROUP_FIELDS, *TRAINING_FIELDS} - {*options.excluded_fields}

    def compare(self) -> None:
        """Compares the ranks. Collective: all ranks call it, after an epoch; takes one round trip.

        Raises:
            RankDisagreementError: On every rank, if the ranks differ.
        """
        if not self._fields:
            return
        values, collectives = self._values(), self._collectives()
        digest = hashlib.sha256(repr(values).encode()).digest()
        own = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(self._device)
        gathered = collectives.all_gather(own).cpu()
        others = (gathered != gathered[0]).any(dim=1).nonzero().flatten().tolist()
        if not others:
            return
        shown = [0, *others[: MAX_RANKS_LISTED - 1]]
        found: dict[int, Values] = {rank: collectives.broadcast(values, rank) for rank in shown}
        collectives.barrier()  # a rank that raises leaves the collectives, so all must have the values
        raise RankDisagreementError(_describe(found, len(others) + 1 - len(shown), self._trainer.current_epoch - 1))

    def _values(self) -> Values:
        values: Values = {}
        for index, optimizer in enumerate(self._trainer.optimizers):
            for number, group in enumerate(optimizer.param_groups):
                owner = f"optimizer {index} ({type(optimizer).__name__}), group {number}"
                for field in GROUP_FIELDS:
                    if field in self._fields and field in group:
                        values[owner, field] = _text(group[field])
        if "optimizer_steps" in self._fields:
            values["", "optimizer_steps"] = str(self._trainer.global_step)
        if "sampler_seed" in self._fields:
            fetcher = trainer_data.data_fetcher_of(self._trainer)
            loaders = [] if fetcher is None else fetcher.combined_loader.flattened
            for index, loader in enumerate(loaders):
                sampler = getattr(loader, "sampler", None)
                if not isinstance(sampler, DistributedSampler) or not sampler.shuffle:
                    continue
                if sampler.num_replicas == self._trainer.world_size:
                    values[f"DataLoader {index}", "sampler_seed"] = str(sampler.seed + sampler.epoch)
        return values


def _text(value: Any) -> str:
    return repr(value.item() if isinstance(value, Tensor) and value.numel() == 1 else value)


def _describe(found: dict[int, Values], num_omitted: int, epoch: int) -> str:
    """Returns the text of the error for the first difference.

    Args:
        found: Values of some ranks, among them rank 0.
        num_omitted: Number of further ranks that differ from rank 0.
        epoch: Epoch that has ended.
    """
    keys = dict.fromkeys(key for values in found.values() for key in values)
    different = [key for key in keys if len({values.get(key) for values in found.values()}) > 1]
    owner, field = different[0]
    ranks_with: dict[str, list[int]] = {}
    for rank, values in found.items():
        ranks_with.setdefault(values.get((owner, field), "missing"), []).append(rank)
    listed = ", ".join(f"{value} on {format_ranks(ranks)}" for value, ranks in ranks_with.items())
    omitted_text = f" ({num_omitted} more ranks differ from rank 0)" if num_omitted else ""
    others_text = f" {len(different) - 1} other fields differ, too." if len(different) > 1 else ""
    owner_text = f" of {owner}" if owner else ""
    return (
        f"The ranks differ in `{field}`{owner_text} after epoch {epoch}: {listed}{omitted_text}.{others_text}"
        " Their weights would differ more with each step. Set the value alike on all ranks: it must not depend on"
        " the rank, on random numbers, or on a value that is logged without `sync_dist=True`. If it differs on"
        f" purpose, pass `checks=ChecksOptions(excluded_fields=({field!r},))` to the strategy."
    )
