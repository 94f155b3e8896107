"""Notebooks and prompts reject strategies that need a script; the error names strategies that work there."""

import subprocess
import sys

import pytest
from lightning.fabric import Fabric

from tests.support.models import make_trainer
from tests.support.ranks import REPOSITORY, WITHOUT_MPI, clean_environment

TYPED = """
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning_strategies_ext import DDPStrategy

def say(front_end, strategy):
    try:
        made = front_end(strategy=strategy, accelerator="cpu", devices=2)
    except Exception as error:
        made = f"{type(error).__name__}: {error}"
    label = strategy if isinstance(strategy, str) else "an instance"
    print(f"RESULT|{front_end.__name__}|{label}|{made}")

for front_end in (Trainer, Fabric):
    for strategy in STRATEGIES:
        say(front_end, strategy)

say(Trainer, DDPStrategy(start_method="forkserver"))
"""
REFUSED = ["ddp_ext", "ddp_ext_find_unused_parameters_true", "horovod_ext"]
ACCEPTED = ["ddp_spawn_ext", "ddp_notebook_ext", "ddp_fork_ext", "dp_ext", "an instance"]


@pytest.mark.processes
def test_errors_at_a_prompt_name_the_strategies_that_work_there() -> None:
    process = subprocess.run(
        [sys.executable, "-i"],
        input=f"STRATEGIES = {REFUSED + ACCEPTED[:-1]}\n{TYPED}",
        env={**clean_environment(), **WITHOUT_MPI, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = [line.split("RESULT|")[1].split("|") for line in process.stdout.splitlines() if "RESULT|" in line]
    results = {(front_end, strategy): text for front_end, strategy, text in lines}
    assert len(results) == 2 * len(REFUSED + ACCEPTED) - 1, process.stdout + process.stderr
    for (front_end, strategy), text in results.items():
        if strategy in ACCEPTED:
            assert f"{front_end} object at" in text, text
            continue
        assert text.startswith("RuntimeError: `strategy="), text
        assert "does not work in a notebook or at a prompt" in text
        assert "`strategy='ddp_spawn_ext'`" in text
        assert "`strategy='ddp_notebook_ext'`" in text
        assert "'ddp_notebook'" not in text


def test_start_method_popen_is_refused_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    with pytest.raises(RuntimeError, match=r"`start_method='popen'`\) does not work in a notebook"):
        make_trainer("ddp_ext")
    with pytest.raises(RuntimeError, match=r"strategy='ddp_ext'.*does not work in a notebook"):
        Fabric(strategy="ddp_ext", accelerator="cpu", devices=2)
