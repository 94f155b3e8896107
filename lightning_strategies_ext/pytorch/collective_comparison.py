"""Comparison of collectives before they start, for debugging: ``ChecksOptions(check_collectives=True)``.

Before each collective of this package, every rank sends its description and its call site to all other ranks. If the
descriptions differ, every rank raises an error that names the collectives and the call sites. Ranks compare the
exchange of gradients once per backward pass. They do not compare collectives that DDP's C++ code or the user starts.
"""

from typing import Final

import torch
from torch import Tensor

from lightning_strategies_ext._system.call_sites import call_site_of_process
from lightning_strategies_ext.collectives.base import Collectives
from lightning_strategies_ext.exceptions import RankDisagreementError
from lightning_strategies_ext.failure.rank_status import format_ranks
from lightning_strategies_ext.stage_context import StageContext

#: Number of bytes of each part of a message: a description, and then a call site.
_PART_NUM_BYTES: Final = 512


def compare_collectives(context: StageContext) -> None:
    """Makes all ranks compare each collective of a stage, and each exchange of gradients, before it starts."""
    collectives = context.collectives

    def compare(operation: str, tensor: Tensor | None = None) -> None:
        what = operation if tensor is None else f"{operation} of {_describe(tensor)}"
        collectives.compare = None  # the comparison is a collective, too
        try:
            _compare(collectives, what)
        finally:
            collectives.compare = compare

    def compare_gradients() -> None:
        progress = context.batch_progress
        if progress is not None and context.local_collectives is None:  # they are local after a failure
            compare(f"exchange of the gradients of batch {progress.ready - 1}")

    collectives.compare, context.compare_gradients = compare, compare_gradients


def _compare(collectives: Collectives, what: str) -> None:
    rank = collectives.rank()
    if rank is None or collectives.is_local:
        return
    own = _to_bytes(what) + _to_bytes(call_site_of_process())
    gathered = torch.empty(collectives.world_size() * len(own), dtype=torch.uint8)
    message = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    collectives.start_all_gather(gathered, message, "comparison")()
    messages = [row.numpy().tobytes() for row in gathered.view(-1, len(own))]
    ranks: dict[bytes, list[int]] = {}
    for other, received in enumerate(messages):
        ranks.setdefault(received[:_PART_NUM_BYTES], []).append(other)
    if len(ranks) > 1:
        texts = [_text_of(group, messages[group[0]]) for group in ranks.values()]
        raise RankDisagreementError(
            f"The ranks do not call the same collectives: {'; '.join(texts)}. Call the same collectives in the same"
            " order on all ranks."
        )


def _text_of(ranks: list[int], message: bytes) -> str:
    what, site = (part.rstrip(b"\0").decode() for part in (message[:_PART_NUM_BYTES], message[_PART_NUM_BYTES:]))
    verb = "calls" if len(ranks) == 1 else "call"
    return f"{format_ranks(ranks)} {verb} {what}" + (f", at {site}" if site else "")


def _describe(tensor: Tensor) -> str:
    return f"a tensor of shape {list(tensor.shape)} and dtype {str(tensor.dtype).removeprefix('torch.')}"


def _to_bytes(text: str) -> bytes:
    cut = text.encode(errors="replace")[:_PART_NUM_BYTES].decode(errors="ignore")
    return cut.encode().ljust(_PART_NUM_BYTES, b"\0")
