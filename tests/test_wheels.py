"""Releases: the installation of a wheel needs no checkout and no compiler."""

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from hatch_build import ARCH_VARIABLE, REPOSITORY_URL_VARIABLE, Metadata
from tests.support import virtual_environments
from tests.support.ranks import REPOSITORY

MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
LIBRARY = "lightning_strategies_ext/shm/all_reduce.so"
STRESS = Path(__file__).parent / "shm" / "all_reduce_stress.c"


def run(*command: str | Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provides the unpacked source distribution."""
    directory = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", directory, REPOSITORY)
    (archive,) = directory.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(directory)
    return directory / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheels(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Provides the wheel for each architecture, built from the source distribution."""
    made = {}
    for machine in MACHINES:
        directory = tmp_path_factory.mktemp(machine)
        made[machine] = virtual_environments.build_wheel(directory, sdist, {ARCH_VARIABLE: machine})
    return made


@pytest.mark.processes
@pytest.mark.parametrize("machine", MACHINES)
def test_the_library_is_for_that_machine_and_for_old_systems(wheels: dict[str, Path], machine: str, tmp_path: Path):
    wheel = wheels[machine]
    assert wheel.name.endswith(f"-py3-none-manylinux_2_17_{machine}.whl")
    with zipfile.ZipFile(wheel) as archive:
        library = Path(archive.extract(LIBRARY, tmp_path))
    with library.open("rb") as file:
        elf = ELFFile(file)
        functions = {symbol.name for symbol in elf.get_section_by_name(".dynsym").iter_symbols()}
        assert elf["e_machine"] == MACHINES[machine]
    assert {"all_reduce_open", "all_reduce_begin", "all_reduce_advance"} <= functions
    output = run(Path(sys.executable).with_name("auditwheel"), "show", wheel)
    assert f'"manylinux_2_17_{machine}"' in " ".join(output.split()).partition("platform tag:")[2][:40]


@pytest.mark.processes
@pytest.mark.parametrize("machine", MACHINES)
def test_the_wheel_of_the_source_is_that_of_the_checkout(wheels: dict[str, Path], machine: str, tmp_path: Path):
    with (
        zipfile.ZipFile(wheels[machine]) as archive,
        zipfile.ZipFile(virtual_environments.build_wheel(tmp_path)) as other,
    ):
        changing = {name for name in archive.namelist() if name.endswith((".dist-info/WHEEL", ".dist-info/RECORD"))}
        contents = {name: archive.read(name) for name in archive.namelist() if name not in {*changing, LIBRARY}}
        assert contents == {name: other.read(name) for name in other.namelist() if name not in changing}


@pytest.mark.processes
def test_the_released_archives_can_be_uploaded(wheels: dict[str, Path], sdist: Path):
    output = run(sys.executable, "-m", "twine", "check", "--strict", *wheels.values(), f"{sdist}.tar.gz")
    assert output.count("PASSED") == 3


def metadata_of(sdist: Path) -> str:
    with tarfile.open(sdist) as archive:
        (member,) = (name for name in archive.getnames() if name.count("/") == 1 and name.endswith("/PKG-INFO"))
        file = archive.extractfile(member)
        assert file is not None
        return file.read().decode()


@pytest.mark.processes
def test_links_of_the_readme_lead_to_the_repository_if_it_is_known(sdist: Path, tmp_path: Path):
    address = "https://example.org/team/project"
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, REPOSITORY]
    run(*command, env={REPOSITORY_URL_VARIABLE: f"{address}/"})
    (made,) = tmp_path.glob("*.tar.gz")
    known, unknown = metadata_of(made), metadata_of(Path(f"{sdist}.tar.gz"))
    assert "Project-URL" not in unknown
    assert "](docs/ddp.md)" in unknown
    assert f"Project-URL: Changelog, {address}/blob/HEAD/CHANGELOG.md\n" in known
    assert f"]({address}/blob/HEAD/docs/ddp.md)" in known
    targets = re.findall(r"\]\(([^)]+)\)", known)
    assert [target for target in targets if not target.startswith("https://")] == []
    assert len(targets) == len(re.findall(r"\]\(([^)]+)\)", unknown))


def test_links_and_pictures_of_the_package_readme_have_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(REPOSITORY_URL_VARIABLE, "https://example.org/project/")
    (tmp_path / "README.md").write_text("[a](docs/a.md#b) ![c](d/e.png) [f](#g) [h](https://example.org)\n")
    metadata: dict[str, dict[str, str]] = {}
    Metadata(str(tmp_path), {}).update(metadata)
    assert metadata["readme"]["text"] == (
        "[a](https://example.org/project/blob/HEAD/docs/a.md#b) ![c](https://example.org/project/raw/HEAD/d/e.png)"
        " [f](#g) [h](https://example.org)\n"
    )


@pytest.mark.processes
def test_a_machine_that_has_no_wheel_is_refused(tmp_path: Path):
    with pytest.raises(AssertionError, match=r"WHEEL_ARCH='riscv64': wheels are built for x86_64 and aarch64"):
        virtual_environments.build_wheel(tmp_path, env={ARCH_VARIABLE: "riscv64"})


SUMS = """
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing


def reduce(rank, world_size, address):
    dist.init_process_group("shm", init_method=address, rank=rank, world_size=world_size)
    for number in range(200):
        dtype = [torch.float32, torch.float64, torch.int32, torch.int64][number % 4]
        parts = []
        for other in range(world_size):
            draws = torch.Generator().manual_seed(1000 * number + other)
            parts.append((torch.randn(1 + 37 * number, generator=draws, dtype=torch.float64) * 1000).to(dtype))
        own = parts[rank].clone()
        dist.all_reduce(own)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part  # in the order of the ranks
        assert torch.equal(own, total), (number, dtype)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.start_processes(reduce, (3, sys.argv[1]), 3, start_method="fork")
"""


@pytest.mark.processes
@pytest.mark.skipif(platform.machine() not in MACHINES, reason=f"no wheel is built for {platform.machine()}")
def test_without_a_compiler_the_native_library_of_the_wheel_is_used(wheels: dict[str, Path], tmp_path: Path):
    environment, site = virtual_environments.make_environment(wheels[platform.machine()], tmp_path)
    script = tmp_path / "sums.py"
    script.write_text(SUMS)
    cache = tmp_path / "cache"
    where = {"CC": "no-such-compiler", "LIGHTNING_STRATEGIES_EXT_CACHE_DIR": str(cache)}
    done = environment.run(script, f"file://{tmp_path}/meeting", env=where)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # rank 0 logs that no library was compiled
    assert not cache.exists()

    (site / LIBRARY).write_text("a library that this system cannot load")
    done = environment.run(script, f"file://{tmp_path}/another", env=where)
    assert done.returncode == 0, done.stderr
    assert "runs in Python, which is slower: there is no C compiler" in done.stderr


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provides the stress test as a static program for aarch64."""
    directory = tmp_path_factory.mktemp("stress")
    program = directory / "stress"
    source = REPOSITORY / "lightning_strategies_ext" / "shm"
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl", "-static", "-O3", "-std=gnu11"]
    caches = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(directory / "cache"))
    run(*compiler, f"-I{source}", "-o", program, STRESS, env=caches)
    return program


@pytest.mark.skipif(shutil.which("qemu-aarch64") is None, reason="qemu-aarch64 is not installed (Debian: qemu-user)")
@pytest.mark.parametrize("sleeps", [0, 1])
def test_the_source_passes_its_stress_on_aarch64(stress: Path, sleeps: int):
    assert run("qemu-aarch64", stress, "2", "100", str(sleeps)) == "all sums are right\n"
