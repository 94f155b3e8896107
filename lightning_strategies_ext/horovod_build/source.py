"""The released source of Horovod: fetched with pip, checked against its hash, unpacked."""

import hashlib
import os
import subprocess
import tarfile
from pathlib import Path, PurePosixPath

from lightning_strategies_ext.interpreters import python_module

HOROVOD_VERSION = "0.28.1"
ARCHIVE_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"


class SourceError(Exception):
    """The source could not be fetched, or is not the released one."""


def fetch_source(directory: Path) -> Path:
    """Downloads the source distribution from the index that pip is configured for, and unpacks it.

    Args:
        directory: An empty directory; everything is put below it.

    Returns:
        The root of the unpacked source.

    Raises:
        SourceError: If pip fails, or what it brought is not the release.
    """
    requirements = directory / "requirements.txt"
    # With a hash, pip looks at the archive before it runs the archive's setup.py for the metadata.
    requirements.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{ARCHIVE_SHA256}\n")
    command = python_module("pip", "download", "--disable-pip-version-check", "--no-deps", "--require-hashes")
    command += ["--no-binary", "horovod", "--no-build-isolation", "--dest", str(directory), "-r", str(requirements)]
    environment = {**os.environ, "TMPDIR": str(directory)}  # an interrupted pip leaves its temporary files
    done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    archives = sorted(directory.glob("horovod-*.tar.gz"))
    if done.returncode != 0 or len(archives) != 1:
        raise SourceError(
            f"pip could not download the source of horovod {HOROVOD_VERSION}:\n{done.stdout.strip()}\n"
            "Check the network and pip's index configuration (pip config list), then run the command again."
        )
    return unpack_source(archives[0], directory)


def unpack_source(archive: Path, directory: Path, sha256: str = ARCHIVE_SHA256) -> Path:
    """Unpacks the archive below a directory, if it is the released one.

    Raises:
        SourceError: If its hash is another one, or a member would be written elsewhere.
    """
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != sha256:
        raise SourceError(
            f"{archive.name} is not the released source: its SHA-256 is {found}, not {sha256}. "
            "Another index or a proxy may have replaced it; set pip to a trusted index and run the command again."
        )
    with tarfile.open(archive) as content:
        for member in content.getmembers():
            parts = PurePosixPath(member.name).parts
            if not parts or parts[0] in ("/", "..") or ".." in parts or not (member.isfile() or member.isdir()):
                raise SourceError(f"{archive.name} holds {member.name!r}, which is no file below its own directory.")
        if hasattr(tarfile, "data_filter"):
            content.extractall(directory, filter="data")
        else:  # early releases of Python 3.10 and 3.11 have no filters; what matters most was looked at above
            content.extractall(directory)
    return directory / f"horovod-{HOROVOD_VERSION}"
