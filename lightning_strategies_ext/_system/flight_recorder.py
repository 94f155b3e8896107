"""Flight recorder of torch: the last collectives of this process over gloo, NCCL, and ``shm``, with the user's calls.

torch records them if the environment variable ``TORCH_FR_BUFFER_SIZE`` has a size. It records ``shm`` in torch 2.15 and
later, see :mod:`lightning_strategies_ext.shm.recorded_group`.
"""

import os
import pickle
from typing import Any, Final

import torch

from lightning_strategies_ext._system.call_sites import is_user_code

#: Number of collectives that a text lists.
_MAX_LISTED: Final = 20
_VARIABLE: Final = "TORCH_FR_BUFFER_SIZE"
_SHM: Final = "shm"


def is_enabled() -> bool:
    """Returns whether the environment enables the recorder."""
    return os.environ.get(_VARIABLE, "0") != "0"


def hook_class() -> Any:
    """Returns torch's class that records the collectives of any process group; None before torch 2.15.

    The class has no public name (read in torch 2.15). That of torch 2.14 gives collectives names that torch's trace
    analyzer rejects; it has no ``_dump_fr_trace_file``.
    """
    return getattr(_module(), "FlightRecorderHook", None) if hasattr(_module(), "_dump_fr_trace_file") else None


def recorded_collectives() -> list[str]:
    """Returns the last collectives of this process, the oldest first; nothing if torch does not record them."""
    of_shm = _load(_SHM)["entries"]
    names = {entry["process_group"][0] for entry in of_shm}
    # gloo executes some operations of a `shm` group, and records them under the same name.
    of_gloo = [entry for entry in _load()["entries"] if entry["process_group"][0] not in names]
    entries = sorted([*of_gloo, *of_shm], key=lambda entry: entry["time_created_ns"])
    return [_describe(entry) for entry in entries[-_MAX_LISTED:]]


def trace() -> bytes | None:
    """Returns the record of this process's collectives over ``shm``, for torch's trace analyzer; None without record.

    The analyzer cannot read a record of gloo, which does not name its process groups (observed in torch 2.13 and 2.15).
    It prints a warning for each entry of a backend other than torch's, so the entries get the name that torch gives to
    an unknown backend.
    """
    record = _load(_SHM)
    if not record["entries"]:
        return None
    for entry in record["entries"]:
        entry["profiling_name"] = entry["profiling_name"].replace(f"{_SHM}:", "c10d:", 1)
    return pickle.dumps(record)


def _module() -> Any:
    return getattr(torch._C, "_distributed_c10d", None)


def _load(backend: str | None = None) -> dict[str, Any]:
    """Returns the record of a backend, or that of gloo and NCCL if it is None.

    ``_dump_fr_trace`` has no public name (read in torch 2.13 to 2.15). Earlier versions may lack it, or record NCCL
    only.
    """
    dump = getattr(_module(), "_dump_fr_trace", None)
    if dump is None or not is_enabled() or (backend is not None and hook_class() is None):
        return {"entries": []}
    record: dict[str, Any] = pickle.loads(dump() if backend is None else dump(backend=backend))
    return {"entries": [], **record}


def _describe(entry: dict[str, Any]) -> str:
    sizes = ", ".join(map(str, entry["input_sizes"]))
    users = [frame for frame in entry.get("frames", ()) if is_user_code(frame["filename"])]
    site = f", at {users[0]['filename']}:{users[0]['line']} in {users[0]['name']}" if users else ""
    return f"{entry['collective_seq_id']}: {entry['profiling_name']} {sizes}".rstrip() + site
