"""The README: its length, and the correctness of each command, script, output, and figure."""

import re
import shlex
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

import lightning_strategies_ext
from tests.support.examples import EXAMPLE_ENVIRONMENT
from tests.support.ranks import LIMIT_S, REPOSITORY, run_command, run_script
from tests.support.virtual_environments import PACKAGE, Environment, copy_checkout, make_environment

TEXT = (REPOSITORY / "README.md").read_text()
MAX_LINES, MAX_WIDTH, MAX_WORDS_IN_CELL = 130, 120, 20
HEADINGS = [
    "# lightning-strategies-ext",
    "## Reasons to use it",
    "## Reasons not to use it",
    "## Installation",
    "## Example",
    "## Choice of a strategy",
    "## Differences from `ddp`",
    "## Commands",
    "## Documentation",
]
#: Placeholders of the README: the address of the repository, and the user's directory.
ADDRESS, DIRECTORY = "ADDRESS", "/home/me"
INSTALL_CLONE, INSTALL_URL = "pip install .", f"pip install git+{ADDRESS}"
DOCTOR, UNINSTALL = "python -m lightning_strategies_ext", "pip uninstall lightning-strategies-ext"
TRAIN, DEMO, TEST = "python train.py", "make demo", "make test"
#: The commands that the tests below run. A command that is added to the README needs a test.
COMMANDS = {INSTALL_CLONE, INSTALL_URL, DOCTOR, TRAIN, UNINSTALL, DEMO, TEST}


def blocks(language: str) -> list[str]:
    """Returns the fenced blocks of one language, without their indentation."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", TEXT, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(text) for _, text in found]


def prose() -> str:
    """Returns the README without its fenced blocks."""
    return re.sub(r"^( *)```.*?^\1```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)


def section(heading: str) -> str:
    """Returns the text between a heading and the next one, without fenced blocks."""
    return prose().split(f"{heading}\n")[1].split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """Returns the cells of each row of the Markdown tables in a text, without the rulers below the headers."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in table if set("".join(row)) != {"-"}]


def column(page: str, heading: str, names: tuple[str, ...]) -> list[list[str]]:
    """Returns columns of the first table below a heading of a page in ``docs/``, one list per row."""
    text = (REPOSITORY / "docs" / page).read_text().split(f"\n{heading}\n")[1]
    header, *body = rows(text[text.index("\n|") + 1 :].split("\n\n")[0])
    indices = [header.index(name) for name in names]
    return [[row[index] for index in indices] for row in body]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provides a Git repository with the files of this checkout that an installation needs."""
    directory = tmp_path_factory.mktemp("git") / "clone"
    copy_checkout(directory)
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false")
    for command in (("init", "--quiet"), ("add", "."), (*identity, "commit", "--quiet", "--message", "Test")):
        subprocess.run(["git", *command], cwd=directory, check=True, timeout=60)
    return directory


def test_length_width_and_headings():
    lines = TEXT.splitlines()
    assert len(lines) <= MAX_LINES
    is_exempt = re.compile(r"\||.*://")
    assert [line for line in lines if len(line) > MAX_WIDTH and not is_exempt.match(line)] == []
    assert re.findall(r"^#+ .*$", prose(), re.MULTILINE) == HEADINGS


def test_no_table_cell_is_long():
    cells = [re.sub(r"\]\([^)]*\)", "", cell) for row in rows(TEXT) for cell in row]
    assert cells
    assert [cell for cell in cells if len(cell.split()) > MAX_WORDS_IN_CELL] == []


def test_each_part_has_its_required_length():
    introduction = prose().split("\n\n")[1]
    assert introduction.count(". ") == 0
    assert introduction.endswith(".")
    status = re.findall(r"^> .*$", TEXT, re.MULTILINE)
    assert TEXT.index("```diff") < TEXT.index(status[0]) < TEXT.index(HEADINGS[1])
    assert len(re.findall(r"^- ", section("## Reasons to use it"), re.MULTILINE)) == 4
    assert len(rows(section("## Choice of a strategy"))) == 1 + 6
    assert len(re.findall(r"^- ", section("## Differences from `ddp`"), re.MULTILINE)) == 5
    report, output = blocks("text")
    assert [len(text.splitlines()) for text in (report, output, *blocks("python"))] == [6, 1, 25]


def test_each_command_is_run_by_a_test():
    written = [line.partition("  #")[0].rstrip() for block in blocks("bash") for line in block.splitlines()]
    inline = re.findall(r"`((?:pip|python|make|torchrun|git) [^`]+)`", prose())
    assert {*written, *inline} == COMMANDS


def test_each_strategy_in_it_is_registered():
    names = {name for name in re.findall(r"`(\w+)`", prose()) if name.endswith("_ext") or name in ("dp", "horovod")}
    assert {"ddp_ext", "dp", "horovod"} < names
    assert names <= set(StrategyRegistry.available_strategies())


def test_both_lines_of_the_difference_construct_a_trainer_with_that_strategy():
    (difference,) = blocks("diff")
    strategies = {}
    for line in difference.splitlines():
        names = {"Trainer": pl.Trainer}
        exec(line[2:], names)
        strategies[line[0]] = type(names["trainer"].strategy)
    assert strategies == {"-": DDPStrategy, "+": lightning_strategies_ext.DDPStrategy}


def test_figures_are_those_of_the_documentation():
    text = " ".join(prose().split())
    cases = column("fault_injection.md", "## Results", ("`ddp_ext`", "Lightning's `ddp`"))
    passed, all_cases, stock_passed, all_stock_cases = (
        sum(int(row[index].split(" of ")[part]) for row in cases if row[0])
        for index, part in ((0, 0), (0, 1), (1, 0), (1, 1))
    )
    assert passed == all_cases == all_stock_cases
    link = f"[{all_cases} tests with injected faults](docs/fault_injection.md)"
    assert f"`ddp_ext` passed {passed} of {link}, and `ddp` {stock_passed}." in text

    (ratios,) = zip(*column("benchmarks.md", "## Steps", ("`ddp` / `ddp_ext`",)), strict=True)
    numbers = [float(re.findall(r"[\d.]+", ratio)[0]) for ratio in ratios]
    assert f"{min(numbers):.1f} to {max(numbers):.1f} times as fast" in text

    names = ("", "`ddp_spawn`", "`ddp_spawn_ext`")
    workers = {name: seconds for name, *seconds in column("benchmarks.md", "## Workers", names)}
    stock, ext = workers["from `test()` to the first batch, after that"]
    assert f"`test` starts in {float(ext)} s, and in {float(stock):.1f} s with Lightning's `ddp_spawn`" in text

    lost_ranks = (REPOSITORY / "docs" / "benchmarks.md").read_text().split("\n## Lost ranks\n")[1].split("\n## ")[0]
    # Each size has a table of the recovery and one of steps and commits.
    (small, _, large, _) = (row for row in rows(lost_ranks) if row[0] == "`ddp_spawn_elastic_ext`")
    small_s, large_s = (float(row[1].split()[0]) for row in (small, large))
    assert f"{small_s} s with 1 M parameters, and after {large_s:.0f} s with 100 M" in text


def test_the_summary_of_the_benchmarks_has_the_figures_of_its_tables():
    page = (REPOSITORY / "docs" / "benchmarks.md").read_text()
    summary, *sections = page.split("\n## ")
    tables = {section.partition("\n")[0]: rows(section) for section in sections}

    def figures(section: str, row: str, *columns: int) -> list[float]:
        cells = next(cells for cells in tables[section] if cells[0] == row)
        return [float(cells[column].split()[0]) for column in columns]

    (cells,) = zip(*column("benchmarks.md", "## Steps", ("`ddp` / `ddp_ext`",)), strict=True)
    ratios = [float(re.findall(r"[\d.]+", cell)[0]) for cell in cells]
    gloo_us, shm_us = figures("Collectives", "4 MB", 1, 2)
    spawn_s, ext_s = figures("Workers", "from `test()` to the first batch, after that", 1, 2)
    weights_s, ext_weights_s = figures("Workers", "return of 400 MB of weights", 1, 2)
    (files_s,), (elastic_s,) = (figures("Lost ranks", row, 1) for row in ("`ddp`, files", "`ddp_spawn_elastic_ext`"))
    (ddp_ms,), (powersgd_ms,) = (
        figures("Several hosts", row, 1) for row in ("Lightning's `ddp`", "`ddp_ext_powersgd`")
    )
    assert [row[1:] for row in rows(summary)[1:]] == [
        ["`ddp`", f"`ddp_ext`: {min(ratios):.1f} to {max(ratios):.1f} times as fast"],
        [f"gloo: {gloo_us / 1000:.1f} ms", f"`shm`: {shm_us / 1000:.1f} ms"],
        [f"`ddp_spawn`: {spawn_s} s", f"`ddp_spawn_ext`: {ext_s} s"],
        [f"`ddp_spawn`: {weights_s} s", f"`ddp_spawn_ext`: {ext_weights_s} s"],
        [f"`ddp` with checkpoints, under torchrun: {files_s} s", f"`ddp_spawn_elastic_ext`: {elastic_s} s"],
        [f"`ddp`: {ddp_ms:.0f} ms", f"`ddp_ext_powersgd`: {powersgd_ms:.0f} ms"],
    ]


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize("command", [INSTALL_CLONE, INSTALL_URL])
def test_the_package_can_be_installed_inspected_and_removed(command: str, clone: Path, tmp_path: Path):
    """The environment has all dependencies and build requirements, so the test does not need a network."""
    environment, _ = make_environment(None, tmp_path, without=[f"*{PACKAGE}*"])

    def run(line: str, *options: str, directory: Path = environment.work_dir) -> "subprocess.CompletedProcess[str]":
        program, *words = shlex.split(line)
        module = ["-m", "pip"] if program == "pip" else []
        return Environment(environment.python, directory).run(*module, *words, *options, timeout_s=LIMIT_S)

    directory = clone if command == INSTALL_CLONE else environment.work_dir
    local_command = command.replace(ADDRESS, clone.as_uri())
    installed = run(local_command, "--no-deps", "--no-build-isolation", directory=directory)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    doctor = run(DOCTOR)
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert re.search(r"ddp_ext.*yes", doctor.stdout)
    removed = run(UNINSTALL, "--yes")
    assert removed.returncode == 0, removed.stdout + removed.stderr
    assert "No module named lightning_strategies_ext" in run(DOCTOR).stderr


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["ddp_ext", "ddp"])
def test_the_script_prints_what_is_written_with_both_strategies(
    strategy: str, wheel_install: Environment, tmp_path: Path
):
    (script,) = blocks("python")
    _, output = blocks("text")
    assert script.count('"ddp_ext"') == 1
    name = TRAIN.split()[1]
    (tmp_path / name).write_text(script.replace('"ddp_ext"', f'"{strategy}"'))
    done = Environment(wheel_install.python, tmp_path).run(name, timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    # torch 2.8 prints a message on each rank, and the messages of two ranks may be mixed.
    gloo = r"\[Gloo\] Rank \d+ ?| ?is connected to \d+ peer ranks\. Expected number of connected peer ranks is : \d+\n"
    assert re.sub(gloo, "", done.stdout) == output
    assert [path.name for path in tmp_path.iterdir()] == [name]


def run_wrong_label(directory: Path, *options: str) -> str:
    """Runs the example in a new directory, and returns its standard error."""
    script = shutil.copy(REPOSITORY / "examples" / "wrong_label.py", directory)
    done = Environment(Path(sys.executable), directory).run(script, *options, timeout_s=LIMIT_S)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr


@pytest.mark.processes
def test_the_failure_report_is_what_the_example_prints(tmp_path: Path):
    report, _ = blocks("text")
    written = re.sub(r"\d{8}-\d{6}-\d+", "RUN", report.replace(DIRECTORY, str(tmp_path))).splitlines()
    written[0] = written[0].replace("node7", socket.gethostname())
    errors = run_wrong_label(tmp_path)
    printed = re.sub(r"\d{8}-\d{6}-\d+", "RUN", errors).splitlines()
    assert [line for line in printed[-8:] if set(line) != {"-"}] == written, errors
    assert len(list(tmp_path.glob("failures/*/rank-?.txt"))) == 2


@pytest.mark.processes
def test_stock_ddp_prints_what_the_readme_describes(tmp_path: Path):
    errors = run_wrong_label(tmp_path, "--strategy", "ddp").splitlines()
    assert len([line for line in errors if line.startswith("[rank")]) > 100
    # The kernel reports one of the two, depending on unread data of rank 1.
    assert [line for line in errors if re.search("Connection (closed|reset) by peer", line)]


@pytest.mark.processes
def test_make_demo_runs_a_program_that_trains(tmp_path: Path):
    planned = run_command("make", "--directory", REPOSITORY, "--no-print-directory", "--dry-run", DEMO.split()[1])
    assert planned.returncode == 0, planned.stdout
    python, script, *options = shlex.split(planned.stdout.splitlines()[-1])
    assert python == ".venv/bin/python"
    done = run_script(
        *(REPOSITORY / script, *options, "--epochs", "2"),
        env=EXAMPLE_ENVIRONMENT,
        cwd=tmp_path,
        timeout_s=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"processes\W+2\W", done.stdout)


@pytest.mark.processes
def test_make_test_runs_what_the_readme_describes():
    """The test only reads the plan of the command, because the command runs this test."""
    planned = run_command("make", "--directory", REPOSITORY, "--dry-run", TEST.split()[1])
    assert planned.returncode == 0, planned.stdout
    assert [program for program in ("ruff check", "mypy", "pytest") if f"/{program}" not in planned.stdout] == []
