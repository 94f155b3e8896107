"""Python blocks of the documentation: each one runs as pasted, or is marked as a fragment with a reason.

A block runs as ``train.py`` in an empty directory, with the command ``python train.py``. HTML comments before a block,
which the rendered page does not show, change this:

    <!-- fragment: needs a GPU -->                                    the block is only parsed
    <!-- run: torchrun --standalone --nproc-per-node 2 train.py -->   the block runs with this command
    <!-- file: hosts.sh -->                                           the block is a file for the blocks of its page

:mod:`tests.test_readme` runs the block of the README.
"""

import ast
import importlib.util
import os
import re
import shlex
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.horovod_commands import BIN
from lightning_strategies_ext.horovod_build.installed import horovod_problem
from tests.support.examples import EXAMPLE_PACKAGES
from tests.support.ranks import LIMIT_S, REPOSITORY, run_command

DOCS = REPOSITORY / "docs"
COMMAND = "python train.py"
_COMMENT = r"^(?P<indent> *)(?:<!-- (?P<kind>fragment|run|file): (?P<value>.+?) -->\n\s*)?"
_BLOCK = re.compile(rf"{_COMMENT}```(?P<language>\w*)\n(?P<text>.*?)^ *```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"^ *<!-- (fragment|run|file)\b", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        name: Page, and number of the block among those of its language.
        page: Page.
        language: Language after the fence.
        kind: "fragment", "run", "file", or None for a block without a comment.
        value: Reason, command, or name of the file.
        text: Contents, without indentation.
    """

    name: str
    page: Path
    language: str
    kind: str | None
    value: str | None
    text: str


def blocks_of(page: Path) -> list[Block]:
    """Returns the blocks of a page in their order."""
    blocks: list[Block] = []
    for found in _BLOCK.finditer(page.read_text()):
        language = found["language"]
        number = sum(block.language == language for block in blocks) + 1
        name = f"{page.relative_to(DOCS).with_suffix('')}-{number}"
        text = textwrap.dedent(found["text"])
        blocks.append(Block(name, page, language, found["kind"], found["value"], text))
    return blocks


BLOCKS = [block for page in sorted(DOCS.rglob("*.md")) for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
RUN = [block for block in PYTHON if block.kind in (None, "run")]


def name_of(block: Block) -> str:
    return block.name


def missing_package(block: Block) -> str | None:
    """Returns the name of an optional package that a block requires and this environment does not have."""
    if re.search(r"\bray\b|ddp_ray|DDPRay", block.text) and importlib.util.find_spec("ray") is None:
        return "Ray"
    if "ray.train" in block.text and importlib.util.find_spec("pyarrow") is None:
        return "Ray Train"
    if re.search(r"horovod_(elastic_)?ext|Horovod", block.text) and horovod_problem() is not None:
        return "Horovod"
    return None


def test_there_are_blocks_that_run():
    assert len(RUN) > 20


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_each_comment_belongs_to_a_block(page: Path):
    assert len(_MARK.findall(page.read_text())) == sum(block.kind is not None for block in blocks_of(page))


@pytest.mark.parametrize("block", PYTHON, ids=name_of)
def test_each_block_is_run_or_is_a_fragment_that_parses(block: Block):
    ast.parse(block.text)
    if block.kind == "fragment":
        assert block.value is not None
        assert len(block.value.split()) >= 2, "a fragment needs a reason"
    else:
        assert block in RUN
        assert block.kind is None or "train.py" in shlex.split(block.value or "")


@pytest.mark.processes
@pytest.mark.parametrize("block", RUN, ids=name_of)
def test_each_block_runs_as_pasted(block: Block, tmp_path: Path):
    if (package := missing_package(block)) is not None:
        pytest.skip(f"{package} is not installed")
    (tmp_path / "train.py").write_text(block.text)
    for file in (each for each in blocks_of(block.page) if each.kind == "file"):
        path = tmp_path / str(file.value)
        path.write_text(file.text)
        path.chmod(0o755)
    program, *words = shlex.split(block.value or COMMAND)
    programs = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    environment = {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{EXAMPLE_PACKAGES}",
    }
    done = run_command(*programs.get(program, [program]), *words, env=environment, cwd=tmp_path, timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stdout
