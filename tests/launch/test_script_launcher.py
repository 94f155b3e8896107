"""The command that starts ranks of a script; processes that a rank starts are not ranks."""

import ast
import json
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.horovod_commands import BIN, start_of
from lightning_strategies_ext import rank_variables
from tests.support.models import MLP, loader, make_trainer
from tests.support.ranks import WITHOUT_MPI, run_command

TRAINER = """
import os, subprocess, sys
from tests.support.models import MLP, loader, make_trainer

def train(strategy):
    trainer = make_trainer(strategy, max_epochs=1, limit_train_batches=1)
    trainer.fit(MLP(), loader(shuffle=True))
    return trainer
"""
STARTS_SCRIPT = f"""{TRAINER}
strategy, is_inner = sys.argv[1], len(sys.argv) > 2
trainer = train(strategy)
print(f"{{'inner' if is_inner else 'outer'}} rank {{trainer.global_rank}} of {{trainer.world_size}}", flush=True)
if not is_inner and trainer.is_global_zero:
    subprocess.run([sys.executable, __file__, strategy, "inner"], check=True)
"""
#: Variables of the ranks of each launcher, and the variables that differ in another launch by the same launcher.
LAUNCHED: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "python": ({"LOCAL_RANK": "0", "MASTER_PORT": "1", "WORLD_SIZE": "2"}, {"MASTER_PORT": "2"}),
    "torchrun": (
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none"},
        {"MASTER_PORT": "2"},
    ),
    "srun": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}, {"SLURM_STEP_ID": "1"}),
    "horovodrun": (
        {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1"},
        {"HOROVOD_GLOO_RENDEZVOUS_PORT": "2"},
    ),
    "mpirun": ({"OMPI_COMM_WORLD_RANK": "0", "PMIX_NAMESPACE": "a"}, {"PMIX_NAMESPACE": "b"}),
}


def set_other_owner(setenv: Callable[[str, str], None]) -> None:
    owner, identity = json.loads(os.environ[rank_variables.OWNER])
    setenv(rank_variables.OWNER, json.dumps([owner + 1, identity]))


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_only_a_child_of_a_rank_drops_the_variables_of_the_rank(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of_rank, of_other_launch = LAUNCHED[launcher]
    for name in [name for name in os.environ if rank_variables.RANK_VARIABLES.fullmatch(name)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(rank_variables.OWNER, "")
    for name, value in {"MASTER_PORT": "1", **of_rank, "SLURM_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    store = rank_variables.store_variable("of-the-rank", "1")
    monkeypatch.setenv(rank_variables.STORE, store)
    rank_variables.record_owner()
    assert not rank_variables.drop_inherited()  # the process is a rank
    assert rank_variables.store_name() == "of-the-rank"
    set_other_owner(monkeypatch.setenv)
    with monkeypatch.context() as other_launch:
        for name, value in of_other_launch.items():
            other_launch.setenv(name, value)
        other_launch.setenv(rank_variables.OWNER, os.environ[rank_variables.OWNER])
        assert not rank_variables.drop_inherited()
        assert of_rank.keys() <= os.environ.keys()
        assert rank_variables.store_name() is None
    assert rank_variables.drop_inherited()
    assert not (of_rank.keys() - {"SLURM_STEP_ID"}) & os.environ.keys()
    assert os.environ["SLURM_JOB_ID"] == "7"  # set in the job, and inherited by child processes


@pytest.mark.parametrize(("strategy", "error"), [("ddp_ext", RuntimeError), ("ddp_spawn_ext", ValueError)])
def test_if_a_child_cannot_be_recognized_the_error_names_the_variables(
    strategy: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as of_rank:
        of_rank.bind(("127.0.0.1", 0))
        of_rank.listen()
        port = str(of_rank.getsockname()[1])
        for name, value in {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv(rank_variables.OWNER, "")
        monkeypatch.delenv(rank_variables.OWNER)
        with pytest.raises(error, match=f"variables LOCAL_RANK=0, MASTER_ADDR=127.0.0.1, MASTER_PORT={port}.*remove"):
            make_trainer(strategy).fit(MLP(), loader())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("strategy", "launcher"),
    [("ddp_ext", "python"), ("horovod_ext", "python"), ("ddp_ext", "torchrun"), ("horovod_ext", "mpirun")],
)
def test_a_script_that_a_rank_starts_trains_with_ranks_of_its_own(strategy: str, launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STARTS_SCRIPT)
    start = ["torchrun", "--standalone", "--nproc_per_node=2"] if launcher == "torchrun" else None
    command = [*start_of(launcher, 2, str(tmp_path)), sys.executable] if start is None else start
    environment = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **({} if launcher == "mpirun" else WITHOUT_MPI)}
    result = run_command(*command, script, strategy, env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    for rank in range(2):
        for script_name in ("outer", "inner"):
            assert f"{script_name} rank {rank} of 2" in result.stdout


SHOW = "from lightning_strategies_ext.launch.script_launcher import find_command; print(*find_command(), sep='|')"
SCRIPT = f"""
import os, runpy, sys
import lightning_strategies_ext  # as torch does
if len(sys.argv) > 1 and sys.argv[1] == "set":
    exec(sys.argv[2])
if __name__ == "__main__":
    {SHOW}
"""


def command_shown(tmp_path: Path, *arguments: str) -> list[str]:
    """Returns the command that a process with these arguments finds, without the interpreter, and its directory."""
    (tmp_path / "elsewhere").mkdir(exist_ok=True)
    package = tmp_path / "package"
    package.mkdir(exist_ok=True)
    for path in (tmp_path / "train.py", package / "__main__.py", package / "part.py", tmp_path / "other.py"):
        path.write_text(SCRIPT)
    result = run_command(sys.executable, *arguments, cwd=tmp_path, env={"PYTHONDONTWRITEBYTECODE": ""})
    assert result.returncode == 0, result.stdout
    command, _, directory = result.stdout.strip().rpartition("|")
    found: list[str] = ast.literal_eval(command)
    assert found[0] == sys.executable
    if "-c" in found and (module := re.search(r"runpy.run_module\('([\w.]+)'", found[found.index("-c") + 1])):
        # A module is searched on the path of the process that starts the rank.
        assert str(tmp_path) in found[found.index("-c") + 1]
        found[found.index("-c") : found.index("-c") + 2] = ["-m", module.group(1)]
        found = [argument for argument in found if argument != "-P"]
    return [
        *(argument.replace(str(tmp_path), "TMP") for argument in found[1:]),
        directory.replace(str(tmp_path), "TMP"),
    ]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("pass", [*["set", "pass"], "TMP"]),
        ("os.chdir('elsewhere')", ["set", "os.chdir('elsewhere')", "TMP"]),
        ("sys.argv.pop()", ["set", "sys.argv.pop()", "TMP"]),
        ("sys.argv[1:] = []", ["set", "sys.argv[1:] = []", "TMP"]),
        ("sys.argv[0] = 'program'; del sys.argv[1]", ["set", "sys.argv[0] = 'program'; del sys.argv[1]", "TMP"]),
        ("sys.argv[1:] = ['--lr=1']", ["--lr=1", "TMP"]),
        ("sys.argv.append('--lr=1')", ["set", "sys.argv.append('--lr=1')", "--lr=1", "TMP"]),
    ],
)
def test_a_rank_has_the_original_command_and_the_arguments_that_the_script_has_set(
    change: str, expected: list[str], tmp_path: Path
) -> None:
    assert command_shown(tmp_path, "-u", "train.py", "set", change) == ["TMP/train.py", *expected]


@pytest.mark.processes
def test_a_rank_runs_the_module_the_code_or_the_script_that_was_set(tmp_path: Path) -> None:
    assert command_shown(tmp_path, "-W", "ignore", "-m", "package", "set", "sys.argv.pop()") == [
        "-Wignore", "-m", "package", "set", "sys.argv.pop()", "TMP",
    ]  # fmt: skip
    code = f"import sys; sys.argv.pop(); {SHOW}"
    assert command_shown(tmp_path, "-c", code, "7") == ["-c", code, "7", "TMP"]
    # As in a test, or in a sweep that runs another script.
    change = "os.chdir('elsewhere'); sys.argv = ['../other.py', '--lr=1']"
    assert command_shown(tmp_path, "train.py", "set", change) == ["TMP/other.py", "--lr=1", "None"]
    change = "del sys.argv[1:]; runpy.run_path('other.py', run_name='__main__'); sys.exit()"
    assert command_shown(tmp_path, "train.py", "set", change) == ["TMP/other.py", "None"]
    change = "del sys.argv[1:]; runpy.run_module('package.part', run_name='__main__', alter_sys=True); sys.exit()"
    assert command_shown(tmp_path, "train.py", "set", change) == ["-m", "package.part", "None"]


@pytest.mark.processes
def test_a_script_that_changes_the_directory_does_not_run_another_file_of_its_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "train.py").write_text("print('planted')")
    (tmp_path / "train.py").write_text(
        "import os; os.chdir('elsewhere')\nimport torch\n"
        "from lightning_strategies_ext.launch.script_launcher import find_command\nprint(find_command()[0][-1])"
    )
    result = run_command(sys.executable, "train.py", cwd=tmp_path)
    assert result.stdout.splitlines()[-1] == str(tmp_path / "train.py")


@pytest.mark.processes
@pytest.mark.parametrize("is_run_by_script", [False, True])
def test_a_module_of_the_same_name_is_not_run_if_the_program_changes_the_directory(
    is_run_by_script: bool, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "train.py").write_text("print('planted')")
    show = "from lightning_strategies_ext.launch.script_launcher import find_command\n"
    show += "command, directory = find_command()\nprint('command', repr((command, directory)))\n"
    change = f"import os, sys; os.chdir({str(tmp_path / 'elsewhere')!r})\n"
    (tmp_path / "train.py").write_text(
        f"{change}import torch\nif sys.argv[1:] == ['again']: print('the module'); sys.exit()\n"
        f"sys.argv.append('again')\n{show}"
    )
    (tmp_path / "start.py").write_text("import runpy; runpy.run_module('train', run_name='__main__', alter_sys=True)")
    start = ["start.py"] if is_run_by_script else ["-m", "train"]
    result = run_command(sys.executable, *start, cwd=tmp_path)
    command, directory = ast.literal_eval(result.stdout.rpartition("command ")[2])
    again = run_command(*command, cwd=tmp_path / "elsewhere" if directory is None else Path(directory))
    assert again.stdout == "the module\n"


@pytest.mark.processes
def test_a_script_from_standard_input_is_rejected_with_the_fix() -> None:
    result = run_command("sh", "-c", f'echo "{SHOW}" | {sys.executable} -')
    assert result.returncode == 1
    assert "RuntimeError: The script was read from standard input" in result.stdout


TAKES_ARGUMENTS = f"""{TRAINER}
from lightning.pytorch import seed_everything

os.makedirs("run", exist_ok=True)
os.chdir("run")
seed = int(sys.argv.pop())
seed_everything(seed + (int(os.environ.get("LOCAL_RANK", 0)) if sys.argv[1:] == ["different"] else 0))
trainer = train("ddp_ext")
world_size = os.environ["WORLD_SIZE"]
print(f"rank {{trainer.global_rank}}: seed {{seed}} in {{os.getcwd()}}, WORLD_SIZE={{world_size}}", flush=True)
"""


@pytest.mark.processes
def test_ranks_have_the_users_arguments_directory_environment_and_equal_seeds(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(TAKES_ARGUMENTS)
    environment = {"WORLD_SIZE": "8", **WITHOUT_MPI}
    result = run_command(sys.executable, "script.py", "7", env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    for rank in range(2):
        assert f"rank {rank}: seed 7 in {tmp_path / 'run'}, WORLD_SIZE=8" in result.stdout
    result = run_command(sys.executable, "script.py", "different", "7", env=environment, cwd=tmp_path)
    assert result.returncode == 1
    assert "Ranks shuffle their training data with different seeds" in result.stdout
