"""The documentation: all links have targets, in the repository and on the site, and all named tests exist.

The build of the site fails on links and references without a target.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_strategies_ext
from lightning_strategies_ext import fabric
from tests.support.ranks import REPOSITORY

DOCS = REPOSITORY / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
WRITTEN = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "tests/README.md")),
    *sorted((REPOSITORY / "examples").rglob("*.md")),
    *PAGES,
]
#: Files that the programs of ``docs/`` write and read.
RECORDS = sorted(path for path in DOCS.rglob("*") if path.suffix in (".json", ".py", ".txt"))
MAX_NAME_LENGTH = 80
_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_TEST = re.compile(r"\btests(?:/[\w/]+\.py|(?:\.\w+)*\.test_\w+)(?:::\w+)?")


def named(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def entries(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for target in entry.values():
                yield from [target] if isinstance(target, str) else entries(target)


def pages_from_outside() -> dict[str, str]:
    """Returns the pages that ``docs/site_hooks.py`` adds to the site, without an import of MkDocs."""
    for node in ast.parse((DOCS / "site_hooks.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "PAGES":
            return ast.literal_eval(node.value)
    raise AssertionError("docs/site_hooks.py has no PAGES")


NAV = list(entries(yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"]))


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as git hosts create them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found.add(re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", WRITTEN, ids=named)
def test_every_link_leads_to_a_file_and_to_a_heading_in_it(page):
    missing = []
    for link in _LINK.findall(re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text()))):
        path, _, anchor = link.partition("#")
        if ":" in path:
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(link)
    assert not missing


@cache
def names_of_tests(file: Path) -> frozenset[str]:
    """Returns the names of the test functions that a module defines or imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found.update(alias.asname or alias.name for alias in node.names)
    return frozenset(name for name in found if name.startswith("test_"))


def exists(name: str) -> bool:
    """Returns whether a module or test exists: ``tests/a/test_b.py::test_c`` or ``tests.a.test_b::test_c``."""
    module, _, function = name.partition("::")
    file = (REPOSITORY / module.removesuffix(".py").replace(".", "/")).with_suffix(".py")
    return file.is_file() and (not function or function in names_of_tests(file))


@pytest.mark.parametrize("page", [*WRITTEN, *RECORDS], ids=named)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    assert sorted(name for name in set(_TEST.findall(page.read_text())) if not exists(name)) == []


@pytest.mark.parametrize(
    ("name", "is_existing"),
    [
        ("tests/test_docs.py", True),
        ("tests.test_docs::test_the_site_has_every_page_once", True),
        ("tests/test_docs.py::test_the_site_has_every_page_once", True),
        ("tests/test_docs.py::test_the_site", False),
        ("tests/test_no_docs.py", False),
        ("tests.test_no_docs::test_the_site_has_every_page_once", False),
    ],
)
def test_ids_of_removed_and_renamed_tests_are_found(name: str, is_existing: bool) -> None:
    assert _TEST.findall(f"`{name}[a-1]`") == [name]
    assert exists(name) is is_existing


def test_names_of_tests_have_at_most_80_characters() -> None:
    files = (REPOSITORY / "tests").rglob("*.py")
    assert sorted(name for file in files for name in names_of_tests(file) if len(name) > MAX_NAME_LENGTH) == []


def test_the_site_has_every_page_once():
    outside = pages_from_outside()
    assert sorted(NAV) == sorted({*(str(page.relative_to(DOCS)) for page in PAGES), *outside.values()})
    assert [source for source in outside if not (REPOSITORY / source).exists()] == []


def test_the_first_page_leads_to_every_other_in_the_same_order():
    """Pages of the reference are excluded: the first page of the reference links to them."""
    shown = {page: source for source, page in pages_from_outside().items()}
    text = (DOCS / "README.md").read_text()
    pages = [page for page in NAV if page != "README.md" and not re.match("reference/(?!README)", page)]
    links = {page: f"](../{shown[page]})" if page in shown else f"]({page})" for page in pages}
    assert [page for page, link in links.items() if link not in text] == []
    chapters = [page for page in pages if text.count(links[page]) == 1]
    first = ["install.md", "choose.md", "examples.md", "from_lightning_1.md", "benchmarks.md", "failures.md"]
    assert sorted(first, key=lambda page: text.index(links[page])) == first == [p for p in chapters if p in first]


def test_the_reference_has_every_public_name():
    text = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    listed = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    for module in (lightning_strategies_ext, fabric):
        assert {f"{module.__name__}.{name}" for name in module._EXPORTS} <= listed


def test_every_plot_of_the_benchmarks_is_shown():
    text = (DOCS / "benchmarks.md").read_text()
    plots = (REPOSITORY / "benchmarks" / "results").glob("*.png")
    assert [plot.name for plot in plots if f"](../benchmarks/results/{plot.name})" not in text] == []


def test_failures_that_are_described_can_be_made():
    cases = set(re.findall(r'^ {8}"([\w-]+)": \w+,$', (DOCS / "failure_demo.py").read_text(), re.MULTILINE))
    described = {case for page in PAGES for case in re.findall(r"docs/failure_demo\.py ([\w-]+)", page.read_text())}
    assert described - {"--help"} <= cases


#: Names that are passed to ``os.environ``, or to a similar mapping, and names in constants.
_READ_OR_SET = re.compile(r"""\b(?:environ|environment)(?:\.(?:get|pop|setdefault)\(|\[)["']([A-Z]\w*)["']""")
_CONSTANT = re.compile(r"""["']((?:LIGHTNING_STRATEGIES_EXT|HOROVOD|TORCHELASTIC|RAY)_[A-Z_]+[A-Z])["']""")


def environment_variables_of_the_package() -> set[str]:
    """Returns the environment variables that the package reads or sets under literal names."""
    modules = (REPOSITORY / "lightning_strategies_ext").rglob("*.py")
    texts = [module.read_text() for module in modules if "pytorch_lightning" not in module.parts]
    return {name for text in texts for pattern in (_READ_OR_SET, _CONSTANT) for name in pattern.findall(text)}


def test_each_environment_variable_of_the_package_is_documented() -> None:
    names = environment_variables_of_the_package()
    assert {"LIGHTNING_STRATEGIES_EXT_CACHE_DIR", "CC", "RAY_ADDRESS"} < names
    text = (DOCS / "environment_variables.md").read_text()
    assert sorted(name for name in names if f"`{name}`" not in text) == []


@pytest.mark.processes
def test_the_site_is_built_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").exists()
