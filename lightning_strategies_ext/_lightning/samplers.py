"""Private names of Lightning's distributed samplers, for the Trainer and Fabric."""

from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.distributed import _DatasetSamplerWrapper
from torch.utils.data import DistributedSampler, SequentialSampler

from lightning_strategies_ext._lightning._patching import replace_method
from lightning_strategies_ext.collectives.sampler_order import SharedOrder


def users_sampler(sampler: Any) -> Any:
    """Returns the user's sampler that one of Lightning's distributed samplers wraps; None if there is none.

    Lightning wraps a sampler that is neither torch's ``RandomSampler`` nor its ``SequentialSampler``, and for
    ``predict`` every sampler. The dataset of such a distributed sampler is a ``_DatasetSamplerWrapper`` with the user's
    sampler in ``_sampler`` (2.5 to 2.6).
    """
    dataset = getattr(sampler, "dataset", None)
    return dataset._sampler if isinstance(dataset, _DatasetSamplerWrapper) else None


def repeat_no_samples(sampler: Any) -> None:
    """Makes a distributed sampler return each sample on one rank only; some ranks have a sample less, or none.

    ``total_size`` and ``num_samples`` of torch's ``DistributedSampler`` determine how many samples it repeats.
    """
    sampler.total_size = len(sampler.dataset)
    sampler.num_samples = len(range(sampler.rank, sampler.total_size, sampler.num_replicas))


def share_orders_of_stage(loader: Any, trainer: Any, broadcast: Callable[[Any], Any]) -> None:
    """Replaces the order of the user's samplers in a DataLoader with rank 0's order, see :class:`.SharedOrder`.

    Args:
        loader: DataLoader, after Lightning has inserted its distributed sampler.
        trainer: Trainer of the stage.
        broadcast: Function that returns the object of rank 0 on every rank.
    """
    # A rank without samples does not iterate in `predict`.
    settings = broadcast, trainer.current_epoch, trainer.predicting
    share_orders(loader, lambda sampler: SharedOrder(sampler, *settings))


def share_orders(loader: Any, share: Callable[[Any], Any]) -> None:
    """Replaces the order of the user's samplers in a DataLoader that Lightning has made distributed.

    A distributed sampler calls ``reset``, ``__getitem__``, and ``__len__`` of its dataset. It passes the epoch to the
    user's sampler in some versions only, so here the order receives the epoch (2.5 to 2.6).

    Args:
        loader: DataLoader, after Lightning has inserted its distributed sampler.
        share: Function that returns the order for a user's sampler: an object with these three methods and
            ``set_epoch``.
    """
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        sampler = getattr(owner, "sampler", None)
        users = users_sampler(sampler)
        if isinstance(sampler, DistributedSampler) and type(users) not in (type(None), SequentialSampler):
            _replace_order(sampler, share(users))


def _replace_order(sampler: Any, order: Any) -> None:
    sampler.dataset = order

    def set_epoch(epoch: int) -> None:
        sampler.epoch = epoch
        order.set_epoch(epoch)

    replace_method(sampler, "set_epoch", set_epoch)
