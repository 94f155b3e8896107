"""Models that diverge on the ranks and are averaged periodically: local SGD and DiLoCo."""

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import Self, override

from lightning_strategies_ext.torch_distributed.compression.config import STATE_KEY, DiLoCo, LocalSGD
from lightning_strategies_ext.torch_distributed.compression.host_groups import HostGroups
from lightning_strategies_ext.torch_distributed.feature import Feature, FeatureContext
from lightning_strategies_ext.torch_distributed.gradient_exchange import (
    all_reduce_async,
    register_hook,
    weak_model_for_hook,
)


class LocalSGDExchange(Feature):
    """Exchange of models in place of their gradients, among all ranks of the default group.

    It does not keep the context, see :class:`.CompressedGradients`.

    Args:
        options: Options of local SGD or DiLoCo.
        context: The parts of the strategy that the feature uses.
    """

    state_key = STATE_KEY

    def __init__(self, options: LocalSGD, context: FeatureContext) -> None:
        self._options = options
        self._contribution = context.contribution
        self._world_size = dist.get_world_size()
        self._host_groups = HostGroups.create(context.device, context.timeout)
        self._model: DistributedDataParallel
        self._must_wait = False  # for each bucket, before the next one
        self._outer_optimizer = (
            _OuterOptimizer(options.learning_rate, options.momentum) if isinstance(options, DiLoCo) else None
        )
        self._optimizers: list[Optimizer] = []
        self._num_steps: list[int] = []
        self._has_diverged = False  # whether ranks take independent steps
        self._num_local_steps: list[int] = []  # steps of each optimizer since then
        self._num_bytes = 0

    @classmethod
    def create(cls, context: FeatureContext) -> Self | None:
        """Returns the feature, or None if it is not in use."""
        options = context.options.compression
        return cls(options, context) if isinstance(options, LocalSGD) else None

    @property
    @override
    def num_bytes_exchanged(self) -> int:
        """Bytes that this rank has passed to collectives so far; with several ranks per host, those between hosts."""
        return self._num_bytes

    @override
    def wrap(self, model: DistributedDataParallel) -> None:
        self._model = weak_model_for_hook(model)
        self._must_wait = self._host_groups.must_serialize(model)
        register_hook(model, self.hook, None, self._contribution)

    @override
    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Starts to count the steps of optimizers, whose parameters are averaged.

        Raises:
            ValueError: If an optimizer distributes its own work.
        """
        self._optimizers = list(optimizers)
        self._num_steps, self._num_local_steps = [0] * len(self._optimizers), [0] * len(self._optimizers)
        for optimizer in self._optimizers:
            check_is_not_sharded(optimizer, f"compression={self._options.name!r}")
        self._start_local_steps_if_due()

    def hook(self, state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        """Averages a bucket over the ranks whose models stay equal; for ``register_comm_hook``."""
        flat = bucket.buffer()
        group = self._host_groups.intra_host if self._has_diverged else self._model.process_group
        if group is None:
            future: Future[Tensor] = Future(devices=[flat.device] if flat.is_cuda else [])
            future.set_result(flat)
            return future
        self._num_bytes += 0 if self._has_diverged else flat.nbytes
        flat.mul_(1.0 / group.size())
        future = all_reduce_async(flat, group)
        if self._must_wait:
            future.wait()  # only the stream waits, not this thread
        return future

    @override
    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Counts a step of an optimizer, and averages its parameters if an averaging is due."""
        index = next((index for index, each in enumerate(self._optimizers) if each is optimizer), None)
        if index is None:
            return
        self._num_steps[index] += 1
        if not self._has_diverged:
            self._start_local_steps_if_due()
            return
        self._num_local_steps[index] += 1
        if self._num_local_steps[index] % self._options.period == 0:
            parameters = list(_trainable_parameters([optimizer]))
            self._average([*parameters, *self._buffers()])
            if self._outer_optimizer is not None:
                self._outer_optimizer.step(parameters)

    @override
    def after_rebuild(self, model: DistributedDataParallel) -> None:
        """Includes newly trained parameters; parameters that are no longer trained were averaged before."""
        register_hook(model, self.hook, None, self._contribution)
        if self._has_diverged:
            self._start_local_steps()

    @override
    def synchronize(self, averages: Iterable[Module]) -> None:
        """Averages the models of all ranks, and their averages of models. Collective: all ranks call it.

        Only tensors that differ are exchanged. Any tensor may differ: a callback may have put an average into the
        module, or the module may hold an average that it updates itself.
        """
        tensors = {f"module.{name}": each for name, each in self._tensors_to_average(self._model.module).items()}
        for number, average in enumerate(averages):
            tensors |= {f"{number}.{name}": each for name, each in self._tensors_to_average(average).items()}
        self._average(self._differing_tensors(tensors))

    @override
    def state_dict(self) -> dict[str, Any]:
        """Returns the state, which is then the same on all ranks. Collective: all ranks call it."""
        self._average(self._states_of_optimizers())
        names = {each: name for name, each in self._model.module.named_parameters()}
        return {
            "num_steps": list(self._num_steps),
            "num_apart": list(self._num_local_steps),
            "is_apart": self._has_diverged,
            "outer": {} if self._outer_optimizer is None else self._outer_optimizer.state_dict(names),
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state.get("num_apart", ())) != len(self._optimizers):  # the state of a run with another compression
            return
        self._num_steps, self._num_local_steps = list(state["num_steps"]), list(state["num_apart"])
        if state["is_apart"]:
            self._start_local_steps()
        if self._outer_optimizer is not None and state["outer"]:
            self._outer_optimizer.load_state_dict(state["outer"], dict(self._model.module.named_parameters()))

    @override
    def close(self) -> None:
        """Leaves the process groups of the exchange. A second call is a no-op."""
        self._host_groups.close()

    def _start_local_steps_if_due(self) -> None:
        if min(self._num_steps, default=0) >= self._options.warmup_steps:
            self._start_local_steps()

    def _start_local_steps(self) -> None:
        self._has_diverged = True
        self._model.broadcast_buffers = False  # else DDP broadcasts rank 0's in each forward pass
        if self._outer_optimizer is not None:
            # Parameters of the module may be added to an optimizer later.
            module_parameters = [each for each in self._model.module.parameters() if each.requires_grad]
            self._outer_optimizer.begin(dict.fromkeys([*_trainable_parameters(self._optimizers), *module_parameters]))

    def _tensors_to_average(self, module: Module) -> dict[str, Tensor]:
        ignored, found = self._model.parameters_to_ignore, {}
        for name, each in chain(module.named_parameters(), module.named_buffers()):
            tensor = torch.view_as_real(each.detach()) if each.is_complex() else each.detach()
            # Quantized weights do not change, and have no mean.
            if name not in ignored and tensor.is_floating_point() and tensor.element_size() > 1:
                found[name] = tensor
        return found

    def _differing_tensors(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Returns the tensors that all ranks have, but with different values."""
        own = {
            name: (tuple(each.shape), str(each.dtype), hashlib.blake2b(_bytes_of(each), digest_size=16).digest())
            for name, each in tensors.items()
        }
        gathered: list[Any] = [None] * self._world_size
        dist.all_gather_object(gathered, own)
        common_names = [
            name
            for name in gathered[0]
            if all(name in other and other[name][:2] == gathered[0][name][:2] for other in gathered)
        ]
        return [tensors[name] for name in common_names if any(other[name] != gathered[0][name] for other in gathered)]

    def _buffers(self) -> list[Tensor]:
        ignored = self._model.parameters_to_ignore
        named = self._model.module.named_buffers()
        return [each for name, each in named if each.is_floating_point() and name not in ignored]

    def _states_of_optimizers(self) -> list[Tensor]:
        """Returns the optimizer states that all ranks have; an optimizer has no state for a parameter not used yet."""
        own = {
            (number, index, name, tuple(value.shape)): value
            for number, optimizer in enumerate(self._optimizers)
            for index, parameter in enumerate(_trainable_parameters([optimizer]))
            for name, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        gathered: list[Any] = [None] * self._world_size
        dist.all_gather_object(gathered, list(own))
        return [value for key, value in own.items() if all(key in keys for keys in gathered)]

    def _average(self, tensors: Sequence[Tensor]) -> None:
        tensors = [tensor.detach() for tensor in tensors]
        self._num_bytes += sum(tensor.nbytes for tensor in tensors) // self._host_groups.ranks_per_host
        self._host_groups.sum_all(tensors)
        for tensor in tensors:
            tensor.div_(self._world_size)


class _OuterOptimizer:
    """Outer steps of all ranks together, from the last common model along the mean change of the ranks' models.

    Args:
        learning_rate: Learning rate of Nesterov's momentum, as in ``torch.optim.SGD(nesterov=True)``.
        momentum: Momentum, as in ``torch.optim.SGD(nesterov=True)``.
    """

    def __init__(self, learning_rate: float, momentum: float) -> None:
        self._learning_rate = learning_rate
        self._momentum = momentum
        self._starts: dict[Tensor, Tensor] = {}
        self._velocities: dict[Tensor, Tensor] = {}

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Sets the parameters of outer steps. New parameters must be equal on all ranks."""
        starts, velocities = self._starts, self._velocities
        self._starts, self._velocities = {}, {}
        for parameter in parameters:
            is_known = parameter in starts
            self._starts[parameter] = starts[parameter] if is_known else parameter.detach().clone()
            self._velocities[parameter] = velocities[parameter] if is_known else torch.zeros_like(parameter)

    def step(self, parameters: Iterable[Tensor]) -> None:
        """Performs an outer step; parameters are the mean over ranks before it, and the common model after it."""
        for parameter in parameters:
            start, velocity = self._starts[parameter], self._velocities[parameter]
            gradient = start - parameter.detach()
            velocity.mul_(self._momentum).add_(gradient)
            start.sub_(gradient.add_(velocity, alpha=self._momentum), alpha=self._learning_rate)
            parameter.detach().copy_(start)

    def state_dict(self, names: Mapping[Tensor, str]) -> dict[str, dict[str, Tensor]]:
        return {
            "starts": {names[parameter]: start.clone() for parameter, start in self._starts.items()},
            "velocities": {names[parameter]: velocity.clone() for parameter, velocity in self._velocities.items()},
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]], parameters: Mapping[str, Tensor]) -> None:
        for own, saved in ((self._starts, state["starts"]), (self._velocities, state["velocities"])):
            for name, value in saved.items():
                if name in parameters:
                    own[parameters[name]] = value.to(parameters[name].device, copy=True)


def check_is_not_sharded(optimizer: Optimizer, argument: str) -> None:
    """Checks that an optimizer does not undo an averaging of models.

    Args:
        optimizer: A torch optimizer.
        argument: Argument that requests the averaging, with its value.

    Raises:
        ValueError: If the optimizer distributes its own work.
    """
    # A caller with such an optimizer has imported this module. The import compiles TorchScript, with a warning that
    # this is deprecated. With torch 2.5, the process crashes if another thread garbage-collects the remains meanwhile.
    module = sys.modules.get("torch.distributed.optim")
    kinds = ("PostLocalSGDOptimizer", "ZeroRedundancyOptimizer")
    if any(isinstance(optimizer, getattr(module, name, ())) for name in kinds):
        raise ValueError(
            f"`{argument}` cannot be combined with {type(optimizer).__name__}, which distributes its own work. Use"
            f" another optimizer, or omit `{argument}`."
        )


def _trainable_parameters(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    """Yields the trainable parameters of optimizers, each once."""
    seen: set[Tensor] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in seen:
                    seen.add(parameter)
                    yield parameter


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.flatten().cpu().view(torch.uint8).numpy()
