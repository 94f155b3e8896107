"""Freezing and unfreezing during training: DDP follows changes of ``requires_grad``.

torch's DDP exchanges the gradients of the parameters that require a gradient when it is created. A parameter that is
unfrozen later, as in gradual unfreezing, is trained by each rank alone, silently, and the models of the ranks diverge.
For a parameter that is frozen later, DDP waits for a gradient that is never computed. :class:`Unfreezing` detects both
before the next forward pass, and rebuilds DDP.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from operator import attrgetter, not_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_strategies_ext.collectives.model_check import check_same_model
from lightning_strategies_ext.torch_distributed.direct_exchange import exchanged_parameters
from lightning_strategies_ext.torch_distributed.feature import Feature, FeatureContext

_needs_gradient: Callable[[Tensor], bool] = attrgetter("requires_grad")


class Unfreezing(Feature):
    """Rebuilds DDP before a forward pass with gradients, if other parameters than before require gradients.

    A copy of the model in DDP is not checked: the copy of this object has the empty attributes of the class.

    Args:
        context: The parts of the strategy that the feature uses.
    """

    _parameters: Mapping[str, Tensor] = {}
    _are_trained: Sequence[bool] = ()
    _frozen: Mapping[str, Tensor] = {}

    def __init__(self, context: FeatureContext) -> None:
        self._context = context
        self._has_peers = context.collectives.world_size() > 1

    @override
    def wrap(self, model: DistributedDataParallel) -> None:
        self._parameters = exchanged_parameters(model)
        self._record(self._requires_grad_flags())
        model.register_forward_pre_hook(self._before_forward)

    def find_added(self, model: DistributedDataParallel) -> list[Tensor]:
        """Returns the parameters that were added to the module, or have replaced others, since DDP was initialized."""
        known = {*map(id, self._parameters.values())}
        return [parameter for parameter in exchanged_parameters(model).values() if id(parameter) not in known]

    def include_added(self, model: DistributedDataParallel) -> None:
        """Makes DDP exchange the gradients of added parameters. Collective: all ranks call it."""
        trained = self._select(self._are_trained)
        self._parameters = exchanged_parameters(model)
        self._record(self._requires_grad_flags())
        self._rebuild(model, trained)

    @override
    def before_backward(self, loss: Tensor) -> None:
        """Checks that no parameter was unfrozen since the forward pass began.

        Raises:
            RuntimeError: If a parameter was unfrozen; each rank would train it alone.
        """
        if not self._has_peers:
            return
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise RuntimeError(
                    f"The parameter `{name}` was unfrozen within the training step, which DDP began without it: each"
                    " rank would train it alone. Unfreeze it earlier, for example in `on_train_epoch_start` or"
                    " `on_train_batch_start`."
                )

    def _record(self, are_trained: Sequence[bool]) -> None:
        self._are_trained = are_trained
        self._frozen = dict(compress(self._parameters.items(), map(not_, are_trained)))

    def _requires_grad_flags(self) -> Sequence[bool]:
        return [*map(_needs_gradient, self._parameters.values())]

    def _before_forward(self, model: Module, args: Any) -> None:
        # `model.training` is no criterion: after a validation, Lightning leaves DDP in evaluation mode, but not its
        # module.
        if not torch.is_grad_enabled():
            return
        before, now = self._are_trained, self._requires_grad_flags()
        if now == before:
            return
        assert isinstance(model, DistributedDataParallel)
        if model.find_unused_parameters:  # DDP handles frozen parameters as unused ones
            now = [was or needs for was, needs in zip(before, now, strict=True)]
        if now == before or not any(now):  # without trained parameters, DDP waits for no gradient
            return
        self._record(now)
        trained = self._select(before)
        unused = [each for each in self._select(now) if not each.requires_grad]
        for parameter in unused:
            parameter.requires_grad_()
        self._rebuild(model, trained)
        for parameter in unused:
            parameter.requires_grad_(False)

    def _rebuild(self, model: DistributedDataParallel, trained: Sequence[Tensor]) -> None:
        """Rebuilds DDP for the parameters that now require a gradient. Collective: all ranks call it.

        Args:
            model: Model in DDP.
            trained: Parameters that were trained so far.
        """
        context = self._context
        check_same_model(context.collectives, model.module, context.device, is_trained=True)
        if context.options.model_averaging_argument is not None:  # they may differ
            for parameter in trained:
                dist.all_reduce(parameter.detach().div_(dist.get_world_size()))
        context.rebuild(model)

    def _select(self, are_chosen: Sequence[bool]) -> list[Tensor]:
        return [*compress(self._parameters.values(), are_chosen)]

    def __getstate__(self) -> dict[str, Any]:
        return {}
