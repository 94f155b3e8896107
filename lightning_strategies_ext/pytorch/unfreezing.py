"""Parameters that are frozen or unfrozen under the Trainer while it trains: DDP exchanges what needs a gradient now."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_strategies_ext.collectives.same_model import check_is_same
from lightning_strategies_ext.pytorch.buckets import BucketsByTrial
from lightning_strategies_ext.pytorch.compressed import Compressed
from lightning_strategies_ext.torch_distributed.distributed_model import DistributedModel
from lightning_strategies_ext.torch_distributed.exchange import Share
from lightning_strategies_ext.torch_distributed.gradient_sync import GradientSync
from lightning_strategies_ext.torch_distributed.wrapping import TrainableParameters

if TYPE_CHECKING:
    from lightning_strategies_ext.pytorch.parallel import ParallelStrategy

    class _Base(BucketsByTrial, Compressed, ParallelStrategy):
        """What the strategy is besides."""
else:
    _Base = object


class Unfreezing(_Base):
    """The part of a strategy that looks after which parameters are trained; inherited from first."""

    _gradient_sync: GradientSync
    _trainable: TrainableParameters | None = None

    def _look_after_unfreezing(self, model: DistributedDataParallel, share: Share | None) -> None:
        """Begins to do so.

        Args:
            model: In DDP.
            share: What the exchange of the model asks.
        """
        self._trainable = TrainableParameters(model, partial(self._train_others, share))

    def _train_others(self, share: Share | None, model: DistributedDataParallel, trained: Sequence[Tensor]) -> None:
        """Exchanges the gradients of those parameters that need one now; called by all ranks together.

        Args:
            share: See above.
            model: In DDP.
            trained: The parameters that were trained before.
        """
        check_is_same(self.collectives, model.module, self.root_device, is_trained=True)
        self._gradient_sync.bring_together(trained)
        self._wrap_again(model)
        self._gradient_sync.register_hook(model, self._compressed, share)
        if self._compressed is not None:
            self._compressed.follow()
        if isinstance(model, DistributedModel):
            model.exchange_directly(self._ddp_kwargs, tries_buckets=self._tries_buckets)
        if self._observer is not None:
            self._observer.exchange_changes()

    def _check_unfreezing(self) -> None:
        """Called before a backward pass.

        Raises:
            RuntimeError: If a parameter has been unfrozen in this step, after DDP has begun it.
        """
        if self._trainable is not None and self.world_size > 1:
            self._trainable.check_all_are_known()

    @override
    def teardown(self) -> None:
        """Lets go of the parameters."""
        self._trainable = None
        super().teardown()

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_trainable": None}
