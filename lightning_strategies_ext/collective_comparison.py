"""Comparison of collectives before they start, for debugging: ``ChecksOptions(check_collectives=True)``.

Before each collective of this package, and each that other code starts with torch.distributed, every rank sends its
description and its call site to all other ranks. If the descriptions differ, every rank raises an error that names the
collectives and the call sites. With the Trainer, ranks compare the exchange of gradients once per backward pass, and
not the collectives that DDP starts. Fabric does not count batches, so DDP's collectives are compared. Gradients that
this package exchanges itself, over ``shm`` or compressed, are not; ``shm`` compares them in any case.
"""

import threading
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_strategies_ext._system.call_sites import call_site_of_process
from lightning_strategies_ext.collectives.base import Collectives, describe_tensor
from lightning_strategies_ext.exceptions import RankDisagreementError
from lightning_strategies_ext.failure.rank_status import format_ranks
from lightning_strategies_ext.stage_context import StageContext
from lightning_strategies_ext.torch_distributed.collectives import TorchCollectives
from lightning_strategies_ext.torch_distributed.intercepted_calls import DDP_MODULES, intercept_calls

#: Number of bytes of each part of a message: a description, and then a call site.
_PART_NUM_BYTES: Final = 512


def compare_collectives(context: StageContext, *, has_batches: bool) -> Callable[[], None]:
    """Makes all ranks compare each collective before it starts.

    Args:
        context: Stage context of this rank.
        has_batches: Whether the strategy calls ``context.compare_gradients`` before exchanges of gradients; otherwise,
            ranks compare the collectives that DDP starts.

    Returns:
        Function that ends the comparison.
    """
    collectives = context.collectives
    own = threading.local()

    def compare(operation: str, tensor: Tensor | None = None, group: Any = None) -> None:
        if getattr(own, "is_comparing", False):  # the comparison is a collective, too
            return
        what = operation if tensor is None else f"{operation} of {describe_tensor(tensor)}"
        own.is_comparing = True
        try:
            _compare(collectives, what, group)
        finally:
            own.is_comparing = False

    def compare_gradients() -> None:
        progress = context.batch_progress
        if progress is not None and context.local_collectives is None:  # they are local after a failure
            compare(f"exchange of the gradients of batch {progress.ready - 1}")

    def compare_call(what: str, group: Any) -> None:
        if context.local_collectives is None and group.size() > 1:
            compare(what, group=None if group is dist.group.WORLD else group)

    def end() -> None:
        end_interception()
        collectives.compare = context.compare_gradients = None

    # With Horovod, a process may belong to groups of torch.distributed that the strategy does not know.
    is_torch = isinstance(collectives, TorchCollectives)
    end_interception = intercept_calls(compare_call, DDP_MODULES if has_batches else ()) if is_torch else _do_nothing
    collectives.compare, context.compare_gradients = compare, compare_gradients
    return end


def _compare(collectives: Collectives, what: str, group: Any) -> None:
    if collectives.rank(group) is None or collectives.is_local:
        return
    own = _to_bytes(what) + _to_bytes(call_site_of_process())
    message = collectives._to_tensor(bytearray(own))
    if group is not None and torch.device("cpu") in group._device_types:  # it may have no backend for this device
        message = message.cpu()
    gathered = message.new_empty(collectives.world_size(group) * len(own))
    if group is None:
        collectives.start_all_gather(gathered, message, "comparison")()
    else:
        collectives._all_gather(gathered, message, group)
    members = range(collectives.world_size()) if group is None else dist.get_process_group_ranks(group)
    messages = [row.numpy().tobytes() for row in gathered.cpu().view(-1, len(own))]
    ranks: dict[bytes, list[int]] = {}
    for other, received in zip(members, messages, strict=True):
        ranks.setdefault(received[:_PART_NUM_BYTES], []).append(other)
    if len(ranks) > 1:
        texts = [_text_of(others, messages[members.index(others[0])]) for others in ranks.values()]
        raise RankDisagreementError(
            f"The ranks do not call the same collectives: {'; '.join(texts)}. Call the same collectives in the same"
            " order on all ranks."
        )


def _text_of(ranks: list[int], message: bytes) -> str:
    what, site = (part.rstrip(b"\0").decode() for part in (message[:_PART_NUM_BYTES], message[_PART_NUM_BYTES:]))
    verb = "calls" if len(ranks) == 1 else "call"
    return f"{format_ranks(ranks)} {verb} {what}" + (f", at {site}" if site else "")


def _to_bytes(text: str) -> bytes:
    cut = text.encode(errors="replace")[:_PART_NUM_BYTES].decode(errors="ignore")
    return cut.encode().ljust(_PART_NUM_BYTES, b"\0")


def _do_nothing() -> None:
    """Does nothing: no calls are intercepted."""
