"""Creation of a ``shm`` process group: finds the ranks of each host, allocates their memory, and connects them."""

import ctypes
import itertools
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch.distributed as dist
import wrapt
from torch import Tensor

from lightning_strategies_ext._system import flight_recorder
from lightning_strategies_ext._system.gloo_connections import restrict_gloo
from lightning_strategies_ext.shm import native_build
from lightning_strategies_ext.shm.comparison import Comparison
from lightning_strategies_ext.shm.compiler import NativeLibraryError
from lightning_strategies_ext.shm.executor import OperationExecutor
from lightning_strategies_ext.shm.gloo_fallback import GlooFallback
from lightning_strategies_ext.shm.links import LocalPeer
from lightning_strategies_ext.shm.native import MAX_RANKS, NativeAllReduce
from lightning_strategies_ext.shm.options import ShmOptions
from lightning_strategies_ext.shm.process_group import ShmProcessGroup
from lightning_strategies_ext.shm.recorded_group import RecordedShmProcessGroup
from lightning_strategies_ext.shm.rendezvous import Rendezvous
from lightning_strategies_ext.shm.rounds import Rounds
from lightning_strategies_ext.shm.segments import (
    DEFAULT_NUM_BYTES,
    DIRECTORY,
    Segment,
    create,
    grow_if_crowded,
    mapped,
    resolve_num_bytes,
)

#: Messages that were printed already; they are not repeated for further groups.
_printed_notices: set[str] = set()


def create_process_group(torch_options: Any, options: ShmOptions | None) -> Any:
    """Creates a process group for the backend ``shm``. torch.distributed calls it on all ranks of the group.

    Args:
        torch_options: Options from torch, such as rank, size, and store of the group.
        options: Options of the user, or None.

    Returns:
        The group; a gloo backend if a rank cannot allocate shared memory, which rank 0 reports on standard error.

    Raises:
        PermissionError: If another user's process has connected as a rank, or ranks of one host have different users.
        TypeError: If ``options`` is not a :class:`ShmOptions`.
        TimeoutError: If a rank does not connect before the timeout.
    """
    if options is not None and not isinstance(options, ShmOptions):
        raise TypeError(f"`pg_options={options!r}`: the backend 'shm' accepts a ShmOptions or None.")
    _exclude_from_dynamo()
    rank, size, store = torch_options.group_rank, torch_options.group_size, torch_options.store
    chosen_num_bytes = resolve_num_bytes(None if options is None else options.segment_num_bytes)
    timeout: timedelta = torch_options.timeout
    deadline = time.monotonic() + timeout.total_seconds()
    rendezvous = Rendezvous(rank, size, dist.PrefixStore("shm", store))
    library = _native_library(rank)
    with closing(rendezvous), ExitStack() as opened:
        own_fd, problem = _try_to_create(chosen_num_bytes or DEFAULT_NUM_BYTES, rank, opened)
        announced = rendezvous.announce({"problem": problem, "has_native": library is not None}, deadline)
        local = [other for other in range(size) if announced[other]["host"] == announced[rank]["host"]]
        leaders = _leaders_of(announced)
        with restrict_gloo(is_one_host=len(leaders) == 1):
            gloo = GlooFallback(dist.PrefixStore("gloo", store), rank, size, timeout)
        if problem := next((info["problem"] for info in announced if info["problem"]), ""):
            _print_on_rank_zero(rank, f"falling back to gloo for this process group: {problem}.")
            return gloo
        if chosen_num_bytes is None:
            grow_if_crowded(own_fd, len(local))
        names = torch_options.global_ranks_in_group or range(size)
        peers = {
            local_rank: LocalPeer(other, names[other], announced[other]["pid"])
            for local_rank, other in enumerate(local)
            if other != rank
        }
        links, fds = rendezvous.connect([(peer, announced[peer.rank]) for peer in peers.values()], own_fd, deadline)
        for fd in fds.values():
            opened.callback(os.close, fd)
        all_fds = [fds[peers[index]] if index in peers else own_fd for index in range(len(local))]
        segments = [Segment(fd) for fd in all_fds]
    local_rank = local.index(rank)
    comparison = Comparison(local_rank, LocalPeer(rank, names[rank], os.getpid()), peers, links)
    rounds = Rounds(local_rank, peers, links, segments, comparison)
    native = None
    has_library = all(info["has_native"] for info in announced)
    if library is not None and has_library and 1 < len(local) <= MAX_RANKS:
        native = NativeAllReduce(library, local_rank, peers, links, segments, comparison)
    leader_group = None
    if len(leaders) > 1 and rank in leaders:
        with restrict_gloo(is_one_host=False):
            prefix = dist.PrefixStore("leaders", store)
            leader_group = dist.ProcessGroupGloo(prefix, leaders.index(rank), len(leaders), timeout)
    share_memory = partial(_share_memory, rank, size, store, peers, gloo, itertools.count())
    arguments = rank, size, OperationExecutor(rounds), rounds, native, share_memory, gloo, leader_group
    if flight_recorder.is_enabled() and flight_recorder.hook_class() is not None:
        return RecordedShmProcessGroup(*arguments, timeout=timeout, global_ranks=names)
    return ShmProcessGroup(*arguments)


def _share_memory(
    rank: int,
    size: int,
    store: dist.Store,
    peers: Mapping[int, LocalPeer],
    gloo: GlooFallback,
    numbers: Iterator[int],
    num_bytes: int,
) -> list[Tensor]:
    """Implements :meth:`.ShmProcessGroup.share_memory`."""
    if len(peers) + 1 < size:
        raise ValueError("`share_memory` requires that all ranks of the group are on one host.")
    deadline = time.monotonic() + gloo.timeout.total_seconds()
    rendezvous = Rendezvous(rank, size, dist.PrefixStore(f"shm/memory/{next(numbers)}", store))
    with closing(rendezvous), ExitStack() as opened:
        space = os.statvfs(DIRECTORY)
        free_num_bytes = space.f_bavail * space.f_frsize
        too_large = f"{size * num_bytes} bytes are more than half of the free space in {DIRECTORY}"
        own_fd, problem = -1, too_large
        # Ranks that measure later see less free space: the last one still this much, if the memory of all ranks is half
        # of the free space before.
        if (size + 1) * num_bytes <= free_num_bytes:
            own_fd, problem = _try_to_create(num_bytes, rank, opened)
        announced = rendezvous.announce({"problem": problem, "free": free_num_bytes}, deadline)
        problem = next((info["problem"] for info in announced if info["problem"]), "")
        # The first rank has measured before any rank has allocated memory. The remaining memory is for other uses,
        # such as DataLoader workers.
        if 2 * size * num_bytes > max(info["free"] for info in announced):
            problem = too_large
        if problem:
            rendezvous.await_readers(range(size))
            raise MemoryError(problem)
        links, fds = rendezvous.connect([(peer, announced[peer.rank]) for peer in peers.values()], own_fd, deadline)
        links.close()
        for fd in fds.values():
            opened.callback(os.close, fd)
        return [mapped(fds[peers[local_rank]] if local_rank in peers else own_fd) for local_rank in range(size)]


@cache
def _exclude_from_dynamo() -> None:
    """Excludes the group's methods from tracing by torch.compile.

    C++ code calls them while a module is traced: DDP broadcasts buffers that way. Dynamo would trace the method and
    fail, because it does not support the process group. ``trace_rules.add`` is private and exists in torch 2.5 to 2.15;
    without it, the import of dynamo must not fail.
    """

    def exclude_package(rules: Any) -> None:
        if hasattr(rules, "add"):
            rules.add(__package__)

    wrapt.register_post_import_hook(exclude_package, "torch._dynamo.trace_rules")


def _native_library(rank: int) -> ctypes.CDLL | None:
    try:
        library, uncached_reason = native_build.library()
    except NativeLibraryError as error:
        _print_notice_once(rank, f"the shared-memory all-reduce runs in Python, which is slower: {error}.")
        return None
    if uncached_reason:
        _print_notice_once(
            rank,
            f"each process compiles the all-reduce of 'shm' again, because it cannot be stored: {uncached_reason}.",
        )
    return library


def _try_to_create(num_bytes: int, rank: int, opened: ExitStack) -> tuple[int, str]:
    """Returns the descriptor of a new segment, which the stack closes, and an error message; -1 if there is one."""
    try:
        fd = create(num_bytes)
    except OSError as error:
        return -1, f"rank {rank} cannot reserve {num_bytes} bytes in /dev/shm ({error.strerror})"
    opened.callback(os.close, fd)
    return fd, ""


def _leaders_of(announced: list[dict[str, Any]]) -> list[int]:
    """Returns the leader of each host, its first rank."""
    first: dict[str, int] = {}
    for rank, info in enumerate(announced):
        first.setdefault(info["host"], rank)
    return list(first.values())


def _print_notice_once(rank: int, message: str) -> None:
    if message not in _printed_notices:
        _printed_notices.add(message)
        _print_on_rank_zero(rank, message)


def _print_on_rank_zero(rank: int, message: str) -> None:
    if rank == 0:
        print(f"lightning-strategies-ext: {message}", file=sys.stderr, flush=True)  # noqa: T201
