"""Checkpoints that are whole or not there: whoever is killed while saving leaves the file of before.

Lightning's own writer collects the file in the directory for temporary files and then moves it. Where that is another
file system, moving is copying, and a process that is killed meanwhile leaves half a file in the place of the last good
one. Here the file has no name until it is whole and on the disk.

What it does not promise: anything of what is not a file of this host, such as a bucket (Lightning's writer does these),
or of ``ModelCheckpoint(save_last="link")``, which removes the link before it makes the new one.
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

#: End of the name of a file that has all of its contents and is about to replace another one.
_WHOLE = ".whole"


class WholeCheckpointIO(TorchCheckpointIO):
    """Lightning's reader and writer of checkpoints, with a writer that puts a file in its place when it is whole."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Writes a checkpoint; returns when it is on the disk.

        Args:
            checkpoint: What is to be in it.
            path: Where to; what is there stays until all has been written, and if that fails.
            storage_options: Must be None, as for Lightning's writer.

        Raises:
            TypeError: If there are storage options.
            OSError: If it cannot be written.
            torch.distributed.DistBackendError: If an exchange between GPUs was cut off, and with it what is in it.
        """
        synchronize_gpu()
        files, local = url_to_fs(str(path))
        if storage_options is not None or not isinstance(files, LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(local)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _put_in_place(target) as file:
            torch.save(checkpoint, file)


class SavesWholeCheckpoints:
    """A strategy that writes checkpoints so if the user names no other way; stands before Lightning's class."""

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """How checkpoints are written and read."""
        checkpoint_io: CheckpointIO = strategy_parts.checkpoint_io_of(self, WholeCheckpointIO)
        return checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        strategy_parts.set_checkpoint_io(self, io)


@contextmanager
def _put_in_place(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file that gets its name when the block ends, in the place of what had it; not if it raises."""
    # Other users may create files in the directory, so they must not be able to predict the name.
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = _open_nameless(path.parent)
    if descriptor is None:
        # What a killed process leaves of it stays.
        descriptor, has_name = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), True
    else:
        beside, has_name = beside.with_name(f"{beside.name}{_WHOLE}"), False
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
            if not has_name:
                _remove_whole(path)
                _name(descriptor, beside)
                has_name = True
        os.replace(beside, path)
    except BaseException:
        if has_name:
            beside.unlink(missing_ok=True)
        raise
    _make_durable(path.parent)


def _open_nameless(directory: Path) -> int | None:
    """Opens a file without a name, which is gone with its process; None where there are no such files."""
    if not hasattr(os, "O_TMPFILE") or not Path("/proc/self/fd").exists():
        return None
    try:
        return os.open(directory, os.O_WRONLY | os.O_TMPFILE, 0o666)
    except OSError:  # NFS has none
        return None


def _remove_whole(path: Path) -> None:
    """Removes whole files of this user's processes that were killed before they replaced the checkpoint."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}{re.escape(_WHOLE)}")
    with suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if name.fullmatch(entry.name) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                os.unlink(entry.path)


def _name(descriptor: int, path: Path) -> None:
    with _opened(path.parent) as directory:
        # Python follows the symbolic link, as it is asked to, only if there is a directory too.
        os.link(f"/proc/self/fd/{descriptor}", path.name, dst_dir_fd=directory, follow_symlinks=True)


def _make_durable(directory: Path) -> None:
    """Has the disk know what is in a directory now."""
    with suppress(OSError), _opened(directory) as descriptor:  # Windows does not open directories
        os.fsync(descriptor)


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
