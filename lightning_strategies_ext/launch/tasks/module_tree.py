"""Changes of a stage to the tree of the LightningModule: new, removed, renamed, wrapped, and moved parts.

A ``setup`` may compile a part of the module or move it into another part; a callback may prune it, which renames its
parameters. Parts that were sent are recognized by identity, not by name, wherever they are in the tree.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

#: Attributes in which a module has its parts, by name and in order.
KINDS = "_parameters", "_buffers", "_modules"

#: Parts of one module, by kind and name.
Parts = dict[str, dict[str, Any]]


def tensors_of(module: Module) -> dict[str, Tensor]:
    """Returns all parameters and buffers of a module by name, once each, including non-persistent buffers."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def is_in_shared_memory(tensor: Tensor) -> bool:
    """Whether a CPU tensor is in memory that other processes can map. A received tensor is in the sender's memory."""
    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided and not is_lazy(tensor)
    return is_plain and tensor.is_shared()


def make_private(module: Module) -> None:
    """Copies parameters and buffers from shared to private memory, as Lightning's launchers do.

    DDP keeps one copy per rank and synchronizes them; optimizers of several ranks must not update the same memory.
    """
    copies: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors_of(module).values():
        if is_in_shared_memory(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in copies:
                copies[storage.data_ptr()] = storage.clone()
            view = tensor.storage_offset(), tensor.shape, tensor.stride()
            tensor.data = torch.empty(0, dtype=tensor.dtype).set_(copies[storage.data_ptr()], *view)


class ModuleTree:
    """Records the tree of a module that was sent. The methods compare a later state of the module with the record."""

    def __init__(self, module: Module) -> None:
        self._names = {id(tensor): name for name, tensor in tensors_of(module).items()}
        # Holds the modules and parts, so that no other object gets their ids.
        self._parts = {id(holder): (holder, _parts_of(holder)) for holder in module.modules()}

    def values(self, module: Module) -> Iterator[tuple[str, Tensor]]:
        """Yields the sent tensors by the names under which they were sent; replaced buffers yield their replacement."""
        yielded = set()
        for holder, parts in self._parts_as_sent(module):
            for kind in ("_parameters", "_buffers"):
                for leaf, sent in parts[kind].items():
                    name, part = self._names.get(id(sent)), vars(holder)[kind][leaf]
                    if name is not None and id(part) not in yielded:
                        yielded.add(id(part))
                        yield name, part

    def changes(self, module: Module) -> Iterator[tuple[Module, Parts]]:
        """Yields the modules that were sent and whose parts have changed, with their new parts."""
        for holder, parts in self._parts_as_sent(module):
            if id(holder) in self._parts and _identities(parts) != _identities(self._parts[id(holder)][1]):
                yield holder, parts

    def _parts_as_sent(self, module: Module) -> Iterator[tuple[Module, Parts]]:
        """Yields each module with its parts. A buffer that has replaced a sent buffer is yielded as the sent buffer.

        The sent buffer then receives the values of the new one in the main process. A new parameter, however, replaces
        the sent parameter, because the optimizers refer to the new one.
        """
        now = {id(tensor) for tensor in tensors_of(module).values()}
        for holder in module.modules():
            parts = _parts_of(holder)
            if id(holder) in self._parts:
                before = self._parts[id(holder)][1]["_buffers"]
                for leaf, part in parts["_buffers"].items():
                    sent = before.get(leaf)
                    if part is not None and id(part) not in self._names and sent is not None and id(sent) not in now:
                        parts["_buffers"][leaf] = sent
            yield holder, parts


def put_parts(holder: Module, parts: Parts) -> None:
    """Replaces the parts of a module."""
    for kind, kind_parts in parts.items():
        own = vars(holder)[kind]
        own.clear()
        own.update(kind_parts)


def _parts_of(holder: Module) -> Parts:
    return {kind: dict(vars(holder)[kind]) for kind in KINDS}


def _identities(parts: Parts) -> list[tuple[str, list[tuple[str, int]]]]:
    return [(kind, [(leaf, id(part)) for leaf, part in kind_parts.items()]) for kind, kind_parts in parts.items()]
