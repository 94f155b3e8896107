"""Reports this environment, for bug reports, and which strategies can run in it."""

import logging
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lightning_strategies_ext import discovery, lightning_names
from lightning_strategies_ext.registry import (
    COMPRESSIONS,
    FABRIC,
    PYTORCH,
    STRATEGIES,
    LazyStrategy,
    StrategyUnavailableError,
)

_ABSENT = "not installed"
_FRONT_ENDS = {PYTORCH: "Trainer", FABRIC: "Fabric"}
_VARIANT = re.compile(f"_(find_unused_parameters_(true|false)|{'|'.join(COMPRESSIONS)})$")


@dataclass(frozen=True)
class StrategyCheck:
    """Result for one strategy name.

    Attributes:
        name: Name of the strategy.
        front_ends: Front ends in which the name is registered: "Trainer", "Fabric".
        engine: Engine of the strategy's collectives.
        problem: Reason why the strategy cannot run here; None if it can.
        is_error: Whether the problem is an error; a missing optional requirement is not.
    """

    name: str
    front_ends: tuple[str, ...]
    engine: str
    problem: str | None
    is_error: bool = False


def environment_info() -> dict[str, str]:
    """Returns installed software and available hardware: name → description.

    If a malicious release of Lightning is installed, it returns only versions from metadata.
    """
    versions = {
        "this package": _version_of("lightning-strategies-ext"),
        "Python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": _version_of("torch"),
        "Lightning": ", ".join(filter(None, map(_name_and_version_of, ("lightning", "pytorch-lightning")))),
    }
    if discovery.find_malicious_releases():
        return versions
    probes: dict[str, Callable[[], str]] = {
        "torch": _torch,
        "Horovod": _horovod,
        "MPI": _mpi,
        "GPUs": _gpus,
        "CPU cores": lambda: str(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()),
        "/dev/shm": _shared_memory,
        "shm": _shm,
        "ranks here": _rank_launcher,
    }
    return {**versions, **{name: _probe_result(probe, versions.get(name)) for name, probe in probes.items()}}


def _probe_result(probe: Callable[[], str], known: str | None) -> str:
    """Returns a fact, or why it is unknown: if one part is broken, the other facts help to find the reason."""
    try:
        return probe()
    except Exception as error:
        return f"{f'{known}; more is ' if known else ''}unknown ({type(error).__name__}: {error})"


def examine() -> Iterator[StrategyCheck]:
    """Examines every registered name of this package, and of other packages that use its entry points.

    If Lightning cannot be imported, no strategy can run, and each finding contains the reason.

    Raises:
        ImportError: If a malicious release of Lightning is installed.
    """
    registered: dict[str, dict[str, Any]] = {}
    flavor = lightning_names.name_for_module(__name__)
    try:
        pytorch_strategies: Any = flavor.import_module(f"{flavor.trainer}.strategies")
        fabric_strategies: Any = flavor.import_module(f"{flavor.fabric}.strategies")
    except Exception as error:
        if discovery.find_malicious_releases():
            raise
        problem_of_all = f"`import {flavor.package}` fails ({type(error).__name__}: {error}). Reinstall it."
        if isinstance(error, ModuleNotFoundError) and error.name in (flavor.package, flavor.fabric):
            problem_of_all = str(error)
        for row in STRATEGIES:
            front_ends = tuple(_FRONT_ENDS[front_end] for front_end in row.classes)
            yield StrategyCheck(row.name, front_ends, row.engine, problem_of_all, is_error=True)
        return
    registries = (("Trainer", pytorch_strategies.StrategyRegistry), ("Fabric", fabric_strategies.STRATEGY_REGISTRY))
    for front_end, registry in registries:
        for name, entry in registry.items():
            if isinstance(entry["strategy"], LazyStrategy):
                registered.setdefault(name, {})[front_end] = entry
    engines = {row.name: row.engine for row in STRATEGIES}
    for name, entries in registered.items():
        problem = next((found for entry in entries.values() if (found := _problem(entry))), None)
        owner = next(iter(entries.values()))["strategy"].owner
        is_error = problem is not None and not isinstance(problem, StrategyUnavailableError)
        message = None if problem is None else str(problem)
        yield StrategyCheck(name, tuple(entries), engines.get(name, f"(package {owner})"), message, is_error)
    for name in sorted(engines.keys() - registered.keys()):
        message = "not registered: another package took the name, or discovery failed"
        yield StrategyCheck(name, (), engines[name], message, is_error=True)


def group_variants(findings: list[StrategyCheck]) -> dict[StrategyCheck, bool]:
    """Merges variants whose result equals that of their base strategy: finding → whether it stands for variants."""
    by_name = {finding.name: finding for finding in findings}
    has_variants: dict[StrategyCheck, bool] = {}
    for finding in findings:
        base = by_name.get(_VARIANT.sub("", finding.name), finding)
        is_variant = base != finding and replace(finding, name=base.name, front_ends=base.front_ends) == base
        shown = base if is_variant else finding
        has_variants[shown] = is_variant or has_variants.get(shown, False)
    return has_variants


def _problem(entry: dict[str, Any]) -> Exception | None:
    """Constructs the strategy as Lightning does, and returns the exception that a user would get, or None."""
    try:
        with _suppress_output():
            entry["strategy"](**entry["init_params"])
    except Exception as error:
        return error
    return None


@contextmanager
def _suppress_output() -> Generator[None, None, None]:
    """Disables log messages of strategies that are constructed only as a test."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return _ABSENT


def _name_and_version_of(package: str) -> str | None:
    found = _version_of(package)
    return None if found == _ABSENT else f"{package} {found}"


def _torch() -> str:
    import torch

    from lightning_strategies_ext.torch_distributed.backend_checks import available_backends

    return f"{torch.__version__}, with {', '.join(available_backends())}"


def _horovod() -> str:
    from lightning_strategies_ext.horovod_build.installed import (
        built_for_torch_version,
        horovod_problem,
        marker,
        outdated_build_warning,
        package_directory,
    )

    package = package_directory("horovod")
    if package is None:
        return "not installed"
    if horovod_problem() is not None:
        return f"{_version_of('horovod')}, not usable in this environment"
    content = marker()
    transports = ["gloo", *(name for name in ("mpi", "nccl") if content and content.get(name))]
    transports_text = f", with {', '.join(transports)}" if content else ""
    rebuild_text = ", to be rebuilt" if outdated_build_warning() else ""
    return f"{_version_of('horovod')} for torch {built_for_torch_version(package)}{transports_text}{rebuild_text}"


def _mpi() -> str:
    from lightning_strategies_ext.horovod_build.requirements import mpirun_version_output, tool_environment

    try:
        output = mpirun_version_output(tool_environment())
    except (OSError, subprocess.SubprocessError) as error:
        return f"mpirun fails: {error}"
    if output is None:
        return "no mpirun"
    return output.strip().splitlines()[0] if output.strip() else "mpirun prints no version"


def _gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    nccl: Any = torch.cuda.nccl.version()
    return f"{', '.join(names)}; CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, nccl))}"


def _shared_memory() -> str:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return "does not exist"
    return f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"


def _shm() -> str:
    from lightning_strategies_ext import shm
    from lightning_strategies_ext.shm import native_build
    from lightning_strategies_ext.shm.compiler import NativeLibraryError

    if not shm.is_available():
        return "requires Linux; gloo is used instead"
    try:
        native_build.library()
    except NativeLibraryError as error:
        return f"works, but all-reduces are slower, because the native library is not compiled: {error}"
    return "works, with the compiled native library"


def _rank_launcher() -> str:
    from lightning.fabric.plugins.environments import (
        LSFEnvironment,
        MPIEnvironment,
        SLURMEnvironment,
        TorchElasticEnvironment,
    )

    from lightning_strategies_ext.horovod.launch_info import LaunchInfo

    if (launch := LaunchInfo.from_environment()) is not None:
        return f"started by {launch.launcher}"
    # In the order in which the Trainer checks them.
    for kind in (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, MPIEnvironment):
        try:
            is_detected = kind.detect()
        except Exception as error:  # for example, mpi4py without an MPI
            return f"unknown, because Lightning's {kind.__name__} fails: {error}"
        if is_detected:
            return f"started by {kind.__name__.removesuffix('Environment')}"
    return "started by the strategy, because there is no launcher"
