"""Batch normalisation over all ranks: torch's layer, and Horovod's, compute it on GPUs only."""

import torch
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm


def check_can_be_synchronized(module: Module, device: torch.device) -> None:
    """Refuses batch normalisation that is to be synchronised between CPUs.

    Args:
        module: To be trained. One without such layers has nothing to synchronise.
        device: Of this rank.

    Raises:
        ValueError: If it is.
    """
    if device.type == "cpu" and any(isinstance(layer, _BatchNorm) for layer in module.modules()):
        raise ValueError(
            "`sync_batchnorm=True` needs GPUs: neither torch's SyncBatchNorm nor Horovod's computes on CPUs, and"
            f" {type(module).__name__} has batch normalisation. Leave it out, or use `accelerator='gpu'`."
        )
