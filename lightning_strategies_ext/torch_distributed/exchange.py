"""The exchange of gradients of a DDP model to which ranks may contribute nothing, as uneven inputs want it.

DDP divides by the number of ranks. Here a communication hook divides by the number of those that contribute, and takes
out of the buckets of one that does not what its backward pass has put there. While all contribute, the result is that
of DDP without a hook, to the last bit.

What it does not promise: that a communication hook of the user's which rounds, such as PowerSGD, rounds alike whoever
contributes. Such hooks divide by the number of ranks, so they get gradients that are larger by as much as that is too
much.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

Hook = Callable[..., Future[Tensor]]


@dataclass
class Share:
    """What this rank has in the next exchange. It knows no model: a model in DDP holds its hook, which holds this.

    Attributes:
        contributors: The ranks that have gradients of their own, in order; None for all.
        kept: By parameter, the gradients that this rank had before the backward pass of now, which adds nothing to
            them; None if it does.
    """

    contributors: Sequence[int] | None = None
    kept: dict[Tensor, Tensor | None] | None = None

    def hook(self, inner: Hook | None, group: dist.ProcessGroup) -> Hook:
        """A communication hook.

        Args:
            inner: What exchanges a bucket and averages it over the ranks of the group; None for an all-reduce.
            group: The ranks.
        """
        world_size = group.size()

        def exchange(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
            buffer = bucket.buffer()
            self._take_out(bucket)
            num_contributors = world_size if self.contributors is None else len(self.contributors)
            if inner is not None:
                if num_contributors != world_size:
                    buffer.mul_(world_size / num_contributors)
                return inner(state, bucket)
            buffer.mul_(1.0 / num_contributors)  # as DDP does: a division rounds otherwise
            return all_reduced(buffer, group)

        return exchange

    def _take_out(self, bucket: dist.GradBucket) -> None:
        if self.kept is None:
            return
        gradients = [bucket.buffer()] if bucket.buffer().is_sparse else bucket.gradients()
        for parameter, gradient in zip(bucket.parameters(), gradients, strict=True):
            _overwrite(gradient, self.kept.get(parameter))


class DDPExchange:
    """See :class:`lightning_strategies_ext.uneven.control.Exchange`.

    Args:
        model: In DDP.
        share: What the hook of the model asks; where it has none, all ranks have to contribute.
    """

    def __init__(self, model: DistributedDataParallel, share: Share) -> None:
        self._model = model
        self._share = share
        self._has_own = False  # gradients that have not been exchanged, from before this backward pass

    @property
    def contributors(self) -> Sequence[int] | None:
        """The ranks that have gradients of their own in the next exchange, in order; None for all."""
        return self._share.contributors

    @contributors.setter
    def contributors(self, contributors: Sequence[int] | None) -> None:
        self._share.contributors = contributors

    @property
    def is_held_back(self) -> bool:
        """Whether backward passes exchange nothing now."""
        return not self._model.require_backward_grad_sync

    def keep_gradients(self) -> None:
        """Lets the next backward pass, up to :meth:`finish`, add nothing to what this rank contributes."""
        kept: dict[Tensor, Tensor | None] = {}
        # What has been exchanged is on the contributors too, and theirs is enough.
        if self.is_held_back or self._has_own:
            parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
            kept = {parameter: None if parameter.grad is None else parameter.grad.clone() for parameter in parameters}
        self._share.kept = kept

    def finish(self) -> None:
        """Called after a backward pass, in which DDP has waited for all gradients."""
        kept, self._share.kept = self._share.kept, None
        if self.is_held_back and kept is None:
            self._has_own = True
        elif self.is_held_back and kept is not None:
            for parameter, gradient in kept.items():
                if parameter.grad is None:
                    parameter.grad = gradient
                else:  # zeros where there was none: DDP requires a gradient of each parameter that it has seen used
                    _overwrite(parameter.grad, gradient)
        else:
            self._has_own = False
            self._forget_what_no_contributor_used()

    def share_buffers(self) -> None:
        """Gives all ranks the buffers of the first that contributes, where DDP gives them those of rank 0."""
        contributors, model = self.contributors, self._model
        if not contributors or contributors[0] == 0 or not model.broadcast_buffers:
            return
        # Past autograd, which may need what is overwritten: for the gradients of a step that counts for nothing.
        buffers = [
            buffer.data for name, buffer in model.module.named_buffers() if name not in model.parameters_to_ignore
        ]
        works = [dist.broadcast(buffer, contributors[0], async_op=True) for buffer in buffers]
        for work in works:
            work.wait()

    def close(self) -> None:
        """Lets all ranks contribute."""
        self._share.contributors = self._share.kept = None

    def _forget_what_no_contributor_used(self) -> None:
        # To DDP, a parameter that only a rank without data has used is one with a gradient, of zeros: optimizers would
        # move it, by momentum or weight decay.
        if self.contributors is None or not self._model.find_unused_parameters:
            return
        if len(self.contributors) < dist.get_world_size():
            for parameter in self._model.parameters():
                if parameter.grad is not None and not parameter.grad.any():
                    parameter.grad = None


def for_its_hook(model: DistributedDataParallel) -> DistributedDataParallel:
    """A model in DDP as its hook may hold it, which does not keep it alive.

    The model holds its hook in what is written in C++: of such a circle Python's garbage collection knows nothing.
    """
    return cast(DistributedDataParallel, weakref.proxy(model))


def all_reduced(tensor: Tensor, group: Any) -> Future[Tensor]:
    """Begins to add up a tensor in place over the ranks of a group."""
    future: Future[list[Tensor]] = dist.all_reduce(tensor, group=group, async_op=True).get_future()
    return future.then(lambda reduced: reduced.value()[0])


def check_can_join(averages_models: str | None, ddp_kwargs: Mapping[str, Any]) -> None:
    """Refuses what does not average gradients over all ranks that have data.

    Args:
        averages_models: The argument that has models averaged instead, with its value, if there is one.
        ddp_kwargs: Arguments of DistributedDataParallel.

    Raises:
        ValueError: If that was asked for.
    """
    what = None
    if averages_models is not None:
        what = f"`{averages_models}` averages the models of all"
    for name in ("process_group", "device_mesh"):
        if ddp_kwargs.get(name) is not None:
            what = f"`{name}` exchanges them among some"
    if what is not None:
        raise ValueError(
            f"`uneven_inputs='join'` averages gradients over all ranks that have data, and {what}. Leave one of them"
            " out, or use `uneven_inputs='stop'`."
        )


def _overwrite(gradient: Tensor, kept: Tensor | None) -> None:
    if kept is None:
        gradient.zero_()
    else:
        gradient.copy_(kept)
