"""Replicas of a module: copies of its structure for one step, each on one device.

On the module's device, a replica shares the module's parameters, so gradients accumulate in them. On other devices, a
replica has differentiable copies of the parameters, through which gradients flow back. The first replica uses the
module's buffers, so its writes to them persist (as in ``torch.nn.DataParallel``); the other replicas have copies.

After a step, changes of the replicas are merged into the module: buffers of the first replica, attributes that are
equal in all replicas, and containers (:mod:`.containers`). Changes that cannot be merged raise an error. Examples are a
queue or a count in a buffer, and writes to shared tensors (:mod:`.shared_tensors`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d, Module, Parameter
from torch.nn.parallel import replicate as torch_replicate

from lightning_strategies_ext._lightning import user_modules
from lightning_strategies_ext.replication.containers import (
    CONTAINERS,
    MISSING,
    UnmergeableError,
    copy_for_replica,
    is_same,
    merge_containers,
    warn_if_counts_samples,
)
from lightning_strategies_ext.replication.context import ReplicaContext
from lightning_strategies_ext.replication.lightning_replica import patch_replica
from lightning_strategies_ext.replication.metrics import ReplicaMetric, is_metric
from lightning_strategies_ext.replication.shared_tensors import (
    SharedTensorGuard,
    version_of,
    writable_in,
    writes_to_weight,
)

BATCH_NORMS = (BatchNorm1d, BatchNorm2d, BatchNorm3d)
#: Attributes that are not merged as such: they are handled separately, or are the lists of weights of torch's recurrent
#: modules.
_HANDLED_ATTRIBUTES = {"_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs"}
#: Internal attributes of torch and Lightning, such as dicts of hooks.
_FRAMEWORK_ATTRIBUTES = {
    *_HANDLED_ATTRIBUTES,
    *vars(Module()),
    *vars(LightningModule()),
    "_hparams",
    "_hparams_initial",
}


@dataclass
class ModuleCopy:
    """A copied module in a replica.

    Attributes:
        module: Copied module.
        before: Attributes of the copy before the step.
        buffers: Buffers of the copy before the step and their versions, without running statistics.
    """

    module: Module
    before: dict[str, Any]
    buffers: dict[str, tuple[Tensor | None, int]]


class Replicas:
    """Replicas of a module, created again for each step.

    Args:
        module: Module whose parameters and buffers are on the first device.
        devices: Device of each replica.
        sync_batchnorm: Whether batch normalization uses the statistics of the whole batch.
    """

    def __init__(self, module: Module, devices: Sequence[torch.device], sync_batchnorm: bool = False) -> None:
        self._module = module
        self._sync_batchnorm = sync_batchnorm
        self._devices = list(devices)
        self._originals: list[Module] = []
        self._copies: list[list[ModuleCopy]] = []
        self._versions: tuple[Any, ...] = ()
        self._methods: dict[Module, list[str]] = {}
        self._containers: dict[Module, list[str]] = {}
        self._in_attributes: list[tuple[Any, str]] = []
        self._shared = SharedTensorGuard([], [])

    def make(self, contexts: Sequence[ReplicaContext]) -> list[Module]:
        """Creates a replica for each context.

        Raises:
            RuntimeError: If a parameter or buffer is not on the first device.
        """
        self._originals = modules_to_copy(self._module)
        self._check_placement()
        self._inspect_attributes()
        self._copies = [self._copy(context) for context in contexts]
        self._set_parameters()
        self._share()
        return [copies[0].module for copies in self._copies]

    def check(self) -> None:
        """Checks that no replica has written to shared tensors.

        Raises:
            RuntimeError: If a replica has written to a shared tensor.
        """
        origin = self._shared.first_written() if len(self._copies) > 1 else None
        if origin is not None:
            names = (name for name, parameter in self._module.named_parameters() if parameter is origin)
            raise RuntimeError(
                f"A step changed {f'the parameter `{next(names)}`' if isinstance(origin, Parameter) else origin} in"
                " place. That happens once in each replica, and not once per batch."
                " Do it in a hook that runs once (`on_train_batch_end`, `on_before_zero_grad`) or, right after an"
                " optimizer's step, in a hook of the optimizer (`optimizer.register_step_post_hook`)."
            )

    def refresh(self) -> None:
        """Copies the parameters to the replicas again if they have changed, by an optimizer's step or a toggle."""
        if self._copies_parameters() and self._versions != self._versions_now():
            self._set_parameters()
            self._share()
        else:
            self._shared.snapshot()

    def merge_changes(self, sizes: Sequence[int]) -> None:
        """Merges the changes of the replicas into the module, and drops the replicas.

        Args:
            sizes: Number of samples of each replica.

        Raises:
            RuntimeError: If changes cannot be merged.
        """
        for place, original in enumerate(self._originals):
            try:
                self._merge_module(original, [copies[place] for copies in self._copies], sizes)
            except UnmergeableError as error:
                raise _unmergeable_error(original, str(error)) from None
        self.release()

    def release(self) -> None:
        """Drops the references to the replicas."""
        self._originals, self._copies, self._in_attributes = [], [], []
        self._methods, self._containers = {}, {}
        self._shared = SharedTensorGuard([], [])

    def _inspect_attributes(self) -> None:
        """Finds the methods, containers, and writable tensors in the attributes of the modules."""
        known = {*map(id, self._originals), *map(id, self._parameters())}
        for original in self._originals:
            for name, value in original.__dict__.items():
                if name in _FRAMEWORK_ATTRIBUTES:
                    continue
                kind = type(value)
                if kind is MethodType:
                    self._methods.setdefault(original, []).append(name)
                    continue
                if kind in CONTAINERS:
                    self._containers.setdefault(original, []).append(name)
                self._in_attributes += [
                    (tensor, f"{place}` of {type(original).__name__}")
                    for tensor, place in writable_in(value, f"`self.{name}", known)
                ]

    def _share(self) -> None:
        """Starts to record writes to shared tensors and to their copies."""
        renormed = {id(module.weight) for module in self._originals if writes_to_weight(module)}
        parameters = [parameter for parameter in self._parameters() if id(parameter) not in renormed]
        values: list[Any] = [value for value, _ in self._in_attributes] + parameters
        origins: list[Parameter | str] = [*(name for _, name in self._in_attributes), *parameters]
        for copies in self._copies if self._copies_parameters() else ():
            for original, copy in zip(self._originals, copies, strict=True):
                for name, parameter in original._parameters.items():
                    tensor = copy.module._parameters.get(name)
                    is_copy = tensor is not None and tensor is not parameter
                    if is_copy and parameter is not None and id(parameter) not in renormed:
                        values.append(tensor)
                        origins.append(parameter)
        self._shared = SharedTensorGuard(values, origins)

    def _copy(self, context: ReplicaContext) -> list[ModuleCopy]:
        modules = [shallow_copy(original) for original in self._originals]
        counterparts = dict(zip(self._originals, modules, strict=True))
        for original, module in counterparts.items():
            attributes = module.__dict__
            attributes["_parameters"] = original._parameters.copy()
            for name, child in original._modules.items():
                if child is not None and is_metric(child):
                    module._modules[name] = ReplicaMetric(child, context)  # type: ignore[assignment]
                elif child is not None:
                    module._modules[name] = counterparts[child]
            if context.index > 0:
                for name, buffer in original._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = buffer.detach().to(context.device, copy=True)
            for name in self._methods.get(original, ()):
                method = original.__dict__[name]
                if isinstance(method.__self__, Module) and method.__self__ in counterparts:
                    attributes[name] = MethodType(method.__func__, counterparts[method.__self__])
            for name in self._containers.get(original, ()):
                attributes[name] = copy_for_replica(original.__dict__[name], context)
            if context.device != self._devices[0]:
                user_modules.set_device(module, context.device)
            if isinstance(original, LightningModule):
                patch_replica(module, original, context)
            elif self._sync_batchnorm and isinstance(original, BATCH_NORMS) and original.training:
                attributes["forward"] = forward_of_whole_batch(original, context)
        return [
            ModuleCopy(module, module.__dict__.copy(), buffers_to_compare(module) if module._buffers else {})
            for module in modules
        ]

    def _merge_module(self, original: Module, copies: Sequence[ModuleCopy], sizes: Sequence[int]) -> None:
        root_device = self._devices[0]
        for copy in copies:
            for kind in ("_parameters", "_modules"):
                if copy.module.__dict__[kind].keys() != original.__dict__[kind].keys():
                    raise UnmergeableError("the set of parameters or submodules")
        for name in copies[0].buffers:
            if _has_lost_rows(name, copies, sizes, root_device):
                raise UnmergeableError(f"the buffer `self.{name}`")
        original._buffers.update(copies[0].module._buffers)
        changed: dict[str, None] = {}
        for copy in copies:
            for name, value in copy.module.__dict__.items():
                if copy.before.get(name, MISSING) is not value and name not in _HANDLED_ATTRIBUTES:
                    changed[name] = None
        for name in changed:
            values = [copy.module.__dict__.get(name, MISSING) for copy in copies]
            values = [move_data_to_device(value, root_device) for value in values]
            if not all(is_same(values[0], value) for value in values[1:]):
                raise UnmergeableError(f"`self.{name}`")
            warn_if_counts_samples(f"self.{name}", original.__dict__.get(name), values[0], sizes)
            setattr(original, name, values[0])
        for name in self._containers.get(original, ()):
            if name not in changed:
                theirs = [copy.module.__dict__[name] for copy in copies]
                merge_containers(original.__dict__[name], theirs, f"self.{name}", sizes, root_device)

    def _parameters(self) -> list[Parameter]:
        found = {id(p): p for module in self._originals for p in module._parameters.values() if p is not None}
        return list(found.values())

    def _copies_parameters(self) -> bool:
        return any(device != self._devices[0] for device in self._devices[: len(self._copies)])

    def _versions_now(self) -> tuple[Any, ...]:
        return tuple((parameter._version, parameter.requires_grad) for parameter in self._parameters())

    def _set_parameters(self) -> None:
        if not self._copies_parameters():
            return
        parameters = self._parameters()
        self._versions = self._versions_now()
        on_devices = copies_on(parameters, self._devices[: len(self._copies)])
        for copies, tensors in zip(self._copies, on_devices, strict=True):
            counterparts = {id(parameter): tensor for parameter, tensor in zip(parameters, tensors, strict=True)}
            for original, copy in zip(self._originals, copies, strict=True):
                attributes = copy.module.__dict__.copy()
                for name, parameter in original._parameters.items():
                    if parameter is not None:
                        tensor = counterparts[id(parameter)]
                        copy.module._parameters.pop(name, None)
                        # A non-leaf tensor cannot be registered as a parameter. Setting the attribute updates torch's
                        # recurrent modules; the entry in the dict makes `parameters()` return it.
                        setattr(copy.module, name, tensor)
                        copy.module._parameters[name] = tensor  # type: ignore[assignment]
                copy.before.update(
                    (name, value)
                    for name, value in copy.module.__dict__.items()
                    if attributes.get(name, MISSING) is not value
                )

    def _check_placement(self) -> None:
        for original in self._originals:
            for tensor in (*original._parameters.values(), *original._buffers.values()):
                if tensor is not None and tensor.device != self._devices[0]:
                    raise RuntimeError(
                        f"A parameter or buffer of {type(original).__name__} is on {tensor.device}, but the replicas"
                        f" are copied from {self._devices[0]}. Do not move modules during training; create new"
                        " tensors on `self.device`."
                    )


class _FlatParameters(Module):
    """Flat module that holds parameters, so that torch can replicate them."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        super().__init__()
        for index, parameter in enumerate(parameters):
            self.register_parameter(str(index), parameter)


def shallow_copy(module: Module) -> Module:
    """Returns a copy of a module with the same attributes, and with its own dicts of submodules and buffers.

    ``torch.nn.DataParallel`` calls ``Module._replicate_for_data_parallel`` (torch 2.5 to 2.13), which torch's recurrent
    modules override. For other modules, this function does the same without the 25 microseconds of checks.
    """
    if type(module)._replicate_for_data_parallel is not Module._replicate_for_data_parallel:
        return module._replicate_for_data_parallel()  # type: ignore[no-any-return]
    copy = module.__new__(type(module))
    copy.__dict__ = module.__dict__.copy()
    copy.__dict__.update(_buffers=module._buffers.copy(), _modules=module._modules.copy(), _is_replica=True)
    return copy


def copies_on(parameters: Sequence[Parameter], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    """Returns the parameters on each device. Copies are differentiable: gradients flow back to the parameters."""
    if all(device.type == "cuda" for device in devices) and len(set(devices)) == len(devices):
        holders = torch_replicate(
            _FlatParameters(parameters), devices, detach=not torch.is_grad_enabled()
        )  # few, big copies
        return [[getattr(holder, str(index)) for index in range(len(parameters))] for holder in holders]
    return [[parameter.to(device) for parameter in parameters] for device in devices]


def buffers_to_compare(module: Module) -> dict[str, tuple[Tensor | None, int]]:
    """Returns the buffers of a replica's module and their versions, except running statistics.

    Running statistics are the buffers of torch's modules (batch normalization, observers), and buffers with the names
    that torch uses for them.
    """
    if type(module).__module__.startswith("torch."):
        return {}
    return {
        name: (buffer, version_of(buffer))
        for name, buffer in module._buffers.items()
        if not name.startswith("running_") and name != "num_batches_tracked"
    }


def _has_lost_rows(name: str, copies: Sequence[ModuleCopy], sizes: Sequence[int], device: torch.device) -> bool:
    """Returns whether replicas have written different rows to a buffer, so that rows would be lost.

    Only the other replicas are checked for writes, because the first uses the module's buffers, which hooks of an
    optimizer may have changed. Buffers of different shapes are caches whose size depends on the part of the batch.
    """
    now = [copy.module._buffers.get(name) for copy in copies]
    if all(
        buffer is copy.buffers[name][0] and version_of(buffer) == copy.buffers[name][1]
        for copy, buffer in zip(copies[1:], now[1:], strict=True)
    ):
        return False
    first, *others = (None if buffer is None else buffer.to(device) for buffer in now)
    return any(
        first is not None and other is not None and first.shape == other.shape and _is_queue(first, other, max(sizes))
        for other in others
    )


def _is_queue(one: Tensor, other: Tensor, num_samples: int) -> bool:
    """Returns whether two values of a buffer differ like values of a queue or a count, not like values of a mean.

    Integers are counts. In a queue, the number of different rows is a multiple of the number of samples. These rows are
    contiguous and may wrap around; the other rows are equal. In a mean, any entries may differ.
    """
    differs = (one != other) & ((one == one) | (other == other))  # treats NaNs as equal
    if not one.is_floating_point() or not differs.any():
        return bool(differs.any())
    for dim in range(one.ndim):
        rows = differs.movedim(dim, 0).reshape(one.shape[dim], -1).any(1)
        num_ends = (rows != rows.roll(1)).sum()
        if num_ends == 2 and rows.sum() % num_samples == 0:
            return True
    return False


def modules_to_copy(module: Module) -> list[Module]:
    """Returns a module and all of its submodules, except metrics and their submodules."""
    found = {module: None}
    waiting = [module]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and child not in found and not is_metric(child):
                found[child] = None
                waiting.append(child)
    return list(found)


def forward_of_whole_batch(original: Module, context: ReplicaContext) -> Callable[[Tensor], Tensor]:
    """Returns a ``forward`` for a replica that processes the inputs of all replicas on the module's device."""

    def act(inputs: list[Tensor], sizes: list[int]) -> Any:
        whole = torch.cat([tensor.to(context.step.root_device) for tensor in inputs])
        return type(original).forward(original, whole)

    def forward(tensor: Tensor) -> Tensor:
        if len(tensor) != context.num_samples:
            raise ValueError(
                f"`sync_batchnorm=True`: {type(original).__name__} received {len(tensor)} rows for"
                f" {context.num_samples} samples. Statistics of the whole batch require one row per sample. Omit"
                " `sync_batchnorm`."
            )
        return context.run_once(  # type: ignore[no-any-return]
            f"{type(original).__name__} (`sync_batchnorm=True`)", act, tensor, returns_rows=True, touches_weights=False
        )

    return forward


def _unmergeable_error(module: Module, what: str) -> RuntimeError:
    return RuntimeError(
        f"A step changed {what} of {type(module).__name__} differently in each replica, but only one of the changes"
        " could be kept. Return the value from the step and set it in `on_train_batch_end` or a similar hook, log it,"
        " or append it to a list. Keep a cache whose size depends on the batch in a buffer, in a dict with the size"
        " as key, or by `functools.lru_cache`. A buffer of running statistics keeps the first replica's value if its"
        " name begins with `running_`. If a module needs this state in each replica, use `strategy='ddp_ext'`."
    )
