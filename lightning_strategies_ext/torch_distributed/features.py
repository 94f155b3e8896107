"""Table of the features of a model in DDP, and the loops that call them.

To add a feature, write a subclass of :class:`.Feature` in a file of its own, and a function that returns it, or None if
the feature is not in use, in :data:`FEATURES`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_strategies_ext.torch_distributed.bucket_search import BucketTuning
from lightning_strategies_ext.torch_distributed.communication_hook import CommunicationHook, PostLocalSGD
from lightning_strategies_ext.torch_distributed.compression.compressed_gradients import CompressedGradients
from lightning_strategies_ext.torch_distributed.compression.local_sgd import LocalSGDExchange
from lightning_strategies_ext.torch_distributed.distributed_model import DirectExchangeFeature
from lightning_strategies_ext.torch_distributed.feature import Feature, FeatureContext
from lightning_strategies_ext.torch_distributed.unfreezing import Unfreezing
from lightning_strategies_ext.torch_distributed.wrapping import rewrap_in_ddp

F = TypeVar("F", bound=Feature)

#: Prefix of the keys of features' states.
_PREFIX = f"{__name__.partition('.')[0]}."

#: Features in the order in which strategies call them. ``DirectExchangeFeature`` is the last, because it is not used
#: if another feature has registered a communication hook.
FEATURES: Final[tuple[Callable[[FeatureContext], Feature | None], ...]] = (
    Unfreezing,
    CompressedGradients.create,
    LocalSGDExchange.create,
    PostLocalSGD.create,
    CommunicationHook.create,
    BucketTuning.create,
    DirectExchangeFeature,
)


class Features:
    """Features of one model in DDP that are in use, from :meth:`start` to :meth:`close`; none otherwise.

    For methods that are called in each step, it has the methods of the features that override them, so that a feature
    costs nothing where it does nothing.

    Attributes:
        before_step: See :meth:`.Feature.before_step`.
        before_backward: See :meth:`.Feature.before_backward`.
        after_backward: See :meth:`.Feature.after_backward`.
        after_optimizer_step: See :meth:`.Feature.after_optimizer_step`.
    """

    before_step: Sequence[Callable[[], None]]
    before_backward: Sequence[Callable[[Tensor], None]]
    after_backward: Sequence[Callable[[], None]]
    after_optimizer_step: Sequence[Callable[[Optimizer], None]]

    def __init__(self) -> None:
        self._pending_states: Mapping[str, Any] = {}  # for features that have not started
        self._use((), None)

    def _use(self, features: Sequence[Feature], context: FeatureContext | None) -> None:
        self._features, self._context = features, context
        for name in ("before_step", "before_backward", "after_backward", "after_optimizer_step"):
            used = [feature for feature in features if getattr(type(feature), name) is not getattr(Feature, name)]
            setattr(self, name, [getattr(feature, name) for feature in used])

    def start(self, context: FeatureContext, model: DistributedDataParallel, *first: Feature) -> None:
        """Creates and starts the features of a model, with the states to restore. Collective: all ranks call it.

        Args:
            context: The parts of the strategy that the features use.
            model: Model in DDP.
            *first: Features of the strategy itself, which are called before those of the table.
        """
        self.close()
        created = (create(context) for create in FEATURES)
        self._use([*first, *(feature for feature in created if feature is not None)], context)
        context.rebuild = self.rebuild
        for feature in self._features:
            feature.wrap(model)
        states, self._pending_states = self._pending_states, {}
        self.load_state_dict(states)

    def rebuild(self, model: DistributedDataParallel) -> None:
        """Creates DDP again around the module of a model, for all features. Collective: all ranks call it.

        Communication hooks that a user has registered with the model are registered again.
        """
        context, hooks = self._context, [*model._comm_hooks]
        assert context is not None
        rewrap_in_ddp(model, context.device, **context.ddp_kwargs)
        for feature in self._features:
            feature.after_rebuild(model)
        if not model._comm_hooks:
            for hook, state in hooks:
                model.register_comm_hook(state, hook)
        context.on_rebuild()

    @property
    def num_bytes_exchanged(self) -> int | None:
        """Bytes that this rank has passed to exchanges so far; None if no feature counts them."""
        counts = [count for feature in self._features if (count := feature.num_bytes_exchanged) is not None]
        return sum(counts) if counts else None

    def find(self, kind: type[F]) -> F | None:
        """Returns the feature of a class, or None if it is not in use."""
        return next((feature for feature in self._features if isinstance(feature, kind)), None)

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Calls :meth:`.Feature.attach`."""
        for feature in self._features:
            feature.attach(optimizers)

    def synchronize(self) -> None:
        """Calls :meth:`.Feature.synchronize`. Collective; a no-op on a rank that is disconnected from the others."""
        if not self._is_connected:
            return
        assert self._context is not None
        averages = self._context.averages_of_model()
        for feature in self._features:
            feature.synchronize(averages)

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the features by key, without empty states. Collective, as :meth:`synchronize`."""
        features = self._features if self._is_connected else ()
        states = {feature.state_key: feature.state_dict() for feature in features if feature.state_key is not None}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, states: Mapping[Any, Any]) -> None:
        """Restores the states of the features; features that have not started restore them when they start."""
        if self._context is None:
            self._pending_states = {key: state for key, state in states.items() if str(key).startswith(_PREFIX)}
        for feature in self._features:
            if feature.state_key is not None and states.get(feature.state_key):
                feature.load_state_dict(states[feature.state_key])

    def close(self) -> None:
        """Calls :meth:`.Feature.close`. A second call is a no-op."""
        for feature in self._features:
            feature.close()
        self._use((), None)

    @property
    def _is_connected(self) -> bool:
        return self._context is not None and self._context.is_connected()

    def __reduce__(self) -> tuple[Any, ...]:
        # Features belong to the model of this process.
        return Features, (), {"_pending_states": self._pending_states}
