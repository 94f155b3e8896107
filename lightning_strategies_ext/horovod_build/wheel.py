"""Builds the wheel: pip runs Horovod's build in the fixed source, and a progress bar shows its progress.

The compiler prints thousands of lines about unused variables. All output goes to a log. The terminal shows the phase
and a percentage, and the error of a failed build contains the end of the log.
"""

import os
import re
import shutil
import signal
import subprocess
from collections import deque
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from lightning_strategies_ext._system.interpreters import python_module
from lightning_strategies_ext.horovod_build.requirements import Toolchain, cuda_directory, nccl_directory
from lightning_strategies_ext.horovod_build.source import with_build_packages

_TAIL_LINES = 40
#: Lines after which the log contains no more causes: setuptools prints its call of CMake, and pip its own command.
_LAST_RELEVANT_LINES = (
    "-- Configuring incomplete, errors occurred!",
    "ninja: build stopped: subcommand failed.",
    "error: subprocess-exited-with-error",
)
#: Progress of ninja, "[12/75] Building", and of make, "[ 16%] Building".
_STEP = re.compile(r"^\s*\[(?:\s*(?P<done>\d+)/(?P<total>\d+)|\s*(?P<percent>\d+)%)\] ")
#: Headers that Horovod and its copy of gloo use but do not include.
_HEADERS = (
    *("algorithm", "array", "cstdint", "functional", "map", "memory", "mutex", "stdexcept", "string"),
    *("unordered_map", "unordered_set", "vector"),
)
#: Memory per compiler process. Horovod's largest files needed 1.5 GB with torch 2.13 and GCC 12.
_BYTES_PER_COMPILER = 2 * 2**30


class BuildError(Exception):
    """Raised if the build fails. The message contains the end of the log."""


def build_wheel(source: Path, directory: Path, log: Path, toolchain: Toolchain, console: Console) -> Path:
    """Builds a wheel from an unpacked and fixed source.

    Args:
        source: Root of the source.
        directory: Existing directory for the wheel and for temporary files; contains the packages of
            :func:`.source.fetch_build_packages`.
        log: File for all output.
        toolchain: Tools and libraries of this host.
        console: Console for the progress bar.

    Returns:
        Path of the wheel.

    Raises:
        BuildError: If the build fails.
    """
    wheels = directory / "wheels"
    command = python_module("pip", "wheel", "--verbose", "--disable-pip-version-check", "--no-deps")
    command += ["--no-build-isolation", "--no-cache-dir", "--wheel-dir", str(wheels), str(source)]
    exit_code, tail = _run(command, build_environment(toolchain, directory), log, console)
    built = sorted(wheels.glob("horovod-*.whl"))
    if exit_code != 0 or len(built) != 1:
        raise BuildError(
            f"The build of Horovod failed (exit code {exit_code}). The last lines of its log:\n"
            + "\n".join(tail)
            + f"\nThe whole log is in {log}. Correct the first error in it, and run the command again."
        )
    return built[0]


def build_environment(toolchain: Toolchain, directory: Path) -> dict[str, str]:
    """Returns the environment of the build. Most variables of the user that begin with ``HOROVOD_`` are removed."""
    allowed_prefixes = ("HOROVOD_CMAKE", "HOROVOD_BUILD_", "HOROVOD_NCCL_LINK")
    environment = {
        name: value
        for name, value in toolchain.environment.items()
        if not name.startswith("HOROVOD_") or name.startswith(allowed_prefixes)
    }
    environment = with_build_packages(environment, directory) | {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        # An interrupted pip does not delete its temporary files; this directory is deleted.
        "TMPDIR": str(directory),
        # gloo requires a policy of CMake 2.8, which CMake 4 has removed. Earlier versions ignore the variable.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "CMAKE_BUILD_PARALLEL_LEVEL": str(_compilers()),
        # Later versions of GCC and CUDA no longer include these headers indirectly, on which older code relies. `-w`
        # disables warnings, because thousands of them would hide an error.
        "CXXFLAGS": f"{' '.join(f'-include {name}' for name in _HEADERS)} -w {environment.get('CXXFLAGS', '')}".strip(),
    }
    if shutil.which("ninja", path=environment["PATH"]):
        environment["CMAKE_GENERATOR"] = "Ninja"
    if toolchain.mpi:
        # Without MPI_HOME, CMake searches for an MPI of the system first.
        wrapper = Path(shutil.which("mpicxx", path=environment["PATH"]) or "mpicxx")
        environment |= {"HOROVOD_WITH_MPI": "1", "MPI_HOME": str(wrapper.parent.parent)}
    else:
        environment["HOROVOD_WITHOUT_MPI"] = "1"
    if toolchain.cuda:
        environment |= {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_CUDA_HOME": str(cuda_directory(environment)),
            "CUDA_HOME": str(cuda_directory(environment)),
            **_nccl_environment(environment, directory),
        }
    return environment


def _nccl_environment(environment: dict[str, str], directory: Path) -> dict[str, str]:
    """Returns variables for NCCL. pip's package has only ``libnccl.so.2``, so a link ``libnccl.so`` is created."""
    root = nccl_directory(environment)
    if root is None or not (library := root / "lib" / "libnccl.so.2").exists():
        return {} if root is None else {"HOROVOD_NCCL_HOME": str(root)}
    links = directory / "nccl"
    links.mkdir()
    (links / "libnccl.so").symlink_to(library)
    header = str(root / "include")
    return {"HOROVOD_NCCL_INCLUDE": header, "HOROVOD_NCCL_LIB": str(links), "HOROVOD_NCCL_LINK": "SHARED"}


def _compilers() -> int:
    """Returns the number of concurrent compilers: one per available processor, limited by memory."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(processors, memory // _BYTES_PER_COMPILER))


def _run(command: list[str], environment: dict[str, str], log: Path, console: Console) -> tuple[int, list[str]]:
    """Runs the build in its own process group, which is killed if this process is interrupted.

    Returns:
        Exit code, and the last lines of the output that may show the cause of a failure.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        with log.open("w", buffering=1, encoding="utf-8") as file, Progress(*columns, console=console) as progress:
            task, num_quarters = progress.add_task("configuring", total=None), 0
            is_tail_complete = False
            for line in process.stdout:
                file.write(line)
                is_tail_complete = is_tail_complete or line.strip() in _LAST_RELEVANT_LINES
                if not is_tail_complete:
                    tail.append(line.rstrip())
                if (share := _share(line)) is None:
                    continue
                progress.update(task, description="compiling", total=100, completed=round(100 * share))
                if not console.is_terminal and int(4 * share) > num_quarters:
                    num_quarters = int(4 * share)
                    console.print(f"compiled {25 * num_quarters} %")
        return process.wait(), list(tail)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _share(line: str) -> float | None:
    """Returns the compiled fraction that a line of output shows, or None."""
    if (match := _STEP.match(line)) is None:
        return None
    if match["percent"] is not None:
        return int(match["percent"]) / 100
    return int(match["done"]) / max(1, int(match["total"]))
