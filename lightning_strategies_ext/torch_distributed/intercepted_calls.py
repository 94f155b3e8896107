"""Interception of ``torch.distributed`` calls before they start, for ``ChecksOptions(check_collectives=True)``.

A replaced function of torch.distributed would break ``torch.compile``, and would miss names that were imported before.
torch calls every process group of its own through operators of its dispatcher. While calls are intercepted, these
operators have another kernel (:class:`torch.library.Library`), which calls the operator itself afterwards. torch calls
``shm`` without the dispatcher; the methods of its process group are replaced during the interception. Before and after
it, calls have no additional cost.

``TORCH_DISTRIBUTED_DEBUG=DETAIL`` also compares calls, but it wraps a group when the group is created, and creates a
second group for each. It compares neither reductions nor roots, ignores ``shm``, and names no line of the user's code.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_strategies_ext.collectives.base import describe_tensor
from lightning_strategies_ext.shm.process_group import ShmProcessGroup
from lightning_strategies_ext.shm.tensors import is_tracing

#: Names of operators and methods, without underscores at both ends → kind of the collective, and index of the argument
#: that has the same shape on all ranks; None without such an argument.
_COLLECTIVES: Final[dict[str, tuple[str, int | None]]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "reduce": ("reduce", 0),
    "broadcast": ("broadcast", 0),
    "allgather": ("all_gather", 1),
    "allgather_base": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "gather": ("gather", 1),
    "gather_into_tensor": ("gather", 1),
    "scatter": ("scatter", 0),
    "reduce_scatter": ("reduce_scatter", 0),
    "reduce_scatter_base": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "reduce_scatter_single": ("reduce_scatter", 0),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 0),
    "alltoall": ("all_to_all", None),
    "alltoall_base": ("all_to_all", None),
    "all_to_all_single": ("all_to_all", None),
    "barrier": ("barrier", None),
}
#: Kinds for which some backends accept tensors of different sizes, in a list that all ranks pass.
_UNEVEN: Final = ("all_gather", "reduce_scatter")
_PACKAGE: Final = __name__.partition(".")[0]
#: Modules through which a call passes before its function starts the collective.
_PASSED: Final = ("torch.distributed", "torch._ops")
#: Modules from which DDP calls its process group: in the forward pass, and in the backward pass.
DDP_MODULES: Final = ("torch.nn.parallel", "torch.autograd.graph")
_active: Final = ExitStack()


def intercept_calls(before: Callable[[str, Any], None], excluded: Sequence[str]) -> Callable[[], None]:
    """Makes a function run before each collective of torch.distributed, on any thread.

    Calls of this package are excluded, and so are messages from one rank to another, and calls while torch traces.
    Ends an earlier interception.

    Args:
        before: Function that receives the description of a collective and the process group.
        excluded: Modules whose calls are excluded, with their submodules.

    Returns:
        Function that ends the interception.
    """

    def intercept(name: str, args: Sequence[Any], group: Any, root: Any, frame: FrameType | None) -> None:
        caller, op = _caller_of(frame)
        # Threads of autograd on GPUs, on which DDP exchanges gradients, have no Python frames.
        is_excluded = _is_in(caller, (_PACKAGE, *excluded)) if caller else bool(excluded)
        if not is_excluded and not is_tracing():
            before(_describe(name, args, op, root), group)

    _active.close()  # the calls of a strategy before this one
    undo = ExitStack()
    _active.callback(undo.close)
    library = torch.library.Library("c10d", "IMPL")
    undo.callback(library._destroy)
    for name, operator in _operators():
        # The key `BackendSelect` precedes those of devices, and every tensor has it, also in inference mode.
        library.impl(operator, _kernel(name, operator, intercept), "BackendSelect", with_keyset=True)
    for kind in (ShmProcessGroup, *ShmProcessGroup.__subclasses__()):
        for attribute, method in [*vars(kind).items()]:
            if attribute.strip("_") in _COLLECTIVES:
                setattr(kind, attribute, _method(attribute.strip("_"), method, intercept))
                undo.callback(setattr, kind, attribute, method)
    return undo.close


def _operators() -> Iterator[tuple[str, Any]]:
    for name in _COLLECTIVES:
        for operator in (f"{name}_", f"_{name}_", name):
            if hasattr(torch.ops.c10d, operator):
                yield name, getattr(torch.ops.c10d, operator).default


def _kernel(name: str, operator: Any, intercept: Callable[..., None]) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments]
    key = torch._C.DispatchKey.BackendSelect

    def kernel(keyset: Any, *args: Any) -> Any:
        known = dict(zip(names, args, strict=False))  # arguments with their default value are omitted
        group = dist.ProcessGroup.unbox(known["process_group"])
        intercept(name, args, group, known.get("root_rank"), sys._getframe().f_back)
        return operator.redispatch(keyset.remove(key), *args)

    return kernel


def _method(name: str, method: Callable[..., Any], intercept: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def intercepted(group: ShmProcessGroup, *args: Any, **kwargs: Any) -> Any:
        root = getattr(args[-1], "rootRank", None) if args else None
        intercept(name, args, group, root, sys._getframe().f_back)
        return method(group, *args, **kwargs)

    return intercepted


def _caller_of(frame: FrameType | None) -> tuple[str, Any]:
    """Returns the module that has called torch.distributed, and the reduction of the function that it has called.

    The name is empty if the thread has no Python frame of another module.
    """
    op: Any = None
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not _is_in(module, _PASSED):
            return module, op
        # Before torch 2.15, the operator's own argument has no attribute with the reduction.
        op = frame.f_locals.get("op", frame.f_locals.get("reduceOp", op))
        frame = frame.f_back
    return "", op


def _is_in(module: str, packages: Sequence[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _describe(name: str, args: Sequence[Any], op: Any, root: Any) -> str:
    kind, index = _COLLECTIVES[name]
    text = f"torch.distributed's {kind}"
    if kind in ("all_reduce", "reduce", "reduce_scatter") and op is not None:
        text += f" ({_name_of(op)})"
    if root is not None:
        text += f" with root {root}"
    if index is None or len(args) < 2 or (kind in _UNEVEN and _differ(args[1 - index])):
        return text
    tensors = [args[index]] if isinstance(args[index], Tensor) else args[index]
    return f"{text} of {' and '.join(map(describe_tensor, tensors))}"


def _name_of(op: Any) -> str:
    if not isinstance(op, (str, dist.ReduceOp.RedOpType)):  # a ReduceOp, whose text has its address
        op = next((known for known in dist.ReduceOp.RedOpType.__members__.values() if op == known), type(op).__name__)
    return str(getattr(op, "name", op)).lower()


def _differ(lists: Any) -> bool:
    """Returns whether shapes may differ between ranks: a list has several, or a tensor contains those of all ranks."""
    if isinstance(lists, Tensor):
        return False
    return any(isinstance(part, Tensor) for part in lists) or len({each.shape for part in lists for each in part}) > 1
