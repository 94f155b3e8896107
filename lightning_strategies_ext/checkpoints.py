"""Atomic checkpoints: if a process is killed while it saves, the previous file remains.

Lightning's own writer writes a temporary file and then moves it. If the directory for temporary files is on another
file system, the move is a copy, and a process that is killed meanwhile replaces the last good checkpoint with an
incomplete file. Here the file has no name until it is complete and on the disk.

Limitations: Files that are not on a file system of this host, such as those in a bucket, are written by Lightning's
writer. ``ModelCheckpoint(save_last="link")`` removes the link before it creates the new link.
"""

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from typing_extensions import override

from lightning_strategies_ext._lightning import strategy_parts
from lightning_strategies_ext._system.gpu_sync import synchronize_gpu

#: Suffix of a complete file that is about to replace the previous checkpoint.
_COMPLETE_SUFFIX = ".whole"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint plugin with atomic writes."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Writes a checkpoint; returns when it is on the disk.

        Args:
            checkpoint: Contents of the checkpoint.
            path: Path of the checkpoint. An existing file is replaced after the new file is complete; it remains if
                writing fails.
            storage_options: None, as for Lightning's writer.

        Raises:
            TypeError: If there are storage options.
            OSError: If the file cannot be written.
            torch.distributed.DistBackendError: If a GPU collective was aborted, so that the contents may be invalid.
        """
        synchronize_gpu()
        files, local = url_to_fs(str(path))
        if storage_options is not None or not isinstance(files, LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(local)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _atomic_write(target) as file:
            torch.save(checkpoint, file)


def _get(strategy: Any) -> CheckpointIO:
    """Plugin that writes and reads checkpoints."""
    plugin: CheckpointIO = strategy_parts.checkpoint_io_of(strategy, AtomicCheckpointIO)
    return plugin


#: Property of strategies that makes :class:`AtomicCheckpointIO` the default plugin.
atomic_checkpoint_io = property(_get, strategy_parts.set_checkpoint_io)


@contextmanager
def _atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file that replaces ``path`` at the end of the block, unless the block raises."""
    # Other users may create files in the directory, so they must not be able to predict the name.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = _open_unnamed(path.parent)
    if descriptor is None:
        # Limitation: if the process is killed, the incomplete file remains under this name.
        descriptor, has_name = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), True
    else:
        temporary, has_name = temporary.with_name(f"{temporary.name}{_COMPLETE_SUFFIX}"), False
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
            if not has_name:
                _remove_complete(path)
                _name(descriptor, temporary)
                has_name = True
        os.replace(temporary, path)
    except BaseException:
        if has_name:
            temporary.unlink(missing_ok=True)
        raise
    _make_durable(path.parent)


def _open_unnamed(directory: Path) -> int | None:
    """Opens a file without a name, which the kernel deletes when its process exits; returns None if unsupported."""
    if not hasattr(os, "O_TMPFILE") or not Path("/proc/self/fd").exists():
        return None
    try:
        return os.open(directory, os.O_WRONLY | os.O_TMPFILE, 0o666)
    except OSError:  # not supported on NFS, for example
        return None


def _remove_complete(path: Path) -> None:
    """Removes complete files of this user's processes that were killed before they replaced the checkpoint."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}{re.escape(_COMPLETE_SUFFIX)}")
    with suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if name.fullmatch(entry.name) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                os.unlink(entry.path)


def _name(descriptor: int, path: Path) -> None:
    with _opened(path.parent) as directory:
        # Python ignores `follow_symlinks=True` without `dst_dir_fd`.
        os.link(f"/proc/self/fd/{descriptor}", path.name, dst_dir_fd=directory, follow_symlinks=True)


def _make_durable(directory: Path) -> None:
    """Writes the entries of a directory to the disk."""
    with suppress(OSError), _opened(directory) as descriptor:  # Windows cannot open directories
        os.fsync(descriptor)


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
