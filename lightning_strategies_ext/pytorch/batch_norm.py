"""Synchronized batch normalization: the layers of torch and Horovod support GPUs only."""

import torch
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm


def check_can_be_synchronized(module: Module, device: torch.device) -> None:
    """Rejects synchronized batch normalization on CPUs.

    Args:
        module: Module to train; a module without batch normalization is accepted.
        device: Device of this rank.

    Raises:
        ValueError: If the module has batch normalization and the device is a CPU.
    """
    if device.type == "cpu" and any(isinstance(layer, _BatchNorm) for layer in module.modules()):
        raise ValueError(
            "`sync_batchnorm=True` needs GPUs: neither torch's SyncBatchNorm nor Horovod's computes on CPUs, and"
            f" {type(module).__name__} has batch normalisation. Leave it out, or use `accelerator='gpu'`."
        )
