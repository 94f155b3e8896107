"""Replicas of a module: copies of its structure for one step, each on one device.

On the module's device, a replica shares the module's parameters, so gradients accumulate in them. On other devices, a
replica has differentiable copies of the parameters, through which gradients flow back. The first replica uses the
module's buffers, so its writes to them persist (as in ``torch.nn.DataParallel``); the other replicas have copies.

After a step, :mod:`.merging` merges the changes of the replicas into the module. In-place writes to parameters, and to
tensors in attributes, are errors (:mod:`.shared_tensors`).
"""

from collections.abc import Callable, Sequence
from copy import copy as copy_container
from operator import is_
from types import MethodType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d, Module, Parameter
from torch.nn.parallel import replicate as torch_replicate

from lightning_strategies_ext._lightning import user_modules
from lightning_strategies_ext.replication.context import ReplicaContext
from lightning_strategies_ext.replication.lightning_replica import patch_replica
from lightning_strategies_ext.replication.merging import (
    HANDLED_ATTRIBUTES,
    MISSING,
    ModuleCopy,
    UnmergeableError,
    buffers_to_compare,
    merge_module,
)
from lightning_strategies_ext.replication.metrics import ReplicaMetric, is_metric
from lightning_strategies_ext.replication.shared_tensors import (
    CONTAINERS,
    MAX_INSPECTED_LENGTH,
    SharedTensorGuard,
    entries_of,
    has_renormalized_weight,
    tensors_in,
)

BATCH_NORMS = (BatchNorm1d, BatchNorm2d, BatchNorm3d)
#: Internal attributes of torch and Lightning, such as dicts of hooks.
_FRAMEWORK_ATTRIBUTES = {*HANDLED_ATTRIBUTES, *vars(Module()), *vars(LightningModule()), "_hparams", "_hparams_initial"}


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
        self._parameter_states: tuple[Any, ...] = ()
        #: Names of the attributes of each module that are bound methods, and of those that are containers.
        self._methods: dict[Module, list[str]] = {}
        self._containers: dict[Module, list[str]] = {}
        #: Tensors and arrays in attributes, each with its name in messages.
        self._attribute_tensors: list[tuple[Any, str]] = []
        self._guard = SharedTensorGuard([])

    def create(self, contexts: Sequence[ReplicaContext]) -> list[Module]:
        """Creates a replica for each context.

        Raises:
            RuntimeError: If a parameter or buffer is not on the first device.
        """
        self._originals = modules_to_copy(self._module)
        self._check_devices()
        self._inspect_attributes()
        self._copies = [self._copy(context) for context in contexts]
        self._copy_parameters()
        self._guard_shared_tensors()
        return [copies[0].module for copies in self._copies]

    def check_writes(self) -> None:
        """Checks that no replica has written to shared tensors since the last update of the replicas.

        Raises:
            RuntimeError: If a replica has written to a shared tensor.
        """
        origin = self._guard.find_written() if len(self._copies) > 1 else None
        if origin is not None:
            names = (name for name, parameter in self._module.named_parameters() if parameter is origin)
            raise RuntimeError(
                f"A step changed {f'the parameter `{next(names)}`' if isinstance(origin, Parameter) else origin} in"
                " place. The change happens once in each replica, instead of once per batch."
                " Make it in a hook that runs once (`on_train_batch_end`, `on_before_zero_grad`) or, right after an"
                " optimizer's step, in a hook of the optimizer (`optimizer.register_step_post_hook`)."
            )

    def refresh(self) -> None:
        """Updates the replicas after the module's parameters or their ``requires_grad`` may have changed.

        Copies the parameters to other devices again, if they have changed. Writes up to now are no longer reported.
        """
        if self._has_other_devices() and self._parameter_states != self._current_parameter_states():
            self._copy_parameters()
            self._guard_shared_tensors()
        else:
            self._guard.snapshot()

    def merge_changes(self, sizes: Sequence[int]) -> None:
        """Merges the changes of the replicas into the module.

        Args:
            sizes: Number of samples of each replica.

        Raises:
            RuntimeError: If changes cannot be merged.
        """
        merged: set[int] = set()
        for index, original in enumerate(self._originals):
            copies, containers = [copies[index] for copies in self._copies], self._containers.get(original, ())
            try:
                merge_module(original, copies, containers, sizes, self._devices[0], merged)
            except UnmergeableError as error:
                if error.advice is not None:
                    raise RuntimeError(
                        f"A step {error.action} {error} of {type(original).__name__}. {error.advice}"
                    ) from None
                raise RuntimeError(
                    f"A step changed {error} of {type(original).__name__} differently in each replica, but only one of"
                    " the changes could be kept. Return the value from the step and set it in `on_train_batch_end` or a"
                    " similar hook, log it, or append it to a list. Keep a cache whose size depends on the batch in a"
                    " buffer, in a dict with the size as key, or by `functools.lru_cache`. A buffer of running"
                    " statistics keeps the first replica's value if its name begins with `running_`. If a module needs"
                    " this state in each replica, use `strategy='ddp_ext'`."
                ) from None

    def release(self) -> None:
        """Drops the references to the replicas."""
        self._originals, self._copies, self._attribute_tensors = [], [], []
        self._methods, self._containers = {}, {}
        self._guard = SharedTensorGuard([])

    def _inspect_attributes(self) -> None:
        """Finds the methods, containers, and writable tensors in the attributes of the modules."""
        checked = {*map(id, self._originals), *map(id, self._unique_parameters())}
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
                self._attribute_tensors += [
                    (tensor, f"`{path}` of {type(original).__name__}")
                    for tensor, path in tensors_in(value, f"self.{name}", checked)
                ]

    def _guard_shared_tensors(self) -> None:
        """Starts to record writes to shared tensors, and to copies of parameters on other devices."""
        renormalized = {id(module.weight) for module in self._originals if has_renormalized_weight(module)}
        parameters = [parameter for parameter in self._unique_parameters() if id(parameter) not in renormalized]
        values: list[tuple[Any, Parameter | str]] = [
            *self._attribute_tensors,
            *zip(parameters, parameters, strict=True),
        ]
        for copies in self._copies if self._has_other_devices() else ():
            for original, copy in zip(self._originals, copies, strict=True):
                for name, parameter in original._parameters.items():
                    tensor = copy.module._parameters.get(name)
                    is_copy = tensor is not None and tensor is not parameter
                    if is_copy and parameter is not None and id(parameter) not in renormalized:
                        values.append((tensor, parameter))
        self._guard = SharedTensorGuard(values)

    def _copy(self, context: ReplicaContext) -> list[ModuleCopy]:
        """Returns a copy of each module for a replica, in the order of the originals."""
        modules = [shallow_copy(original) for original in self._originals]
        copied_containers: dict[int, Any] = {}
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
                attributes[name] = copy_for_replica(original.__dict__[name], context, copied_containers)
            if context.device != self._devices[0]:
                user_modules.set_device(module, context.device)
            if isinstance(original, LightningModule):
                patch_replica(module, original, context)
            elif self._sync_batchnorm and isinstance(original, BATCH_NORMS) and original.training:
                attributes["forward"] = create_whole_batch_forward(original, context)
        return [
            ModuleCopy(
                module,
                attributes_before=module.__dict__.copy(),
                parameters_before=module._parameters.copy(),
                submodules_before=module._modules.copy(),
                buffers_before=buffers_to_compare(module, context.index == 1) if module._buffers else {},
                buffer_names=tuple(module._buffers),
            )
            for module in modules
        ]

    def _copy_parameters(self) -> None:
        """Sets copies of the parameters in the replicas, unless all replicas are on the module's device."""
        if not self._has_other_devices():
            return
        parameters = self._unique_parameters()
        self._parameter_states = self._current_parameter_states()
        tensors_of_replicas = copy_to_devices(parameters, self._devices[: len(self._copies)])
        for copies, tensors in zip(self._copies, tensors_of_replicas, strict=True):
            tensor_of = {id(parameter): tensor for parameter, tensor in zip(parameters, tensors, strict=True)}
            for original, copy in zip(self._originals, copies, strict=True):
                attributes = copy.module.__dict__.copy()
                for name, parameter in original._parameters.items():
                    if parameter is not None:
                        tensor = tensor_of[id(parameter)]
                        copy.module._parameters.pop(name, None)
                        # A non-leaf tensor cannot be registered as a parameter. Setting the attribute updates torch's
                        # recurrent modules; the entry in the dict makes `parameters()` return it.
                        setattr(copy.module, name, tensor)
                        copy.module._parameters[name] = tensor  # type: ignore[assignment]
                        copy.parameters_before[name] = tensor
                # Attributes that this loop sets are not changes of the step.
                copy.attributes_before.update(
                    (name, value)
                    for name, value in copy.module.__dict__.items()
                    if attributes.get(name, MISSING) is not value
                )

    def _unique_parameters(self) -> list[Parameter]:
        found = {id(p): p for module in self._originals for p in module._parameters.values() if p is not None}
        return list(found.values())

    def _has_other_devices(self) -> bool:
        """Returns whether a replica is on another device than the module."""
        return any(device != self._devices[0] for device in self._devices[: len(self._copies)])

    def _current_parameter_states(self) -> tuple[Any, ...]:
        return tuple((parameter._version, parameter.requires_grad) for parameter in self._unique_parameters())

    def _check_devices(self) -> None:
        for original in self._originals:
            for tensor in (*original._parameters.values(), *original._buffers.values()):
                if tensor is not None and tensor.device != self._devices[0]:
                    raise RuntimeError(
                        f"A parameter or buffer of {type(original).__name__} is on {tensor.device}, but the replicas"
                        f" are copied from {self._devices[0]}. Do not move modules during training; create new"
                        " tensors on `self.device`."
                    )


class _FlatParameters(Module):
    """Module without submodules that holds parameters, so that torch can replicate them."""

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


def copy_to_devices(parameters: Sequence[Parameter], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    """Returns the parameters on each device. Copies are differentiable: gradients flow back to the parameters."""
    if all(device.type == "cuda" for device in devices) and len(set(devices)) == len(devices):
        # torch broadcasts the parameters together, in a few large buffers.
        holders = torch_replicate(_FlatParameters(parameters), devices, detach=not torch.is_grad_enabled())
        return [[getattr(holder, str(index)) for index in range(len(parameters))] for holder in holders]
    return [[parameter.to(device) for parameter in parameters] for device in devices]


def copy_for_replica(value: Any, context: ReplicaContext, copies: dict[int, Any]) -> Any:
    """Returns a copy of a container for a replica, with proxies of metrics; other values are returned unchanged.

    Args:
        value: Container, metric, or any other value.
        context: Context of the replica.
        copies: Copies of this replica so far, by the id of the container. Containers that are the same object, also
            within themselves, have the same copy.
    """
    if is_metric(value):
        return ReplicaMetric(value, context)
    kind = type(value)
    if kind not in CONTAINERS:
        return value
    if id(value) in copies:
        return copies[id(value)]
    if kind is tuple:
        parts = (
            [copy_for_replica(entry, context, copies) for entry in value]
            if len(value) <= MAX_INSPECTED_LENGTH
            else value
        )
        result = value if all(map(is_, parts, value)) else tuple(parts)
        return copies.setdefault(id(value), result)  # a cycle through this tuple has copied it already
    result = copies[id(value)] = copy_container(value)
    for key, entry in entries_of(value):
        if (new := copy_for_replica(entry, context, copies)) is not entry:
            result[key] = new
    return result


def modules_to_copy(module: Module) -> list[Module]:
    """Returns a module and all of its submodules, except metrics and their submodules."""
    found = {module: None}
    pending = [module]
    while pending:
        for child in pending.pop()._modules.values():
            if child is not None and child not in found and not is_metric(child):
                found[child] = None
                pending.append(child)
    return list(found)


def create_whole_batch_forward(original: Module, context: ReplicaContext) -> Callable[[Tensor], Tensor]:
    """Returns a ``forward`` for a replica that processes the inputs of all replicas on the module's device."""

    def action(inputs: list[Tensor], sizes: list[int]) -> Any:
        whole = torch.cat([tensor.to(context.step.root_device) for tensor in inputs])
        return type(original).forward(original, whole)

    def forward(tensor: Tensor) -> Tensor:
        if len(tensor) != context.num_samples:
            raise ValueError(
                f"`sync_batchnorm=True`: {type(original).__name__} received {len(tensor)} rows for"
                f" {context.num_samples} samples. Statistics of the whole batch require one row per sample. Omit"
                " `sync_batchnorm`."
            )
        name = f"{type(original).__name__} (`sync_batchnorm=True`)"
        result: Tensor = context.run_once(name, action, tensor, returns_rows=True, changes_parameters=False)
        return result

    return forward
