"""Table of the features of a model in DDP, and the loops that call them.

To add a feature, write a subclass of :class:`.Feature` in a file of its own, and a function that returns it, or None if
the feature is not in use, in :data:`FEATURES`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_strategies_ext.torch_distributed.bucket_search import BucketTuning
from lightning_strategies_ext.torch_distributed.communication_hook import CommunicationHook, PostLocalSGD
from lightning_strategies_ext.torch_distributed.compression.compressed_exchange import CompressionFeature
from lightning_strategies_ext.torch_distributed.distributed_model import DirectExchangeFeature
from lightning_strategies_ext.torch_distributed.feature import Feature, FeatureContext
from lightning_strategies_ext.torch_distributed.unfreezing import Unfreezing
from lightning_strategies_ext.torch_distributed.wrapping import rewrap_in_ddp

F = TypeVar("F", bound=Feature)

#: Features in the order in which strategies call them.
FEATURES: Final[tuple[Callable[[FeatureContext], Feature | None], ...]] = (
    Unfreezing,
    CompressionFeature.create,
    PostLocalSGD.create,
    CommunicationHook.create,
    BucketTuning.create,
    DirectExchangeFeature,
)


class Features:
    """Features of one model in DDP that are in use.

    For methods that are called in each step, it has the methods of the features that override them, so that a feature
    costs nothing where it does nothing.

    Args:
        features: The features, in the order of calls.
        context: The parts of the strategy that the features use; None without features.

    Attributes:
        before_step: See :meth:`.Feature.before_step`.
        before_backward: See :meth:`.Feature.before_backward`.
        after_backward: See :meth:`.Feature.after_backward`.
        after_optimizer_step: See :meth:`.Feature.after_optimizer_step`.
    """

    def __init__(self, features: Sequence[Feature] = (), context: FeatureContext | None = None) -> None:
        self._features = features
        self._context = context
        none = Feature
        self.before_step = [each.before_step for each in features if type(each).before_step is not none.before_step]
        self.before_backward = [
            each.before_backward for each in features if type(each).before_backward is not none.before_backward
        ]
        self.after_backward = [
            each.after_backward for each in features if type(each).after_backward is not none.after_backward
        ]
        self.after_optimizer_step = [
            each.after_optimizer_step
            for each in features
            if type(each).after_optimizer_step is not none.after_optimizer_step
        ]

    @classmethod
    def start(cls, context: FeatureContext, model: DistributedDataParallel, *first: Feature) -> "Features":
        """Creates and starts the features of a model. Collective: all ranks call it.

        Args:
            context: The parts of the strategy that the features use.
            model: Model in DDP.
            *first: Features of the strategy itself, which are called before those of the table.
        """
        created = (create(context) for create in FEATURES)
        features = cls([*first, *(each for each in created if each is not None)], context)
        context.rebuild = features.rebuild
        for each in features._features:
            each.wrap(model)
        return features

    def rebuild(self, model: DistributedDataParallel) -> None:
        """Creates DDP again around the module of a model, for all features. Collective: all ranks call it.

        Communication hooks that a user has registered with the model are registered again.
        """
        context, hooks = self._context, [*model._comm_hooks]
        assert context is not None
        rewrap_in_ddp(model, context.device, **context.ddp_kwargs)
        for each in self._features:
            each.after_rebuild(model)
        if not model._comm_hooks:
            for hook, state in hooks:
                model.register_comm_hook(state, hook)
        context.on_rebuild()

    @property
    def num_bytes_exchanged(self) -> int | None:
        """Bytes that this rank has passed to exchanges so far; None if no feature counts them."""
        counts = [count for each in self._features if (count := each.num_bytes_exchanged) is not None]
        return sum(counts) if counts else None

    def find(self, kind: type[F]) -> F | None:
        """Returns the feature of a class, or None if it is not in use."""
        return next((each for each in self._features if isinstance(each, kind)), None)

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Calls :meth:`.Feature.attach`."""
        for each in self._features:
            each.attach(optimizers)

    def synchronize(self) -> None:
        """Calls :meth:`.Feature.synchronize`. Collective: all ranks call it."""
        for each in self._features:
            each.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the features by key, without empty states. Collective: all ranks call it."""
        states = {each.state_key: each.state_dict() for each in self._features if each.state_key is not None}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restores the states that a mapping contains, which may contain more."""
        for each in self._features:
            if each.state_key is not None and states.get(each.state_key):
                each.load_state_dict(states[each.state_key])

    def close(self) -> None:
        """Calls :meth:`.Feature.close`. A second call is a no-op."""
        for each in self._features:
            each.close()
