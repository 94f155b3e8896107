"""Cache of wheels from earlier builds, outside any virtual environment, with one directory per key.

A directory is created atomically after its wheel is complete. A wheel in the cache is therefore usable, regardless of
interrupted or concurrent builds.
"""

import base64
import fcntl
import hashlib
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_strategies_ext._system import user_cache
from lightning_strategies_ext.horovod_build.build_key import BuildKey
from lightning_strategies_ext.horovod_build.installed import MARKER

_PARTIAL = ".partial-"


class WheelCache:
    """Cache of wheels in one directory.

    Args:
        directory: Root of the cache.

    Example::

        cache = WheelCache(user_cache.directory("horovod"))
        with cache.lock(key, waiting=lambda: print("another build is running")):
            wheel = cache.find(key) or cache.store(key, build())
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def find(self, key: BuildKey) -> Path | None:
        """Returns the wheel of a key, or None.

        Raises:
            UnsafePathError: If another user could have written the wheel.
        """
        wheel = next(iter(sorted(self.entry(key).glob("*.whl"))), None)
        return None if wheel is None else user_cache.safe_path(wheel)

    def entry(self, key: BuildKey) -> Path:
        """Returns the directory of a key's wheel, which may not exist."""
        return self.directory / key.directory_name

    @contextmanager
    def lock(self, key: BuildKey, waiting: Callable[[], None]) -> Iterator[None]:
        """Locks a key against other builds, in this process and in others; the kernel unlocks it if the process exits.

        Args:
            key: Key of the wheel to build.
            waiting: Callback that is called before a wait for another build.

        Raises:
            UnsafePathError: If other users can write to the directory.
        """
        self.directory = user_cache.create(self.directory)
        with open(self.directory / f".lock-{key.directory_name}", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
            self._remove_partial(key)
            yield

    def store(self, key: BuildKey, wheel: Path) -> Path:
        """Stores a copy of a built wheel with the marker of its key. The caller holds the lock.

        Returns:
            Path of the copy.
        """
        partial = Path(tempfile.mkdtemp(prefix=f"{_PARTIAL}{key.directory_name}-", dir=self.directory))
        try:
            _copy_with_marker(wheel, partial / wheel.name, key)
            partial.chmod(0o755)
            shutil.rmtree(self.entry(key), ignore_errors=True)
            partial.rename(self.entry(key))
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return self.entry(key) / wheel.name

    def remove(self, key: BuildKey) -> None:
        """Removes the wheel of a key."""
        shutil.rmtree(self.entry(key), ignore_errors=True)

    def _remove_partial(self, key: BuildKey) -> None:
        """Removes incomplete copies of killed processes. Under the lock, no other process is copying."""
        for partial in self.directory.glob(f"{_PARTIAL}{key.directory_name}-*"):
            shutil.rmtree(partial, ignore_errors=True)


def _copy_with_marker(source: Path, destination: Path, key: BuildKey) -> None:
    """Copies a wheel and adds the marker to its dist-info directory and its RECORD.

    Because of the entry in RECORD, pip removes the marker when Horovod is uninstalled or replaced.
    """
    content = key.as_json().encode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(destination, "w", zipfile.ZIP_DEFLATED) as new:
        record = next(name for name in old.namelist() if name.endswith(".dist-info/RECORD"))
        name = f"{record.removesuffix('RECORD')}{MARKER}"
        for info in old.infolist():
            data = old.read(info)
            if info.filename == record:
                data = data.rstrip(b"\r\n") + f"\n{name},sha256={digest},{len(content)}\n".encode()
            new.writestr(info, data)
        new.writestr(name, content)
