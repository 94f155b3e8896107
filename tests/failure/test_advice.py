"""The report of a failure with a known fix begins with the fix."""

from pathlib import Path

import pytest

from tests.support.ranks import run_script

pytestmark = pytest.mark.processes

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SCRIPT = """
import sys

import torch
from lightning.fabric import Fabric
from torch import nn

import lightning_strategies_ext
from tests.support.models import MLP, loader, make_trainer


class HasSpare(MLP):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(2, 2)


class InTurns(HasSpare):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) if batch_idx else self.loss(batch) + self.spare(torch.ones(2)).sum()


class HasSparse(MLP):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(2, 2, sparse=True)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) if batch_idx else self.loss(batch) + self.table(torch.zeros(1, dtype=int)).sum()


def train(fabric):
    module = HasSpare()
    model = fabric.setup_module(module)
    model.mark_forward_method("loss")
    for batch in fabric.setup_dataloaders(loader()):
        fabric.backward(model.loss(batch))


if __name__ == "__main__":
    front_end, strategy, model, *arguments = sys.argv[1:]
    if arguments:
        strategy = getattr(lightning_strategies_ext, strategy)(**{name: True for name in arguments})
    if front_end == "Fabric":
        Fabric(strategy=strategy, accelerator="cpu", devices=2).launch(train)
    else:
        make_trainer(strategy).fit(globals()[model](), loader())
"""


@pytest.mark.parametrize(
    ("command", "advised"),
    [
        ("Trainer ddp_ext HasSpare", "'ddp_ext_find_unused_parameters_true'` or `DDPStrategy("),
        ("torchrun ddp_ext HasSpare", "'ddp_ext_find_unused_parameters_true'` or `DDPStrategy("),
        ("Trainer ddp_spawn_ext HasSpare", "'ddp_spawn_ext_find_unused_parameters_true'` or `DDPSpawnStrategy("),
        ("Trainer ddp_fork_ext HasSpare", "'ddp_fork_ext_find_unused_parameters_true'` or `DDPSpawnStrategy("),
        ("Fabric ddp_ext -", "'ddp_ext_find_unused_parameters_true'` or `DDPStrategy("),
        ("Fabric ddp_spawn_ext -", "'ddp_spawn_ext_find_unused_parameters_true'` or `DDPStrategy("),
        ("Trainer DDPSpawnStrategy InTurns static_graph", "Omit `static_graph=True`, and use"),
        ("Trainer DDPStrategy HasSparse find_unused_parameters", "or omit `sparse=True`."),
    ],
)
def test_the_last_block_begins_with_what_to_do_about_unused_parameters(command: str, advised: str, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    front_end, *arguments = command.split()
    launcher = TORCHRUN if front_end == "torchrun" else ()
    result = run_script(*launcher, script, front_end, *arguments, cwd=tmp_path)
    assert result.returncode == 1
    _, block, after = result.stdout.split(f"{'-' * 80}\n")
    assert after == "" or front_end == "torchrun"
    first, second = block.splitlines()[:2]
    assert first.startswith("lightning-strategies-ext: ")
    assert advised in first
    assert "failed first" in second
    assert block.count(advised) == 1
    assert "RuntimeError: Expected " in block


def test_the_error_of_elastic_workers_begins_with_the_remedy(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = run_script(script, "Trainer", "ddp_spawn_elastic_ext", "HasSpare", cwd=tmp_path)
    last = result.stdout[result.stdout.rindex("\nRuntimeError: ") :].splitlines()[1]
    assert "use `DDPSpawnElasticStrategy(find_unused_parameters=True)`" in last
