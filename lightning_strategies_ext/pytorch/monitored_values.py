"""Monitored values: all ranks decide by the values of rank 0.

A value that is logged without ``sync_dist``, or with ``rank_zero_only``, differs between ranks. Ranks that monitor
different values keep different lists of the best checkpoints, write and remove different files, and train with
different learning rates. Here each event takes one small gather, after which all ranks use rank 0's value, and rank 0
names the ranks that have other values.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_strategies_ext.collectives import Collectives
from lightning_strategies_ext.exceptions import RankDisagreementError
from lightning_strategies_ext.failure.rank_status import format_ranks

#: Kinds of values: no value, one number, or another object, which stays as it is.
_MISSING, _NUMBER, _OTHER = range(3)
#: Types of numbers, by the index that ranks exchange: a Python number, or the dtype of a tensor.
_DTYPES = (None, torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)
#: Number of values that a warning lists; of more ranks, it lists rank 0's value, the smallest, and the largest.
_MAX_VALUES_LISTED = 4


class MonitoredValues:
    """Shares the monitored values of rank 0 with all ranks.

    Args:
        collectives: Function that returns the collectives of this rank.
        device: Device of this rank.
    """

    def __init__(self, collectives: Callable[[], Collectives], device: torch.device) -> None:
        self._collectives = collectives
        self._device = device
        self._reported: set[str] = set()

    def share(
        self, reader: str, monitor: str | None, others: Sequence[str], values: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns the logged values, with rank 0's values for the given names. Collective: all ranks call it.

        Without a name, it calls no collective.

        Args:
            reader: Class that reads the values, for messages.
            monitor: Name of the value that it monitors, if any.
            others: Names of other values that it reads.
            values: This rank's values.

        Raises:
            RankDisagreementError: On every rank, if rank 0 has no monitored value and another rank has one.
        """
        shared = dict(values)
        names = list(dict.fromkeys([*([] if monitor is None else [monitor]), *others]))
        if not names:
            return shared
        encoded = torch.tensor([_encode(values.get(name)) for name in names], dtype=torch.float64, device=self._device)
        gathered = self._collectives().all_gather(encoded).cpu()
        for index, name in enumerate(names):
            kind, dtype, value = gathered[0, index].tolist()
            if name == monitor and kind == _MISSING:
                self._check_is_missing_everywhere(reader, name, gathered[:, index, 0])
            self._report_differences(reader, name, gathered[:, index])
            if kind == _MISSING:
                shared.pop(name, None)
            elif kind == _NUMBER and not _are_equal(encoded[index].cpu(), gathered[0, index]):
                shared[name] = _decode(int(dtype), value, self._device)
        return shared

    def _check_is_missing_everywhere(self, reader: str, name: str, kinds: Tensor) -> None:
        ranks = kinds.nonzero().flatten().tolist()
        if not ranks:
            return
        self._collectives().barrier()  # a rank that raises leaves the collectives, so all must have the values
        raise RankDisagreementError(
            f"{reader} monitors `{name}`, which rank 0 has not logged, but {format_ranks(ranks)}"
            f" {'has' if len(ranks) == 1 else 'have'}. All ranks use rank 0's value, so that they decide alike. Call"
            f" `self.log({name!r}, ...)` on all ranks, with `sync_dist=True` for the mean, or on rank 0."
        )

    def _report_differences(self, reader: str, name: str, rows: Tensor) -> None:
        numbers = {rank: value for rank, (kind, _, value) in enumerate(rows.tolist()) if kind == _NUMBER}
        has_other = any(value != numbers.get(0) and value == value for value in numbers.values())
        if 0 not in numbers or not has_other or name in self._reported:
            return
        self._reported.add(name)
        if len(numbers) > _MAX_VALUES_LISTED:
            ranks = (0, min(numbers, key=numbers.__getitem__), max(numbers, key=numbers.__getitem__))
            numbers = {rank: numbers[rank] for rank in ranks}
        listed = ", ".join(f"{value:.6g} on rank {rank}" for rank, value in numbers.items())
        rank_zero_warn(
            f"`{name}`, which {reader} reads, differs between ranks: {listed}. All ranks use rank 0's value. Pass"
            f" `sync_dist=True` to `self.log({name!r}, ...)` to use the mean over ranks."
        )


def _encode(value: Any) -> tuple[float, float, float]:
    """Returns the kind, the index of the type, and the value as a float64."""
    if value is None:
        return _MISSING, 0, 0
    if isinstance(value, (int, float)):
        return _NUMBER, 0, value
    if isinstance(value, Tensor) and value.numel() == 1 and value.dtype in _DTYPES:
        return _NUMBER, _DTYPES.index(value.dtype), value.item()
    return _OTHER, 0, 0


def _decode(index: int, value: float, device: torch.device) -> Any:
    dtype = _DTYPES[index]
    return value if dtype is None else torch.tensor(value, dtype=dtype, device=device)


def _are_equal(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)
