"""The files of failure reports, and the texts of exceptions in reports."""

import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_strategies_ext._system import flight_recorder
from lightning_strategies_ext.failure import failure_report
from tests.support.ranks import run_script

OTHER_USER = 65_500
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
FAILURE = failure_report.failure_from_traceback("ValueError: no", 0, "training step 3")


def test_a_rank_appends_to_its_file_in_a_directory_of_this_user(tmp_path: Path) -> None:
    path = failure_report.write_report(str(tmp_path), FAILURE, 0, "first")
    assert path is not None
    assert path == failure_report.write_report(str(tmp_path), FAILURE, 0, "second")
    assert path.read_text() == "first\nsecond\n"


def test_a_failure_in_one_line_ends_without_a_period() -> None:
    failure = failure_report.failure_from_traceback("TimeoutError: rank 1 has not arrived.", 0, "training step 3")
    assert failure_report.one_line_cause(failure) == "rank 0 failed: TimeoutError: rank 1 has not arrived"


def test_a_link_of_this_user_is_followed_to_a_directory_of_this_user(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "failures").symlink_to(tmp_path / "elsewhere")
    assert failure_report.write_report(str(tmp_path), FAILURE, 0, "text") is not None
    assert len(list((tmp_path / "elsewhere").glob("*/rank-0.txt"))) == 1


@needs_root
@pytest.mark.parametrize("is_link", [False, True])
def test_nothing_is_written_below_a_directory_or_link_of_another_user(tmp_path: Path, is_link: bool) -> None:
    (tmp_path / "precious").mkdir()
    place = tmp_path / "failures"
    if is_link:
        place.symlink_to(tmp_path / "precious")
    else:
        place.mkdir(mode=0o777)
    os.lchown(place, OTHER_USER, OTHER_USER)
    assert failure_report.write_report(str(tmp_path), FAILURE, 0, "text") is None
    assert not list((tmp_path / "precious").rglob("*.txt"))


def test_a_file_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    path = failure_report.write_report(str(tmp_path), FAILURE, 0, "text")
    assert path is not None
    path.unlink()
    (tmp_path / "precious").write_text("precious")
    path.symlink_to(tmp_path / "precious")
    assert failure_report.write_report(str(tmp_path), FAILURE, 0, "text") is None
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_pipe_in_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    path = failure_report.write_report(str(tmp_path), FAILURE, 0, "text")
    assert path is not None
    path.unlink()
    os.mkfifo(path)
    assert failure_report.write_report(str(tmp_path), FAILURE, 0, "text") is None


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no umask")
def test_directories_of_failures_are_not_writable_by_other_users(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        path = failure_report.write_report(str(tmp_path), FAILURE, 0, "text")
    finally:
        os.umask(umask)
    assert path is not None
    for directory in (path.parent, path.parent.parent):
        assert not directory.stat().st_mode & 0o022


def test_a_report_is_one_write_to_a_terminal_or_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []

    class Descriptor(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, content: Any) -> int:
            written.append(bytes(content))
            return len(content)

    stream = io.TextIOWrapper(io.BufferedWriter(Descriptor()), line_buffering=True)
    monkeypatch.setattr(sys, "stderr", stream)
    failure_report.print_line("a line\nand another")
    assert written == [b"lightning-strategies-ext: a line\nand another\n"]


SCRIPT = """
import sys
import threading

from tests.support.models import MLP, loader, make_trainer


class Blocking(RuntimeError):
    def __str__(self):
        threading.Event().wait()


class Raising(Exception):
    def __str__(self):
        raise KeyError("no text")


class Fails(MLP):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and self.global_rank == 1:
            raise globals()[sys.argv[2]]("why")
        return super().training_step(batch, batch_idx)


if __name__ == "__main__":
    make_trainer(sys.argv[1]).fit(Fails(), loader())
"""


#: Python's text of an exception whose own text raises.
_UNPRINTABLE = "<exception str() failed>" if sys.version_info >= (3, 11) else "<unprintable Raising object>"


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["ddp_ext", "ddp_spawn_ext"])
@pytest.mark.parametrize(
    ("exception", "headline"),
    [("Blocking", "Blocking: <its text took more than 1 s>"), ("Raising", f"Raising: {_UNPRINTABLE}")],
)
def test_all_ranks_exit_with_a_report_if_the_text_of_an_exception_blocks_or_raises(
    exception: str, headline: str, strategy: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = run_script(script, strategy, exception, cwd=tmp_path)
    assert result.returncode == 1, result.stdout
    assert "rank 1 on " in result.stdout
    assert headline in result.stdout


RECORDED = """
import os, sys
import torch
import torch.distributed as dist
from lightning_strategies_ext.failure import failure_report

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
store = dist.HashStore()
dist.init_process_group(sys.argv[2], store=store, rank=0, world_size=1)


def reduce_in_script():
    dist.all_reduce(torch.ones(3, 2))


reduce_in_script()
dist.barrier()
failure = failure_report.failure_from_traceback("ValueError: no", 0, "training step 3")
path = failure_report.write_report(sys.argv[1], failure, 0, "text")
print(path.read_text())
print("files:", *sorted(each.name for each in path.parent.iterdir()))
"""


@pytest.mark.processes
@pytest.mark.parametrize("size", ["0", "100"])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_the_file_lists_the_collectives_of_the_user_that_torch_has_recorded(
    tmp_path: Path, backend: str, size: str
) -> None:
    if backend == "shm" and flight_recorder.hook_class() is None:
        pytest.skip(f"torch {torch.__version__} does not record process groups with a Python class (2.15 does)")
    script = tmp_path / "script.py"
    script.write_text(RECORDED)
    printed = run_script(script, tmp_path, backend, env={"TORCH_FR_BUFFER_SIZE": size}).stdout
    if torch.__version__ < (2, 13) and "flight recorder" not in printed:
        pytest.skip(f"torch {torch.__version__} does not record collectives of gloo")
    assert ("from torch's flight recorder" in printed) == (size != "0"), printed
    assert (f"1: {backend}:all_reduce [3, 2], at {script}:13 in reduce_in_script" in printed) == (size != "0"), printed
    assert (f"2: {backend}:barrier, at" in printed) == (size != "0"), printed
    has_trace = backend == "shm" and size != "0"
    assert ("files: collectives-0 rank-0.txt" if has_trace else "files: rank-0.txt") in printed, printed
