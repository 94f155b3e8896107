"""What a build fetches with pip: the released source of Horovod, and the packages that its build imports.

All of it is pinned by version and by hash, and stays in the directory of the build. No package of the user is changed.
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
#: What Horovod's `setup.py` imports, apart from torch of the user's environment. Both have one wheel, for all systems.
BUILD_REQUIREMENTS = (
    "setuptools==84.2.1 --hash=sha256:ca140b45d5325a9478f880e351484f62fef15f336462e449ca0c03c873d589c2",
    "packaging==26.4 --hash=sha256:81383611a09c1bc0b08b76e0fd5829d7c6824c65b27a6aee339da133f4233ea2",
)


class SourceError(Exception):
    """The source or a package for the build could not be fetched, or is not the released one."""


def fetch_source(directory: Path) -> Path:
    """Downloads the source distribution from the index that pip is configured for, and unpacks it.

    The packages that the build imports come first, because pip runs the source's `setup.py` for its metadata.

    Args:
        directory: An empty directory; everything is put below it.

    Returns:
        The root of the unpacked source.

    Raises:
        SourceError: If pip fails, or what it brought is not the release.
    """
    fetch_build_packages(directory)
    # With a hash, pip looks at the archive before it runs the archive's setup.py for the metadata.
    requirement = f"horovod=={HOROVOD_VERSION} --hash=sha256:{ARCHIVE_SHA256}"
    environment = with_build_packages(os.environ, directory)
    options = ("--no-binary", "horovod", "--no-build-isolation")
    (archive,) = _download([requirement], directory, environment, options)
    return unpack_source(archive, directory)


def fetch_build_packages(directory: Path, requirements: Sequence[str] = BUILD_REQUIREMENTS) -> None:
    """Downloads and unpacks the packages that the build imports, for :func:`with_build_packages`.

    Args:
        directory: The directory of the build.
        requirements: Lines of a requirements file, each with a hash.

    Raises:
        SourceError: If pip fails, or a package has another hash.
    """
    # Constraints are for the user's environment, into which nothing of this is installed.
    environment = {**os.environ, "PIP_CONSTRAINT": os.devnull}
    for wheel in _download(requirements, directory, environment, ("--only-binary", ":all:")):
        with zipfile.ZipFile(wheel) as content:
            content.extractall(_build_packages(directory))


def with_build_packages(environment: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Returns an environment whose Python processes import the packages of the build first, and then the user's."""
    path = [str(_build_packages(directory)), environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def _build_packages(directory: Path) -> Path:
    return directory / "build-packages"


def _download(
    requirements: Sequence[str], directory: Path, environment: Mapping[str, str], options: Sequence[str]
) -> list[Path]:
    """Downloads one file for each requirement."""
    file = directory / "requirements.txt"
    file.write_text("\n".join(requirements) + "\n")
    destination = Path(tempfile.mkdtemp(prefix="downloads-", dir=directory))
    command = python_module("pip", "download", "--disable-pip-version-check", "--no-deps", "--require-hashes")
    command += [*options, "--dest", str(destination), "-r", str(file)]
    # An interrupted pip leaves its temporary files.
    environment = {**environment, "TMPDIR": str(directory)}
    done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    files = sorted(destination.glob("*"))
    if done.returncode != 0 or len(files) != len(requirements):
        raise SourceError(
            f"pip could not download the source of horovod {HOROVOD_VERSION} and what its build needs:\n"
            f"{done.stdout.strip()}\n"
            "Check the network and pip's index configuration (pip config list), then run the command again."
        )
    return files


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
