"""Argument checks and reductions of single-process data parallelism, for both the Trainer and Fabric."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor

#: Last sentence of errors about the code of a step, because the user may be unable to change this code.
IF_OF_A_LIBRARY = "If the step is code of a library, use `strategy='ddp_ext'`."


def _mean(tensor: Tensor) -> Tensor:
    return (tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.float()).mean()


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": _mean,
    "avg": _mean,
    "sum": torch.sum,
    "min": torch.min,
    "max": torch.max,
    "product": torch.prod,
}


def check_replica_devices(devices: Sequence[torch.device] | None) -> None:
    """Rejects devices that cannot hold replicas.

    Raises:
        TypeError: If ``devices`` is not a list or tuple of devices.
        ValueError: If ``devices`` is empty, has several types or an unsupported type, or contains a GPU twice.
    """
    if devices is None:
        return
    if not isinstance(devices, (list, tuple)) or not all(isinstance(device, torch.device) for device in devices):
        raise TypeError(f"`parallel_devices` must be a list of torch.device, got {devices!r}.")
    if not devices:
        raise ValueError(
            "`parallel_devices=[]` contains no device for a replica. Pass at least one, or omit the argument."
        )
    kinds = sorted({device.type for device in devices})
    if len(kinds) > 1:
        raise ValueError(f"`parallel_devices` contains {' and '.join(kinds)} devices. Use devices of one type.")
    if len(devices) > 1 and kinds[0] not in ("cpu", "cuda"):
        raise ValueError(
            f"`strategy='dp_ext'` supports replicas on CPUs and CUDA devices, not on {len(devices)} devices of type"
            f" {kinds[0]!r}. Use `devices=1`."
        )
    if kinds[0] == "cuda" and len(set(devices)) < len(devices):
        raise ValueError(f"`parallel_devices={list(devices)}` contains a GPU twice. List each GPU once.")


def check_scatter(scatter: object, sequential: object) -> None:
    """Rejects a ``scatter`` or ``sequential`` of the wrong type.

    Raises:
        TypeError: If an argument has the wrong type.
    """
    if scatter is not None and not callable(scatter):
        raise TypeError(f"`scatter` must be a function of a batch and the number of replicas, got {scatter!r}.")
    if sequential is not None and not isinstance(sequential, bool):
        raise TypeError(f"`sequential` must be True, False or None, got {sequential!r}.")


def check_single_process(num_nodes: int, cluster_environment: ClusterEnvironment | None) -> None:
    """Rejects jobs of several hosts or processes.

    Raises:
        ValueError: If ``num_nodes`` is above 1, or a launcher has started several processes.
    """
    if num_nodes > 1:
        raise ValueError(
            f"`num_nodes={num_nodes}`: `strategy='dp_ext'` is one process on one host. Use `num_nodes=1`, or"
            " `strategy='ddp_ext'`."
        )
    if cluster_environment is None or not cluster_environment.creates_processes_externally:
        return
    if cluster_environment.world_size() > 1:
        raise ValueError(
            f"This script was started as {cluster_environment.world_size()} processes"
            f" ({type(cluster_environment).__name__}), but `strategy='dp_ext'` is one process that uses all devices."
            " Start it once, with `python`, or use `strategy='ddp_ext'`."
        )


def reduce_replicas(collection: Any, reduce_op: Any) -> Any:
    """Reduces each tensor of a collection, as gathered from replicas, over all of its entries.

    Args:
        collection: Tensor, or collection of tensors; other entries are unchanged.
        reduce_op: Reduction, "mean", "avg", "sum", "min", "max", "product", or a ``torch.distributed.ReduceOp``.

    Returns:
        The collection with 0-dim tensors. The mean of integers is a float.

    Raises:
        ValueError: If ``reduce_op`` is unknown.
    """
    name = "mean" if reduce_op is None else str(getattr(reduce_op, "name", reduce_op)).lower()
    if name not in _REDUCTIONS:
        raise ValueError(f"`reduce_op={reduce_op!r}` is unknown. Use one of {', '.join(_REDUCTIONS)}.")
    return apply_to_collection(collection, Tensor, _REDUCTIONS[name])
