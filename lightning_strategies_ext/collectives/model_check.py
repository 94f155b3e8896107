"""Check that all ranks have the same model, before its weights or gradients are exchanged.

Engines detect different tensors on different ranks late or not at all: ranks wait for each other, or sum tensors that
do not correspond.
"""

import hashlib
from itertools import zip_longest

import torch
from torch.nn.parameter import is_lazy

from lightning_strategies_ext.collectives.base import Collectives, names_excluded_from_ddp
from lightning_strategies_ext.exceptions import ModelMismatchError


def share_model(collectives: Collectives, module: torch.nn.Module, device: torch.device, is_trained: bool) -> None:
    """Broadcasts rank 0's module, after :func:`check_same_model`, which has the same arguments and exceptions."""
    check_same_model(collectives, module, device, is_trained)
    collectives.broadcast_module(module)


def check_same_model(collectives: Collectives, module: torch.nn.Module, device: torch.device, is_trained: bool) -> None:
    """Checks that all ranks have the same module. Collective: all ranks call it; takes one round trip.

    Args:
        collectives: Collectives of the ranks.
        module: The model.
        device: Device of this rank.
        is_trained: Whether the ranks will exchange gradients, too.

    Raises:
        ModelMismatchError: On every rank, if the names, order, dtypes, or shapes of parameters and buffers differ, or
            (for a module that is trained) which parameters need gradients. The message states the first difference.
    """
    if collectives.rank() is None or collectives.world_size() == 1:
        return
    lines = _described(module, is_trained)
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.int64)
    all_ranks = collectives.all_gather(own.to(device)).cpu()
    others = (all_ranks != all_ranks[0]).any(dim=1).nonzero().flatten().tolist()
    if not others:
        return
    first_lines, other_lines = (collectives.broadcast(lines, rank) for rank in (0, others[0]))
    collectives.barrier()  # a rank that raises leaves the collectives, so all must have the lines
    first, other = next((a, b) for a, b in zip_longest(first_lines, other_lines, fillvalue="nothing more") if a != b)
    raise ModelMismatchError(
        f"The ranks have different `{type(module).__name__}` models: rank 0 has {first}, rank {others[0]} has"
        f" {other}. Build the model from the same arguments on every rank; its structure must not depend on the rank"
        " or on random numbers."
    )


def _described(module: torch.nn.Module, is_trained: bool) -> list[str]:
    """Returns a description of each tensor that ranks exchange."""
    excluded = names_excluded_from_ddp(module)
    lines = []
    for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in named:
            if name in excluded:
                continue
            shape = "shape not known yet" if is_lazy(tensor) else f"shape {tuple(tensor.shape)}"
            gradient = "" if kind == "buffer" or tensor.requires_grad or not is_trained else ", without gradient"
            lines.append(f"the {kind} `{name}` ({str(tensor.dtype).removeprefix('torch.')}, {shape}{gradient})")
    return lines
