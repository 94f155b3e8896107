"""Downloads the released source of Horovod, and the packages that its build imports, with pip.

All downloads are pinned by version and hash, and stay in the build directory. The user's packages are not changed.
"""

import hashlib
import os
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from lightning_strategies_ext._system.interpreters import python_module

HOROVOD_VERSION = "0.28.1"
ARCHIVE_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
#: Packages that Horovod's `setup.py` imports, in addition to torch. Each has one wheel for all platforms.
BUILD_REQUIREMENTS = (
    "setuptools==84.2.1 --hash=sha256:ca140b45d5325a9478f880e351484f62fef15f336462e449ca0c03c873d589c2",
    "packaging==26.4 --hash=sha256:81383611a09c1bc0b08b76e0fd5829d7c6824c65b27a6aee339da133f4233ea2",
)


class SourceError(Exception):
    """Raised if the source or a build package cannot be downloaded, or differs from the release."""


def fetch_source(directory: Path) -> Path:
    """Downloads the source distribution from pip's configured index, and unpacks it.

    The packages that the build imports are downloaded first, because pip runs the source's `setup.py` for its metadata.

    Args:
        directory: Empty directory for all files.

    Returns:
        Root of the unpacked source.

    Raises:
        SourceError: If pip fails, or a download differs from the release.
    """
    fetch_build_packages(directory)
    # With a hash, pip verifies the archive before it runs the archive's setup.py for the metadata.
    requirement = f"horovod=={HOROVOD_VERSION} --hash=sha256:{ARCHIVE_SHA256}"
    environment = with_build_packages(os.environ, directory)
    options = ("--no-binary", "horovod", "--no-build-isolation")
    (archive,) = _download([requirement], directory, environment, options)
    return unpack_source(archive, directory)


def fetch_build_packages(directory: Path, requirements: Sequence[str] = BUILD_REQUIREMENTS) -> None:
    """Downloads and unpacks the packages that the build imports, for :func:`with_build_packages`.

    Args:
        directory: Build directory.
        requirements: Lines of a requirements file, each with a hash.

    Raises:
        SourceError: If pip fails, or a package has a different hash.
    """
    # The user's constraints do not apply, because these packages are not installed.
    environment = {**os.environ, "PIP_CONSTRAINT": os.devnull}
    for wheel in _download(requirements, directory, environment, ("--only-binary", ":all:")):
        with zipfile.ZipFile(wheel) as content:
            content.extractall(_build_packages(directory))


def with_build_packages(environment: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Returns environment variables with which Python imports the build packages before the user's packages."""
    path = [str(_build_packages(directory)), environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def _build_packages(directory: Path) -> Path:
    return directory / "build-packages"


def _download(
    requirements: Sequence[str], directory: Path, environment: Mapping[str, str], options: Sequence[str]
) -> list[Path]:
    """Downloads one file per requirement.

    Raises:
        SourceError: If pip fails.
    """
    file = directory / "requirements.txt"
    file.write_text("\n".join(requirements) + "\n")
    destination = Path(tempfile.mkdtemp(prefix="downloads-", dir=directory))
    command = python_module("pip", "download", "--disable-pip-version-check", "--no-deps", "--require-hashes")
    command += [*options, "--dest", str(destination), "-r", str(file)]
    # An interrupted pip does not delete its temporary files; the build directory is deleted.
    environment = {**environment, "TMPDIR": str(directory)}
    done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    files = sorted(destination.glob("*"))
    if done.returncode != 0 or len(files) != len(requirements):
        raise SourceError(
            f"pip could not download the source of horovod {HOROVOD_VERSION} and the requirements of its build:\n"
            f"{done.stdout.strip()}\n"
            "Check the network and pip's index configuration (pip config list), then run the command again."
        )
    return files


def unpack_source(archive: Path, directory: Path, sha256: str = ARCHIVE_SHA256) -> Path:
    """Verifies the archive and unpacks it to a directory.

    Args:
        archive: Source distribution.
        directory: Directory for the unpacked source.
        sha256: Expected hash of the archive.

    Returns:
        Root of the unpacked source.

    Raises:
        SourceError: If the hash differs, or a member is outside the directory or not a plain file.
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
                raise SourceError(
                    f"{archive.name} contains {member.name!r}, which is not a file below its own directory."
                )
        if hasattr(tarfile, "data_filter"):
            content.extractall(directory, filter="data")
        else:  # early releases of Python 3.10 and 3.11 have no filters; the loop above checks the paths
            content.extractall(directory)
    return directory / f"horovod-{HOROVOD_VERSION}"
