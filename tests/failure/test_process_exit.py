"""A terminated process does not free objects at its exit, and does not lose data that was written to files."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.ranks import run_script

pytestmark = pytest.mark.processes

SCRIPT = """
import sys
from lightning_strategies_ext.failure import process_exit


class Holder:
    def __init__(self, path):
        self.me, self.file, self.other = self, open(path, "w"), open(path + ".bytes", "wb")

    def __del__(self):
        print("freed")


Holder.last = Holder(sys.argv[1])
Holder.last.file.write("the last words")
Holder.last.other.write(b"and bytes")
if sys.argv[2] == "quick":
    process_exit.skip_freeing_at_exit()
"""


@pytest.mark.parametrize("how", ["usual", "quick"])
def test_files_that_are_still_open_are_flushed(tmp_path: Path, how: str) -> None:
    script, path = tmp_path / "script.py", tmp_path / "words"
    script.write_text(SCRIPT)
    done = run_script(script, path, how)
    assert done.returncode == 0, done.stdout
    assert path.read_text() == "the last words"
    assert Path(f"{path}.bytes").read_bytes() == b"and bytes"
    assert ("freed" in done.stdout) is (how == "usual")


FULL_PIPE = """
import os
from lightning_strategies_ext.failure import process_exit

reader, writer = os.pipe()
file = os.fdopen(writer, "wb", buffering=1 << 20)
file.write(bytes((1 << 20) - 1))  # more than the capacity of the pipe, which no process reads
process_exit.exit_within(0.5)
"""


def test_a_file_that_accepts_no_data_does_not_delay_the_exit(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FULL_PIPE)
    assert run_script(script).returncode == 1


WITH_TRITON = """
import triton
from lightning_strategies_ext.failure import process_exit

process_exit.skip_freeing_at_exit()
print("the last words")
"""


def test_triton_reports_no_objects_that_are_not_freed(tmp_path: Path) -> None:
    if find_spec("triton") is None:
        pytest.skip("this build of torch has no Triton")
    script = tmp_path / "script.py"
    script.write_text(WITH_TRITON)
    done = run_script(script)
    assert done.returncode == 0, done.stdout
    assert done.stdout == "the last words\n"
