"""Support for freezing and unfreezing under the Trainer: DDP follows changes of ``requires_grad`` during training."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_strategies_ext.collectives.model_check import check_same_model
from lightning_strategies_ext.pytorch.buckets import BucketsByTrial
from lightning_strategies_ext.pytorch.compressed import Compressed
from lightning_strategies_ext.torch_distributed.distributed_model import DistributedModel
from lightning_strategies_ext.torch_distributed.gradient_exchange import Contribution
from lightning_strategies_ext.torch_distributed.gradient_sync import GradientSyncOptions
from lightning_strategies_ext.torch_distributed.wrapping import TrainableParameterTracker

if TYPE_CHECKING:
    from lightning_strategies_ext.pytorch.parallel import ParallelStrategy

    class _Base(BucketsByTrial, Compressed, ParallelStrategy):
        """Other base classes of the strategy, for type checkers."""
else:
    _Base = object


class Unfreezing(_Base):
    """Mixin that tracks which parameters are trained; precedes the strategy among the base classes."""

    _gradient_sync: GradientSyncOptions
    _trainable: TrainableParameterTracker | None = None

    def _look_after_unfreezing(self, model: DistributedDataParallel, share: Contribution | None) -> None:
        """Starts the tracking of trained parameters.

        Args:
            model: Model in DDP.
            share: This rank's contribution to the exchange; None if all ranks always contribute.
        """
        self._trainable = TrainableParameterTracker(model, partial(self._train_others, share))

    def _train_others(
        self, share: Contribution | None, model: DistributedDataParallel, trained: Sequence[Tensor]
    ) -> None:
        """Wraps the model in DDP again for the parameters that now require a gradient. Collective: all ranks call it.

        Args:
            share: This rank's contribution to the exchange; None if all ranks always contribute.
            model: Model in DDP.
            trained: Parameters that were trained before the change.
        """
        check_same_model(self.collectives, model.module, self.root_device, is_trained=True)
        self._gradient_sync.average_parameters(trained)
        self._wrap_again(model)
        self._gradient_sync.register_hook(model, self._compressed, share)
        if self._compressed is not None:
            self._compressed.on_ddp_rebuilt()
        if isinstance(model, DistributedModel):
            model.exchange_directly(self._ddp_kwargs, tries_buckets=self._tries_buckets)
        if self._observer is not None:
            self._observer.on_exchange_change()

    def _check_unfreezing(self) -> None:
        """Rejects a backward pass with a parameter that DDP does not exchange; called before each backward pass.

        Raises:
            RuntimeError: If a parameter was unfrozen in this step, after DDP's forward.
        """
        if self._trainable is not None and self.world_size > 1:
            self._trainable.check_none_unfrozen()

    @override
    def teardown(self) -> None:
        """Ends the tracking of trained parameters."""
        self._trainable = None
        super().teardown()

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_trainable": None}
