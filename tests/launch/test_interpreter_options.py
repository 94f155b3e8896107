"""Ranks have the options of the main process's interpreter, and issue no warnings under ``-W error``."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning_utilities.core.imports import RequirementCache

from lightning_strategies_ext._system.interpreters import current_options_as_variables, python
from tests.support.ranks import run_script
from tests.support.ray_clusters import needs_ray

# Lightning's combined loader uses a class that torch 2.13 deprecates. torch 2.5 removes a temporary directory at exit.
WARNINGS = ["error", "ignore:`isinstance(treespec"]
if RequirementCache("torch<2.6"):
    WARNINGS.append("ignore:Implicitly cleaning up")
OPTIONS = ("-O", "-B", "-X", "faulthandler", *(f"-W{warning}" for warning in WARNINGS))
SCRIPT = """
import json, sys, warnings
from pathlib import Path
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from tests.support.models import MLP, loader
from lightning_strategies_ext import DDPSpawnStrategy

warnings.simplefilter("ignore", PossibleUserWarning)  # Lightning's advice on the number of DataLoader workers

class Records(MLP):
    def on_train_end(self):
        self.all_gather(self.net[0].weight.detach())
        flags = [sys.flags.optimize, sys.flags.dont_write_bytecode, "faulthandler" in sys._xoptions]
        found = {"flags": flags, "warnings": sys.warnoptions, "runs_assert": __debug__}
        Path(f"{self.name}-{self.trainer.global_rank}.json").write_text(json.dumps(found))

if __name__ == "__main__":
    for name in sys.argv[1:]:
        strategy = DDPSpawnStrategy(start_method="forkserver") if name == "forkserver" else name
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=1, max_epochs=1, **quiet)
        model = Records()
        model.name = name
        trainer.fit(model, loader(), loader())
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "names", [["ddp_spawn_ext", "forkserver"], ["ddp_ext"], pytest.param(["ddp_ray_ext"], marks=needs_ray)]
)
def test_ranks_have_the_options_of_the_main_process_and_do_not_warn(names: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    result = run_script(*OPTIONS, "train.py", *names, cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    assert "ResourceWarning" not in result.stdout
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert len(found) == 2 * len(names)
    for options in found.values():
        has_option = options["flags"][2] or names == [
            "ddp_ray_ext"
        ]  # in these processes, an environment variable sets the option
        assert [*options["flags"][:2], has_option] == [1, 1, True]
        assert options["warnings"] == WARNINGS
        assert not options["runs_assert"]


PRINT = "import json, sys; print(json.dumps([list(sys.flags), sorted(sys._xoptions), sys.warnoptions]))"
START = f"""
import subprocess, sys
from lightning_strategies_ext._system.interpreters import current_options, python
command = python({PRINT!r}, options=current_options())
print(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "options", [["-OO", "-b"], ["-I"], ["-E", "-s"], ["-X", "dev", "-X", "utf8=0"], ["-W", "once"]]
)
def test_an_interpreter_has_the_options_of_its_parent(options: list[str]) -> None:
    safe_path = ["-P"] if sys.version_info >= (3, 11) else []

    def run(program: str) -> Any:
        command = [sys.executable, *safe_path, *options, "-c", program]
        return json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)

    assert run(START) == run(PRINT)
    assert run(PRINT) != json.loads(subprocess.run(python(PRINT), capture_output=True, check=True, text=True).stdout)


def test_options_as_variables_omit_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "warnoptions", ["error", "ignore:foo, bar", "ignore::UserWarning"])
    monkeypatch.setattr(sys, "_xoptions", {"tracemalloc": "3", "faulthandler": True})
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    variables = current_options_as_variables()
    assert variables["PYTHONWARNINGS"] == "error,ignore::UserWarning"
    assert variables["PYTHONTRACEMALLOC"] == "3"
    assert "PYTHONFAULTHANDLER" not in variables
