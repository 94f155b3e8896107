"""``bucket_cap_mb="auto"`` under the Trainer: wraps the module in DDP again between steps, with other bucket sizes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_strategies_ext.torch_distributed.bucket_search import (
    AUTO,
    BucketSearch,
    check_can_search,
    gradient_bytes,
)
from lightning_strategies_ext.torch_distributed.wrapping import rewrap_in_ddp

if TYPE_CHECKING:
    from lightning_strategies_ext.pytorch.parallel import ParallelStrategy as _Base
else:
    _Base = object

_ASKED_FOR = f"`bucket_cap_mb={AUTO!r}`"


class BucketsByTrial(_Base):
    """Mixin that tries bucket sizes if requested; precedes the strategy among the base classes."""

    _ddp_kwargs: dict[str, Any]
    _bucket_sizes: Mapping[str, float] = {}
    _tries_buckets = False
    _bucket_search: BucketSearch | None = None

    def _take_bucket_size(self, ddp_kwargs: dict[str, Any], **others: Any) -> None:
        """Removes ``bucket_cap_mb="auto"`` from DDP's arguments and enables the search.

        Args:
            ddp_kwargs: Arguments of DistributedDataParallel.
            **others: Arguments of the strategy that exclude a search; None if the user has not passed them.

        Raises:
            ValueError: If an argument excludes the requested search.
        """
        self._tries_buckets = ddp_kwargs.get("bucket_cap_mb") == AUTO
        if self._tries_buckets:
            check_can_search(ddp_kwargs, others)
            del ddp_kwargs["bucket_cap_mb"]

    def _begin_to_try_buckets(self, model: DistributedDataParallel) -> None:
        """Starts the search for a model with DDP's own buckets. Collective: all ranks call it."""
        self._bucket_sizes = {}
        if not self._tries_buckets or self.world_size == 1:
            return
        search = BucketSearch(gradient_bytes(model), self.root_device)
        if search.is_over:
            rank_zero_info(f"{_ASKED_FOR}: all gradients fit the smallest bucket, and there is nothing to choose.")
        else:
            self._bucket_search = search

    @override
    def _before_train_step(self) -> None:
        super()._before_train_step()
        search = self._bucket_search
        if search is None or not search.end_step():
            return
        cap = search.cap
        if search.is_over:
            self._bucket_search = None
            choice = search.choose(lambda times: self.collectives.reduce(times, reduce_op="mean"))
            rank_zero_info(f"{_ASKED_FOR}: {choice}.")
            cap = choice.cap
        self._put_in_buckets(cap)

    def _put_in_buckets(self, cap: float | None) -> None:
        """Wraps the module in DDP again with a bucket size. Collective: all ranks call it between two steps.

        Args:
            cap: Bucket size in MiB; None for DDP's default.
        """
        assert isinstance(self.model, DistributedDataParallel)
        self._bucket_sizes = {} if cap is None else {"bucket_cap_mb": cap}
        self._wrap_again(self.model)
        if self._observer is not None:
            self._observer.on_exchange_change()

    def _wrap_again(self, model: DistributedDataParallel) -> None:
        rewrap_in_ddp(model, self.root_device, **self._ddp_kwargs, **self._bucket_sizes)

    def _end_trying_buckets(self) -> None:
        """Ends an unfinished search; called at the end of a stage."""
        if self._bucket_search is not None:
            left = self._bucket_search.num_steps_left
            rank_zero_info(f"{_ASKED_FOR}: nothing was chosen, since that takes {left} more steps.")
            self._bucket_search = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_bucket_search": None}
