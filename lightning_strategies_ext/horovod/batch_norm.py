"""Synchronized batch normalization with Horovod's layer, which computes on GPUs only."""

from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d, Module

_BATCH_NORMS = (BatchNorm1d, BatchNorm2d, BatchNorm3d)


class SynchronizedBatchNorm:
    """Replaces the batch normalization layers of a module with Horovod's layers, until :meth:`restore`.

    Both layers share their parameters and buffers.

    Args:
        module: The module that contains the layers.
    """

    def __init__(self, module: Module) -> None:
        from horovod.torch import SyncBatchNorm

        self._replaced: list[tuple[Module, str, Module]] = []
        for parent in list(module.modules()):
            for name, layer in parent.named_children():
                if isinstance(layer, _BATCH_NORMS):
                    synchronized = SyncBatchNorm(
                        layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats
                    )
                    synchronized._parameters, synchronized._buffers = layer._parameters, layer._buffers
                    synchronized.train(layer.training)
                    setattr(parent, name, synchronized)
                    self._replaced.append((parent, name, layer))

    def restore(self) -> None:
        """Restores the original layers of the module."""
        for parent, name, layer in self._replaced:
            layer.train(getattr(parent, name).training)
            setattr(parent, name, layer)
        self._replaced.clear()
