"""Gradient exchange of a model in DDP to which a rank may contribute nothing, for uneven inputs.

DDP divides by the number of ranks. Here a communication hook divides by the number of ranks that contribute. On a rank
that does not contribute, it removes the gradients of the current backward pass from the buckets. While all ranks
contribute, the result is bitwise identical to the result of DDP without a hook.

Limitations: a user's communication hook that rounds, such as PowerSGD, may round differently with different
contributors. Such hooks divide by the number of ranks, so they receive gradients that are scaled up accordingly.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_strategies_ext.torch_distributed.direct_exchange import trained_parameters

Hook = Callable[..., Future[Tensor]]


@dataclass
class Contribution:
    """Contribution of this rank to the next exchange.

    It has no reference to the model: a model in DDP holds its hook, and the hook holds this object.

    Attributes:
        contributors: Ranks with gradients of their own, in order; None for all ranks.
        saved_gradients: Gradients by parameter that this rank had before the current backward pass, if the pass adds
            nothing to its contribution; else None.
    """

    contributors: Sequence[int] | None = None
    saved_gradients: dict[Tensor, Tensor | None] | None = None

    def hook(self, inner: Hook | None, group: dist.ProcessGroup) -> Hook:
        """Returns a communication hook.

        Args:
            inner: Hook that exchanges a bucket and averages it over the ranks of the group; None for an all-reduce.
            group: Process group of the ranks.
        """
        world_size = group.size()

        def exchange(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
            buffer = bucket.buffer()
            self._remove_local_gradients(bucket)
            num_contributors = world_size if self.contributors is None else len(self.contributors)
            if inner is not None:
                if num_contributors != world_size:
                    buffer.mul_(world_size / num_contributors)
                return inner(state, bucket)
            buffer.mul_(1.0 / num_contributors)  # as DDP does: a division rounds differently
            return all_reduce_async(buffer, group)

        return exchange

    def _remove_local_gradients(self, bucket: dist.GradBucket) -> None:
        if self.saved_gradients is None:
            return
        gradients = [bucket.buffer()] if bucket.buffer().is_sparse else bucket.gradients()
        for parameter, gradient in zip(bucket.parameters(), gradients, strict=True):
            _overwrite(gradient, self.saved_gradients.get(parameter))


class DDPGradientExchange:
    """Exchange of a model in DDP; implements :class:`lightning_strategies_ext.uneven.control.GradientExchange`.

    Args:
        model: Model in DDP.
        contribution: Contribution that the hook of the model reads; without such a hook, all ranks must contribute.
    """

    def __init__(self, model: DistributedDataParallel, contribution: Contribution) -> None:
        self._model = model
        self._contribution = contribution
        self._has_own = False  # whether earlier passes left gradients that were not exchanged

    @property
    def contributors(self) -> Sequence[int] | None:
        """Ranks that have gradients of their own in the next exchange, in order; None for all ranks."""
        return self._contribution.contributors

    @contributors.setter
    def contributors(self, contributors: Sequence[int] | None) -> None:
        self._contribution.contributors = contributors

    @property
    def is_in_no_sync(self) -> bool:
        """Whether backward passes run in ``no_sync``, and exchange nothing."""
        return not self._model.require_backward_grad_sync

    def exclude_next_backward(self) -> None:
        """Makes the next backward pass, up to :meth:`finish`, add nothing to this rank's contribution."""
        saved: dict[Tensor, Tensor | None] = {}
        # Exchanged gradients are on the contributors too, whose contribution suffices.
        if self.is_in_no_sync or self._has_own:
            parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
            saved = {parameter: None if parameter.grad is None else parameter.grad.clone() for parameter in parameters}
        self._contribution.saved_gradients = saved

    def finish(self) -> None:
        """Ends the exchange of a backward pass. Called after the pass, in which DDP has waited for all gradients."""
        saved, self._contribution.saved_gradients = self._contribution.saved_gradients, None
        if self.is_in_no_sync and saved is None:
            self._has_own = True
        elif self.is_in_no_sync and saved is not None:
            for parameter, gradient in saved.items():
                if parameter.grad is None:
                    parameter.grad = gradient
                else:  # zeros if there was none: DDP requires gradients of all used parameters
                    _overwrite(parameter.grad, gradient)
        else:
            self._has_own = False
            self._clear_unused_gradients()

    def exchange_local_gradients(self, contributes: bool, num_contributors: int) -> None:
        """Averages the gradients of the ranks that contribute, after a pass in which DDP has exchanged nothing.

        A parameter for which no contributing rank has a gradient keeps none. Collective: all ranks call it.

        Args:
            contributes: Whether this rank contributes its gradients; otherwise it joins with zeros.
            num_contributors: Number of ranks that contribute, at least one.
        """
        group, parameters = self._model.process_group, [*trained_parameters(self._model).values()]
        gradients = [parameter.grad if contributes else None for parameter in parameters]
        counts = torch.tensor([int(each is not None) for each in gradients], device=parameters[0].device)
        dist.all_reduce(counts, group=group)
        for parameter, gradient, count in zip(parameters, gradients, counts.tolist(), strict=True):
            parameter.grad = None
            if not count:
                continue
            # Memory of its own: after a backward pass, the gradients of two parameters may share memory.
            result = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            if gradient is not None:
                result.copy_(gradient).mul_(1.0 / num_contributors)  # as DDP does: a division rounds differently
            dist.all_reduce(torch.view_as_real(result) if result.is_complex() else result, group=group)
            parameter.grad = result

    def sync_buffers(self) -> None:
        """Broadcasts the buffers of the first contributor, if DDP broadcasts buffers and rank 0 contributes nothing."""
        contributors, model = self.contributors, self._model
        if not contributors or contributors[0] == 0 or not model.broadcast_buffers:
            return
        self._broadcast_buffers(contributors[0])

    def sync_buffers_of_forward(self) -> None:
        """Broadcasts rank 0's buffers, if DDP's next forward pass would, in its place.

        Collective: all ranks call it, or run the forward pass.
        """
        if self._model.will_sync_module_buffers():
            self._model._sync_buffers()
            self._model.require_forward_param_sync = False  # as after a forward pass without gradients

    def _broadcast_buffers(self, src: int) -> None:
        model = self._model
        # `data` bypasses autograd, which may need the overwritten values for gradients of a step that does not count.
        buffers = [
            buffer.data for name, buffer in model.module.named_buffers() if name not in model.parameters_to_ignore
        ]
        works = [dist.broadcast(buffer, src, async_op=True) for buffer in buffers]
        for work in works:
            work.wait()

    def close(self) -> None:
        """Makes all ranks contribute again."""
        self._contribution.contributors = self._contribution.saved_gradients = None

    def _clear_unused_gradients(self) -> None:
        # DDP creates a gradient of zeros for a parameter that only ranks without data have used. Optimizers would
        # change the parameter, by momentum or weight decay.
        if self.contributors is None or not self._model.find_unused_parameters:
            return
        if len(self.contributors) < dist.get_world_size():
            for parameter in self._model.parameters():
                if parameter.grad is not None and not parameter.grad.any():
                    parameter.grad = None


def weak_model_for_hook(model: DistributedDataParallel) -> DistributedDataParallel:
    """Returns a proxy of a model in DDP that the model's hook may hold, because it does not keep the model alive.

    The model holds its hook in C++ objects, so Python's garbage collector does not detect a reference cycle through
    them.
    """
    return cast(DistributedDataParallel, weakref.proxy(model))


def register_hook(
    model: DistributedDataParallel, hook: Hook | None, state: object, contribution: Contribution | None
) -> None:
    """Registers a communication hook with a model, if there is a hook or a contribution that may be nothing.

    Args:
        model: Model in DDP that has no hook.
        hook: Hook that averages a bucket of gradients; DDP's all-reduce if None.
        state: First argument of the hook.
        contribution: Contribution of this rank; None if all ranks always contribute.
    """
    if contribution is not None:
        hook = contribution.hook(hook, model.process_group)
    if hook is not None:
        model.register_comm_hook(state=state, hook=hook)


def all_reduce_async(tensor: Tensor, group: Any) -> Future[Tensor]:
    """Starts to sum a tensor in place over the ranks of a group; returns its future."""
    future: Future[list[Tensor]] = dist.all_reduce(tensor, group=group, async_op=True).get_future()
    return future.then(lambda reduced: reduced.value()[0])


def check_can_join(model_averaging_argument: str | None, ddp_kwargs: Mapping[str, Any]) -> None:
    """Checks that gradients are averaged over all ranks that have data.

    Args:
        model_averaging_argument: Argument by which models are averaged instead, with its value; None if there is none.
        ddp_kwargs: Arguments of DistributedDataParallel.

    Raises:
        ValueError: If models are averaged, or gradients are exchanged among some ranks only.
    """
    conflict = None
    if model_averaging_argument is not None:
        conflict = f"`{model_averaging_argument}` averages the models of all ranks"
    for name in ("process_group", "device_mesh"):
        if ddp_kwargs.get(name) is not None:
            conflict = f"`{name}` exchanges gradients among some ranks"
    if conflict is not None:
        raise ValueError(
            f"`uneven_inputs='join'` averages gradients over all ranks that have data, but {conflict}. Omit one of the"
            " two, or use `uneven_inputs='stop'`."
        )


def _overwrite(gradient: Tensor, saved: Tensor | None) -> None:
    if saved is None:
        gradient.zero_()
    else:
        gradient.copy_(saved)
