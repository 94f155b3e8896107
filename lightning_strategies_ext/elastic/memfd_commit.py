"""Commits in memory files, which outlive their process because a descriptor store holds them (:mod:`.fd_store`).

Each rank has one memory file, which each commit overwrites in place: a header, the tensors, and a pickle of all other
state. The header, written last, states whether the commit is complete. A rank that is killed during a commit leaves an
incomplete one; the commits of the other ranks contain the same shared state.
"""

import mmap
import os
import pickle
import struct
import tempfile
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from lightning_strategies_ext._lightning import logging_state
from lightning_strategies_ext._system.gpu_sync import copy_to_host
from lightning_strategies_ext._system.memory import free_memory
from lightning_strategies_ext.collectives import Collectives
from lightning_strategies_ext.elastic.commit import Commit, CommitTooLargeError, SharedState
from lightning_strategies_ext.elastic.commit_state import TensorPlaceholder, pickle_state
from lightning_strategies_ext.elastic.fd_store import FdStoreClient

_MAGIC = b"lse-0001"
_HEADER = struct.Struct("<8sQqQQ")  # magic, whether the commit is complete, batches, start of the pickle, its size
_STEPS_DONE = struct.Struct("<q")  # optimizer steps; not in `_HEADER`, because each step overwrites it
_STEPS_DONE_OFFSET = 64  # bytes
_HEADER_BYTES = 4096
_ALIGNMENT = 64  # bytes: a cache line, and more than any dtype needs


class CommitFile:
    """Memory file with a commit.

    Args:
        fd: Descriptor of the file, owned by this object.

    Attributes:
        fd: Descriptor of the file.
        header: Mapping of the header.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.header = mmap.mmap(fd, _HEADER_BYTES)

    @classmethod
    def create(cls, num_bytes: int) -> "CommitFile":
        """Allocates a memory file.

        Args:
            num_bytes: Size of the tensors, in bytes.

        Raises:
            CommitTooLargeError: If there is too little memory.
        """
        free = free_memory()
        if num_bytes > free:  # the kernel would try to reclaim memory for minutes
            raise CommitTooLargeError(
                f"A commit has {num_bytes / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of this host's memory are free."
            )
        try:
            fd = _create_file()
        except OSError as error:
            raise CommitTooLargeError(f"No file for a commit can be created: {error}") from error
        try:
            reserve(fd, 0, _HEADER_BYTES + num_bytes)
        except CommitTooLargeError:
            os.close(fd)
            raise
        return cls(fd)

    @property
    def batches(self) -> int:
        """Number of batches done at the commit; -1 if the commit is incomplete."""
        magic, is_complete, batches, _, _ = self._unpack_header()
        return int(batches) if magic == _MAGIC and is_complete else -1

    @property
    def steps_done(self) -> int:
        """Number of optimizer steps that the rank has done, also since the commit."""
        return int(_STEPS_DONE.unpack_from(self.header, _STEPS_DONE_OFFSET)[0])

    @steps_done.setter
    def steps_done(self, steps: int) -> None:
        _STEPS_DONE.pack_into(self.header, _STEPS_DONE_OFFSET, steps)

    def begin_write(self) -> None:
        """Marks the commit as incomplete, before it is overwritten."""
        _HEADER.pack_into(self.header, 0, _MAGIC, 0, -1, 0, 0)

    def finish_write(self, batches: int, offset: int, state: bytes) -> None:
        """Writes all state except the tensors, and marks the commit as complete.

        Args:
            batches: Number of batches done.
            offset: Offset of the pickle, after the tensors, in bytes.
            state: Pickle of the state without the tensors, for which memory is reserved.
        """
        num_written = 0
        while num_written < len(state):
            num_written += os.pwrite(self.fd, memoryview(state)[num_written:], offset + num_written)
        _HEADER.pack_into(self.header, 0, _MAGIC, 1, batches, offset, len(state))

    def read_state(self) -> Any:
        """Returns the pickled state. Safe to load: the store accepts descriptors from processes of this user only."""
        _, _, _, offset, size = self._unpack_header()
        return pickle.loads(os.pread(self.fd, size, offset))

    def tensors(self, placeholders: Sequence[TensorPlaceholder]) -> list[Tensor]:
        """Returns the tensors, which share the file's memory."""
        offsets, end = tensor_offsets(placeholders)
        mapping = mmap.mmap(self.fd, end)
        return [
            torch.frombuffer(mapping, dtype=each.dtype, count=each.shape.numel(), offset=offset).view(each.shape)
            if each.shape.numel()
            else torch.empty(each.shape, dtype=each.dtype)
            for each, offset in zip(placeholders, offsets, strict=True)
        ]

    def close(self) -> None:
        """Closes the descriptor; tensors remain valid."""
        os.close(self.fd)

    def _unpack_header(self) -> tuple[Any, ...]:
        return _HEADER.unpack_from(self.header)


def _create_file() -> int:
    try:
        return os.memfd_create("lightning_strategies_ext-commit")
    except OSError as error:  # seccomp may forbid it
        with tempfile.TemporaryFile() as file:
            rank_zero_warn(
                f"Commits are stored in unnamed files in {tempfile.gettempdir()} instead of memory, because the"
                f" system forbids `memfd_create` ({error.strerror})."
            )
            return os.dup(file.fileno())


def reserve(fd: int, offset: int, num_bytes: int) -> None:
    """Reserves memory of a file: later, a write without free memory would raise SIGBUS.

    Raises:
        CommitTooLargeError: If there is too little memory.
    """
    try:
        os.posix_fallocate(fd, offset, num_bytes)
    except OSError as error:
        raise CommitTooLargeError(f"There is no memory for a commit of {offset + num_bytes} bytes: {error}") from error


def tensor_offsets(placeholders: Sequence[TensorPlaceholder]) -> tuple[list[int], int]:
    """Returns the offsets of tensors in a memory file, and the end of the last one, in bytes."""
    offsets, end = [], _HEADER_BYTES
    for each in placeholders:
        offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = offsets[-1] + each.shape.numel() * each.dtype.itemsize
    return offsets, end


class MemfdCommit(Commit):
    """Newest state that a rank can restore, also in a restarted process.

    Args:
        fd_store: Connection to the descriptor store of this host.
        fit_number: Number of the ``fit`` in this process.
        rank: Global rank.
        world_size: Number of ranks.
        local_rank: Local rank.
        num_local_ranks: Number of ranks of this host.

    Attributes:
        steps_done: Largest number of optimizer steps that a rank of this host had done before the restart; -1 without
            a commit.
    """

    remedy = "Start fewer ranks per host (`--nproc-per-node`)"
    _can_be_pinned = False  # memory files are not pinned

    def __init__(
        self,
        fd_store: FdStoreClient,
        fit_number: int,
        rank: int,
        world_size: int,
        local_rank: int,
        num_local_ranks: int,
    ) -> None:
        super().__init__(num_local_ranks)
        self._fd_store = fd_store
        self._prefix = f"fit{fit_number}/"
        self._name = str(local_rank)  # name of the commit in the store, after the prefix
        self._rank, self._world_size = rank, world_size
        self._memory: CommitFile | None = None
        self._placeholders: list[TensorPlaceholder] | None = None  # placeholders of the tensors in `_memory`
        self._views: list[Tensor] = []  # the tensors in `_memory`
        self.steps_done = -1
        self._load()

    def _load(self) -> None:
        """Loads the newest complete commit of this host; prefers this rank's own commit among equally new ones."""
        found = {name: CommitFile(fd) for name, fd in self._fd_store.get_all(self._prefix).items()}
        newest = max(found, key=lambda name: (found[name].batches, name == self._name), default=None)
        if newest is not None and found[newest].batches >= 0:
            self.shared, rank, self._random, self._local_state = found[newest].read_state()
            assert self.shared is not None
            self._tensors = found[newest].tensors(self.shared.placeholders)
            self.steps_done = max(memory.steps_done for memory in found.values())
            if (rank, self.shared.world_size) != (self._rank, self._world_size):
                self._random = self._local_state = None
        for name, memory in found.items():
            if name == self._name == newest and self.shared is not None:
                self._memory, self._placeholders, self._views = memory, self.shared.placeholders, self._tensors
            else:
                memory.close()

    def _copy_local_state(self, trainer: "pl.Trainer") -> Any:
        modules = trainer.lightning_module.named_modules()
        metrics = {name: dict(module.metric_state) for name, module in modules if isinstance(module, Metric)}
        return metrics, logging_state.logged_sums(trainer)

    def _restore_local_state(self, trainer: "pl.Trainer", local_state: Any) -> None:
        metrics, sums = local_state
        for name, module in trainer.lightning_module.named_modules():
            for state, value in metrics.get(name, {}).items():
                # From the CPU, where `pickle_state` has stored them.
                is_list, device = isinstance(value, list), module.device
                setattr(module, state, [each.to(device) for each in value] if is_list else value.to(device, copy=True))
        logging_state.set_logged_sums(trainer, sums)

    def record_step(self, step: int) -> None:
        """Records the number of optimizer steps done, which a restarted process reads."""
        if self._memory is not None:
            self._memory.steps_done = step

    def capture_final(self, trainer: "pl.Trainer", first_world_size: int, collectives: Collectives) -> None:
        """Commits at the end of ``fit``, so that no step is repeated if a later stage fails."""
        self.capture(trainer, first_world_size, collectives)

    def check_later_size(self, trainer: "pl.Trainer") -> int:
        """Extends :meth:`.Commit.check_later_size`: logs the size."""
        num_bytes = super().check_later_size(trainer)
        rank_zero_info(f"Each commit has {num_bytes / 2**20:.1f} MiB; each rank stores one on its host.")
        return num_bytes

    def _write(self, shared: SharedState, tensors: list[Tensor]) -> None:
        state = pickle_state((shared, self._rank, self._random, self._local_state))
        memory, end = self._memory, tensor_offsets(shared.placeholders)[1]
        is_new = memory is None or self._placeholders != shared.placeholders
        if memory is None or is_new:
            memory = CommitFile.create(end)
            self._views = memory.tensors(shared.placeholders)
        reserve(memory.fd, end, len(state))  # before the stored commit becomes incomplete
        memory.begin_write()
        copy_to_host(tensors, self._views, may_pin=False)
        memory.finish_write(shared.batches, end, state)
        memory.steps_done = shared.step
        self.shared, self._tensors = shared, self._views
        if is_new:
            self._fd_store.put(self._prefix + self._name, memory.fd)
            if self._memory is not None:
                self._memory.close()
            self._memory, self._placeholders = memory, shared.placeholders
