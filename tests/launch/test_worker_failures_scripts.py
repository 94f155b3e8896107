"""Errors of ``ddp_spawn_ext`` in unsupported scripts and notebooks, with the fix."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.ranks import run_script

pytestmark = pytest.mark.processes

FAILS_TWICE = """
from pathlib import Path

from lightning_strategies_ext import WorkerRaisedError
from tests.support.models import MLP, loader, make_trainer

is_broken = Path(__file__).with_name("is_broken")
if __name__ == "__mp_main__" and is_broken.exists():
    import no_such_module


class MyError(Exception):
    pass


class Fails(MLP):
    def training_step(self, batch, batch_idx):
        raise MyError(self.global_rank)


if __name__ == "__main__":
    trainer = make_trainer("ddp_spawn_ext")
    try:
        trainer.fit(Fails(), loader())
    except WorkerRaisedError as error:
        print("has its own class:", isinstance(error.__cause__, MyError))
    is_broken.touch()
    trainer.fit(MLP(), loader())
"""

NO_GUARD = """
from lightning_strategies_ext import DDPSpawnStrategy, WorkerRaisedError
from tests.support.models import MLP, loader, make_trainer

for start_method in ("forkserver", "spawn"):
    try:
        make_trainer(DDPSpawnStrategy(start_method=start_method)).fit(MLP(), loader())
    except (RuntimeError, WorkerRaisedError) as error:  # some workers may not have reached this error
        if __name__ != "__main__":
            raise
        print(start_method, "raised:", str(error).splitlines()[0])
"""

NOTEBOOK = """
import sys

sys.ps1 = ">>> "  # Lightning takes this for a notebook or a prompt

from tests.support.models import MLP, loader, make_trainer, state_of


class Doubled(MLP):
    factor = 2

    def training_step(self, batch, batch_idx):
        self.log("factor", float(self.factor))
        return self.factor * super().training_step(batch, batch_idx)


try:
    make_trainer("ddp_ext")
except Exception as error:
    print("rejected:", type(error).__name__, error)

for strategy in ("ddp_notebook_ext", "ddp_spawn_ext"):
    trainer = make_trainer(strategy, max_epochs=1)
    first = Doubled()
    weights = state_of(first)
    trainer.fit(first, loader())
    print("trained:", trainer.global_step, trainer.callback_metrics["factor"].item())
    assert any((tensor != weights[name]).any() for name, tensor in first.state_dict().items())

    exec("class Tripled(Doubled):\\n    factor = 3", globals())
    trainer.fit_loop.max_epochs = 2
    second = Tripled()
    trainer.fit(second, loader())
    print("trained:", trainer.global_step, trainer.callback_metrics["factor"].item())
"""


@pytest.fixture
def run_text(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Returns a function that runs a script given as text."""

    def run(text: str, *args: str) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "script.py"
        script.write_text(text)
        return run_script(script, *args)

    return run


def test_an_exception_class_of_the_script_is_the_cause_and_a_failed_import_is_named(run_text):
    result = run_text(FAILS_TWICE)
    assert "has its own class: True" in result.stdout
    assert result.returncode == 1
    assert "failed: ModuleNotFoundError: No module named 'no_such_module'" in result.stdout
    assert "    import no_such_module\n" in result.stdout


def test_a_script_without_a_guard_is_rejected_with_the_fix(run_text):
    result = run_text(NO_GUARD)
    for start_method in ("forkserver", "spawn"):
        (line,) = [line for line in result.stdout.splitlines() if line.startswith(f"{start_method} raised:")]
        assert 'Put what the script does under `if __name__ == "__main__":`' in line


def test_the_error_in_a_notebook_names_strategies_that_work_and_know_new_definitions(run_text):
    result = run_text(NOTEBOOK)
    assert result.returncode == 0, result.stdout
    (rejected,) = [line for line in result.stdout.splitlines() if line.startswith("rejected:")]
    assert "ddp_notebook_ext" in rejected
    assert "ddp_spawn_ext" in rejected
    trained = [line for line in result.stdout.splitlines() if line.startswith("trained:")]
    assert trained == ["trained: 8 2.0", "trained: 16 3.0"] * 2


IN_POOL = """
import multiprocessing
from tests.support.models import MLP, fit

def train(strategy):
    try:
        trainer, _ = fit(strategy, max_epochs=1)
        return f"{strategy} trained {trainer.global_step} steps"
    except RuntimeError as error:
        return f"{strategy} raised: {error}"

if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(1) as pool:
        for strategy in ("ddp_fork_ext", "ddp_spawn_ext"):
            print(pool.apply(train, (strategy,)), flush=True)
"""


def test_in_a_pool_fork_is_rejected_with_the_fix_and_spawn_trains(run_text):
    lines = run_text(IN_POOL).stdout.splitlines()
    (forked,) = [line for line in lines if line.startswith("ddp_fork_ext")]
    assert forked.startswith("ddp_fork_ext raised: `start_method='fork'`: this process cannot start children")
    assert "`strategy='ddp_spawn_ext'`" in forked
    assert "`concurrent.futures.ProcessPoolExecutor`" in forked
    assert "ddp_spawn_ext trained 8 steps" in lines
