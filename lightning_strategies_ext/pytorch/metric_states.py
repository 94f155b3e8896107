"""States of torchmetrics metrics: all metrics that Lightning computes at the end of an epoch share one exchange.

torchmetrics gathers each state of each metric in a separate collective. Here, each metric first lists the tensors that
it would gather: it synchronizes with a ``dist_sync_fn`` that records them. One exchange gathers the tensors of all
metrics as bytes. Each metric then computes with a ``dist_sync_fn`` that returns the gathered tensors. torchmetrics
itself therefore reduces the states, and their dtypes and shapes may differ between ranks.
"""

import pickle
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available

from lightning_strategies_ext._lightning.user_modules import synchronizes_itself
from lightning_strategies_ext.collectives import Collectives

#: Largest number of bytes of all ranks that one all-gather receives.
_MAX_GATHERED_NUM_BYTES: Final = 64 << 20
_ALIGNMENT: Final = 16
#: Size from which a tensor is compared with others of its dtype and shape, so that equal tensors occur once.
_MIN_COMPARED_NUM_BYTES: Final = 16 << 10
#: Data type, shape, and position in the bytes of each tensor of a metric, and whether it is on the CPU.
_Header = list[list[tuple[torch.dtype, tuple[int, ...], int, bool]]]


def is_gathered(metric: Metric, device_type: str) -> bool:
    """Returns whether the states of a metric are gathered together with those of other metrics.

    The result is the same on all ranks. It is False for metrics with settings of their own for synchronization, metrics
    that contain metrics, and metrics whose states are on other devices than that of the rank. torchmetrics gathers the
    states of these metrics.

    Args:
        metric: The metric.
        device_type: Type of the rank's device.
    """
    return not (
        metric.dist_sync_fn is not None
        or metric.distributed_available_fn is not jit_distributed_available
        or metric.process_group is not None
        or metric.dist_sync_on_step
        or not metric.sync_on_compute
        or not metric.compute_with_cache
        or metric.device.type != device_type
        or (metric.compute_on_cpu and device_type != "cpu")
        or synchronizes_itself(metric)
        or any(isinstance(module, Metric) for module in metric.modules() if module is not metric)
    )


def list_states(metric: Metric) -> list[Tensor]:
    """Returns the tensors that a metric passes to its ``dist_sync_fn``, in this order.

    torchmetrics copies all states before it synchronizes them, and concatenates a list state twice. Its public methods
    include none that lists states with their reductions and does not copy them.
    """
    tensors: list[Tensor] = []

    def record(tensor: Tensor, group: Any = None) -> list[Tensor]:
        tensors.append(tensor)
        return [tensor]

    metric.sync(dist_sync_fn=record, distributed_available=lambda: True)
    metric.unsync()
    return tensors


def compute(metric: Metric, states_of_ranks: Sequence[Sequence[Tensor]]) -> None:
    """Computes a metric, which keeps the result until it is updated or reset.

    Args:
        metric: The metric.
        states_of_ranks: Tensors of :func:`list_states` of each rank; all ranks have the same number of tensors.
    """
    states = map(_with_equal_types, zip(*states_of_ranks, strict=True))
    metric.dist_sync_fn = lambda tensor, group=None: next(states)
    # torchmetrics warns of a metric without updates, but other ranks may have some.
    num_updates, metric._update_count = metric._update_count, max(metric._update_count, 1)
    try:
        metric.compute()
    finally:
        metric.dist_sync_fn, metric._update_count = None, num_updates


def to_bytes(states: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
    """Returns the states of several metrics as bytes. Equal large tensors, as of a compute group, occur once.

    Args:
        states: Tensors of each metric.
        device: Device of the result.
    """
    header: _Header = []
    blobs: list[Tensor] = []
    large: dict[tuple[torch.dtype, torch.Size], list[tuple[Tensor, int]]] = {}
    num_bytes = 0
    for tensors in states:
        header.append([])
        for tensor in tensors:
            blob = tensor.detach().to(device).reshape(-1).contiguous().view(torch.uint8)
            others = large.setdefault((tensor.dtype, tensor.shape), []) if len(blob) >= _MIN_COMPARED_NUM_BYTES else []
            at = next((at for other, at in others if torch.equal(other, blob)), num_bytes)
            if at == num_bytes:
                others.append((blob, at))
                blobs += [blob, _padding(len(blob), device)]
                num_bytes += len(blob) + len(blobs[-1])
            header[-1].append((tensor.dtype, tuple(tensor.shape), at, tensor.is_cpu))
    pickled = torch.frombuffer(bytearray(pickle.dumps(header)), dtype=torch.uint8).to(device)
    length = torch.tensor([len(pickled), 0], dtype=torch.int64, device=device).view(torch.uint8)
    return torch.cat([length, pickled, _padding(len(pickled), device), *blobs])


def from_bytes(data: Tensor) -> list[list[Tensor]]:
    """Returns the states of the metrics of a rank; tensors on the device of ``data`` share its memory."""
    length = int(data[:8].view(torch.int64))
    header: _Header = pickle.loads(data[_ALIGNMENT : _ALIGNMENT + length].cpu().numpy().tobytes())
    blobs = data[_ALIGNMENT + length + -length % _ALIGNMENT :]
    return [
        [_tensor_at(blobs, dtype, shape, at, is_on_host=is_on_host) for dtype, shape, at, is_on_host in tensors]
        for tensors in header
    ]


def _tensor_at(blobs: Tensor, dtype: torch.dtype, shape: tuple[int, ...], at: int, *, is_on_host: bool) -> Tensor:
    tensor = blobs[at : at + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
    return tensor.cpu() if is_on_host else tensor


def gather_bytes(collectives: Collectives, data: Tensor, max_num_bytes: int) -> list[Tensor]:
    """Gathers the bytes of all ranks. Collective.

    Args:
        collectives: Collectives of all ranks.
        data: Bytes of this rank.
        max_num_bytes: Largest number of bytes of a rank, a multiple of 16.

    Returns:
        The bytes of each rank, in rank order; zeros follow the bytes of ranks with fewer bytes.
    """
    size = collectives.world_size()
    own = data if len(data) == max_num_bytes else torch.cat([data, data.new_zeros(max_num_bytes - len(data))])
    chunk = max(_MAX_GATHERED_NUM_BYTES // size // _ALIGNMENT, 1) * _ALIGNMENT
    gathered = own.new_empty(size, max_num_bytes)
    for start in range(0, max_num_bytes, chunk):
        part = own[start : start + chunk]
        is_all = len(part) == max_num_bytes
        rows = gathered.view(-1) if is_all else part.new_empty(size * len(part))
        collectives.start_all_gather(rows, part, "metric_states")()
        if not is_all:
            gathered[:, start : start + chunk] = rows.view(size, -1)
    return [*gathered]


def _with_equal_types(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Gives empty tensors the dtype and the trailing dimensions of the other ranks' tensors.

    For a list state without elements, torchmetrics creates an empty vector of the default dtype.
    """
    model = max(tensors, key=Tensor.numel)
    return [
        model.new_empty((0, *model.shape[1:])) if not tensor.numel() and model.ndim else tensor for tensor in tensors
    ]


def _padding(num_bytes: int, device: torch.device) -> Tensor:
    return torch.zeros(-num_bytes % _ALIGNMENT, dtype=torch.uint8, device=device)
