"""Exact evaluation under Fabric: DataLoaders whose samples are sharded without repetition."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DistributedSampler

from lightning_strategies_ext._lightning.samplers import repeat_no_samples


class ExactLoader:
    """DataLoader that returns each sample on one rank only, so that ranks may have different numbers of batches.

    It forwards all other attributes to the DataLoader.

    Args:
        loader: DataLoader with a distributed sampler, which is changed.
        before_iteration: Function that is called when an iteration begins, on all ranks.
    """

    def __init__(self, loader: Any, before_iteration: Callable[[], None]) -> None:
        self.__dict__.update(loader.__dict__)  # as Fabric's own wrapper does
        self.inner = loader
        self._before_iteration = before_iteration
        for owner in (loader, getattr(loader, "batch_sampler", None)):
            sampler = getattr(owner, "sampler", None)
            if isinstance(sampler, DistributedSampler) and not sampler.drop_last:
                repeat_no_samples(sampler)

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        self._before_iteration()
        return iter(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self.inner, name)
