"""Flight recorder of torch: the last collectives of this process over gloo and NCCL, with the user's calls.

torch records them if the environment variable ``TORCH_FR_BUFFER_SIZE`` has a size.
"""

import os
import pickle
from typing import Any, Final

import torch

from lightning_strategies_ext._system.call_sites import is_user_code

#: Number of collectives that a text lists.
_MAX_LISTED: Final = 20
_VARIABLE: Final = "TORCH_FR_BUFFER_SIZE"


def recorded_collectives() -> list[str]:
    """Returns the last collectives of this process, the oldest first; nothing if torch does not record them.

    ``_dump_fr_trace`` has no public name (torch 2.13). Earlier versions may lack it, or record NCCL only.
    """
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace", None)
    if dump is None or os.environ.get(_VARIABLE, "0") == "0":
        return []
    return [_describe(entry) for entry in pickle.loads(dump()).get("entries", ())[-_MAX_LISTED:]]


def _describe(entry: dict[str, Any]) -> str:
    sizes = ", ".join(map(str, entry["input_sizes"]))
    users = [frame for frame in entry.get("frames", ()) if is_user_code(frame["filename"])]
    site = f", at {users[0]['filename']}:{users[0]['line']} in {users[0]['name']}" if users else ""
    return f"{entry['collective_seq_id']}: {entry['profiling_name']} {sizes}".rstrip() + site
