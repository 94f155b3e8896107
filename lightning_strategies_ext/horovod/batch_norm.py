"""Batch normalisation over all ranks, by Horovod's own layer, which computes on GPUs only."""

from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d, Module

_BATCH_NORMS = (BatchNorm1d, BatchNorm2d, BatchNorm3d)


class SynchronizedBatchNorm:
    """Puts Horovod's layers in the place of a module's, until :meth:`revert`. Weights and buffers are shared.

    Args:
        module: The module.
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

    def revert(self) -> None:
        """Puts the module's own layers back."""
        for parent, name, layer in self._replaced:
            layer.train(getattr(parent, name).training)
            setattr(parent, name, layer)
        self._replaced.clear()
