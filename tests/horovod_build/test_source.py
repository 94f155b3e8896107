"""The sources of the build: pinned packages, and the source of Horovod with its patches."""

import hashlib
import os
import re
import tarfile
from pathlib import Path

import pytest

from lightning_strategies_ext.horovod_build.patches import UnknownSourceError, apply_patches, patches
from lightning_strategies_ext.horovod_build.requirements import find_toolchain
from lightning_strategies_ext.horovod_build.source import (
    BUILD_REQUIREMENTS,
    SourceError,
    fetch_build_packages,
    unpack_source,
    with_build_packages,
)
from lightning_strategies_ext.horovod_build.wheel import build_environment
from tests.horovod_build.test_install import make_wheel
from tests.support.ranks import run_script


def test_each_package_of_the_build_is_pinned_by_version_and_hash():
    names = [re.fullmatch(r"([a-z]+)==[\d.]+ --hash=sha256:[0-9a-f]{64}", line)[1] for line in BUILD_REQUIREMENTS]
    assert names == ["setuptools", "packaging"]


@pytest.mark.processes
def test_a_package_for_the_build_with_another_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for requirement in BUILD_REQUIREMENTS:
        make_wheel(tmp_path / "index", *requirement.partition(" ")[0].split("=="), "raise SystemExit('planted')")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "build").mkdir()
    with pytest.raises(SourceError, match=r"(?s)DO NOT MATCH THE HASHES.*Expected sha256.*Got"):
        fetch_build_packages(tmp_path / "build")
    assert not list(tmp_path.glob("build/*/*.py"))


@pytest.mark.processes
def test_the_build_imports_its_own_packages_first_and_then_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wheel = make_wheel(tmp_path / "index", "psutil", "1.0", "is_isolated = True")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "constraints.txt").write_text("psutil>=6")  # in the user's environment
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "constraints.txt"))
    fetch_build_packages(tmp_path, [f"psutil==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"])
    found, _ = find_toolchain(with_mpi=False, with_nccl=False)
    code = "import importlib.util as i, psutil; print(psutil.is_isolated, i.find_spec('torch') is not None)"
    environment = build_environment(found, tmp_path)
    assert run_script("-c", code, env=environment).stdout.strip() == "True True"
    assert with_build_packages({}, tmp_path)["PYTHONPATH"] == environment["PYTHONPATH"].partition(os.pathsep)[0]


def test_applying_the_patches_to_an_unknown_source_is_refused(tmp_path: Path):
    for fix in patches(17):
        file = tmp_path / fix.file
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text((file.read_text() if file.exists() else "") + fix.old + "\n")
    assert [fix.new in (tmp_path / fix.file).read_text() for fix in apply_patches(tmp_path, 17)] == [True] * 20
    with pytest.raises(UnknownSourceError, match=r"CMAKE_CXX_STANDARD 14.*occurs 0 times in CMakeLists.txt.*C\+\+20"):
        apply_patches(tmp_path, 20)
    with pytest.raises(UnknownSourceError, match=r"there is no file CMakeLists.txt"):
        apply_patches(tmp_path / "elsewhere", 17)


def test_a_source_that_is_not_the_released_one_is_not_unpacked(tmp_path: Path):
    archive = tmp_path / "horovod-0.28.1.tar.gz"
    with tarfile.open(archive, "w:gz") as content:
        content.add(__file__, arcname="../outside.py")
    with pytest.raises(SourceError, match="is not the released source: its SHA-256 is"):
        unpack_source(archive, tmp_path / "source")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    with pytest.raises(SourceError, match=r"'\.\./outside\.py', which is not a file below"):
        unpack_source(archive, tmp_path / "source", digest)
    assert not (tmp_path / "outside.py").exists()
