"""The command ``install-horovod``: checks, installation (from the cache or a build, if needed), and smoke test."""

import argparse
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from lightning_strategies_ext._system import user_cache
from lightning_strategies_ext._system.interpreters import python_module
from lightning_strategies_ext.horovod_build.build_key import BuildKey
from lightning_strategies_ext.horovod_build.cache import WheelCache
from lightning_strategies_ext.horovod_build.installed import COMMAND, horovod_problem, marker, torch_version
from lightning_strategies_ext.horovod_build.patches import UnknownSourceError, apply_patches
from lightning_strategies_ext.horovod_build.requirements import Toolchain, find_toolchain
from lightning_strategies_ext.horovod_build.smoke_test import SmokeTestError, launchers, run_smoke_test
from lightning_strategies_ext.horovod_build.source import HOROVOD_VERSION, SourceError, fetch_source
from lightning_strategies_ext.horovod_build.wheel import BuildError, build_wheel

SUCCESS, FAILED, MISSING = 0, 1, 2


class InstallError(Exception):
    """Raised if pip cannot install the wheel."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command to a parser."""
    parser.add_argument("--mpi", action="store_true", help="also build with MPI, to run under mpirun")
    parser.add_argument("--nccl", action="store_true", help="also build with CUDA and NCCL, to reduce between GPUs")
    parser.add_argument(
        "--wheel-dir", type=Path, help="directory in which wheels are stored (default: the user's cache directory)"
    )
    parser.add_argument("--rebuild", action="store_true", help="rebuild even if there is a wheel")


def install_horovod(arguments: argparse.Namespace, console: Console) -> int:
    """Installs Horovod in this environment, and tests it.

    Args:
        arguments: Options of the command.
        console: Console for progress and errors.

    Returns:
        Exit code: 0 if Horovod works, 1 if a step failed, 2 if requirements are missing.
    """
    toolchain, missing = find_toolchain(arguments.mpi, arguments.nccl)
    key = BuildKey.for_this_environment(torch_version() or "", toolchain.mpi, toolchain.cuda)
    try:
        cache = WheelCache((arguments.wheel_dir or user_cache.directory("horovod")).expanduser().absolute())
        if not arguments.rebuild and (_is_installed(key) or cache.find(key) is not None):
            missing = [item for item in missing if not item.for_build]
        if missing:
            _print_plain(console, f"Horovod {HOROVOD_VERSION} cannot be built here. Nothing was downloaded. Missing:")
            for item in missing:
                _print_plain(console, f"  - {item.description}\n      {item.remedy}")
            _print_plain(console, "Install the missing requirements, then run the command again.")
            return MISSING
        with _sigterm_as_interrupt():
            _ensure_installed(cache, key, toolchain, arguments.rebuild, console)
            for launcher in launchers(toolchain.environment, with_mpi=arguments.mpi):
                run_smoke_test(launcher, toolchain.environment)
                _print_plain(console, f"{launcher.name}: two ranks reduced.")
    except SmokeTestError as error:
        _print_plain(console, f"{error}\nHorovod is installed but does not work. The wheel is in {cache.entry(key)}")
        _print_plain(console, f"If its output shows no cause, rebuild it: {_repeated(arguments)} --rebuild")
        return FAILED
    except (SourceError, UnknownSourceError, BuildError, InstallError) as error:
        _print_plain(console, str(error))
        return FAILED
    except OSError as error:
        _print_plain(
            console,
            f"{error}\n"
            "Correct this, or pass another directory for wheels with --wheel-dir; then run the command again.",
        )
        return FAILED
    except KeyboardInterrupt:
        _print_plain(console, f"Interrupted; no partial build was stored. Run it again with: {_repeated(arguments)}")
        return FAILED
    _print_plain(console, f"Horovod {key.horovod} works with torch {key.torch}.")
    return SUCCESS


def _ensure_installed(cache: WheelCache, key: BuildKey, toolchain: Toolchain, rebuild: bool, console: Console) -> None:
    """Installs the Horovod of a key, unless installed; builds its wheel only if the cache has none."""
    if not rebuild and _is_installed(key):
        _print_plain(console, f"Horovod {key.horovod} for torch {key.torch} is already installed.")
        return
    with cache.lock(
        key, waiting=lambda: _print_plain(console, "Another build of the same wheel is running; waiting for it.")
    ):
        wheel = None if rebuild else cache.find(key)
        if wheel is not None:
            _print_plain(console, f"Installing the wheel that was built earlier: {wheel}")
        else:
            wheel = _build(cache, key, toolchain, console)
            _print_plain(console, f"The wheel is stored in {wheel}")
    _install(wheel)


def _is_installed(key: BuildKey) -> bool:
    """Returns whether the installed Horovod matches a key and, according to its files, can be imported."""
    return key.matches(marker()) and horovod_problem() is None


def _build(cache: WheelCache, key: BuildKey, toolchain: Toolchain, console: Console) -> Path:
    """Builds the wheel in a temporary directory, and stores the complete wheel in the cache."""
    log = cache.directory / f"{key.directory_name}.log"
    with tempfile.TemporaryDirectory(prefix="horovod-build-") as directory:
        _print_plain(console, f"Downloading the source of Horovod {key.horovod}.")
        source = fetch_source(Path(directory))
        changes = apply_patches(source, toolchain.cxx_standard, toolchain.library_directories, bool(toolchain.cuda))
        for fix in changes:
            _print_plain(console, f"Patched {fix.file}: {fix.reason}.")
        _print_plain(console, f"Building for torch {key.torch}; this takes minutes. The log is {log}")
        try:
            wheel = cache.store(key, build_wheel(source, Path(directory), log, toolchain, console))
        except BuildError:
            raise  # keep the log for the user; interrupted and successful builds delete theirs
        except BaseException:
            log.unlink(missing_ok=True)
            raise
        log.unlink(missing_ok=True)
        return wheel


def _install(wheel: Path) -> None:
    """Installs a wheel without dependencies, and replaces any installed Horovod."""
    command = python_module("pip", "install", "--quiet", "--disable-pip-version-check")
    command += ["--no-deps", "--no-index", "--force-reinstall", str(wheel)]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        raise InstallError(
            f"pip could not install {wheel}:\n"
            f"{done.stdout.strip()}\n"
            f"The wheel is stored: correct the error that pip reports, then run {COMMAND} again; it will not rebuild"
            " the wheel."
        )


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Handles SIGTERM like Ctrl-C inside the context, so that compilers and temporary files are cleaned up."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _repeated(arguments: argparse.Namespace) -> str:
    """Returns the command line with the user's options, for messages."""
    options = [f"--{name}" for name in ("mpi", "nccl") if getattr(arguments, name)]
    if arguments.wheel_dir:
        options += ["--wheel-dir", str(arguments.wheel_dir)]
    return " ".join([COMMAND, *options])


def _print_plain(console: Console, text: str) -> None:
    """Prints plain text: rich would interpret parts of paths, versions, and compiler output as markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
