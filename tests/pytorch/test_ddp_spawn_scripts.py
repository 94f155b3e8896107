"""``ddp_spawn_ext`` in scripts: SIGTERM, two hosts, a tiny /dev/shm, and the example."""

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from tests.support.examples import EXAMPLE_ENVIRONMENT
from tests.support.ranks import REPOSITORY, clean_environment, free_port, kill_tree, run_script, start_script

pytestmark = pytest.mark.processes


class RecordsStart(pl.Callback):
    """A callback that writes a file during training."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 5 and trainer.is_global_zero:
            self.path.touch()


TRAIN_UNTIL_SIGTERM = """
import sys
from lightning.pytorch.utilities.exceptions import SIGTERMException
from tests.support.models import MLP, loader, make_trainer, state_of
from tests.pytorch.test_ddp_spawn_scripts import RecordsStart

if __name__ == "__main__":
    model = MLP()
    before = state_of(model)["net.0.weight"]
    trainer = make_trainer("ddp_spawn_ext", max_epochs=-1, callbacks=[RecordsStart(sys.argv[1])])
    try:
        trainer.fit(model, loader())
    except SIGTERMException:
        is_trained = (before != model.net[0].weight).any().item()
        print("stopped", trainer.global_step >= 5, trainer.received_sigterm, is_trained)
"""


def test_a_sigterm_to_the_main_process_stops_all_ranks_and_the_state_is_returned(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN_UNTIL_SIGTERM)
    process = start_script(script, tmp_path / "started")
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "started").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
        output, _ = process.communicate(timeout=300)
    finally:
        kill_tree(process.pid)
    assert "stopped True True True" in output, output
    assert process.returncode == 0


FIT_AND_PREDICT = """
import torch
from tests.support.models import dataset, loader, make_trainer
from tests.pytorch.test_ddp_spawn_predictions import PredictsIndices, first_feature, joined

if __name__ == "__main__":
    trainer = make_trainer("ddp_spawn_ext", **{kwargs})
    model = PredictsIndices()
    trainer.fit(model, loader())
    assert trainer.global_step == 16
    predictions = joined(trainer.predict(model, loader()))
    assert torch.equal(predictions, first_feature(range(64))), predictions
    print("node", trainer.node_rank, "weights", model.net[0].weight.sum().item(), "of", trainer.world_size)
"""


def test_two_hosts_share_the_work_and_each_has_the_results(tmp_path):
    """Two main processes, as on two hosts; both main processes have all predictions."""
    script = tmp_path / "train.py"
    script.write_text(FIT_AND_PREDICT.replace("{kwargs}", "{'num_nodes': 2, 'devices': 1}"))
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    hosts = [start_script(script, env={**variables, "NODE_RANK": str(rank)}) for rank in range(2)]
    try:
        outputs = [host.communicate(timeout=300)[0] for host in hosts]
    finally:
        for host in hosts:
            kill_tree(host.pid)
    lines = [next((line for line in output.splitlines() if line.startswith("node ")), output) for output in outputs]
    assert [line.split()[1] for line in lines] == ["0", "1"], outputs
    assert lines[0].split()[2:] == lines[1].split()[2:]
    assert lines[0].endswith("of 2")


def test_a_tiny_dev_shm_is_no_obstacle(tmp_path):
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip("mounting a small /dev/shm needs root and unshare")
    script = tmp_path / "train.py"
    script.write_text(FIT_AND_PREDICT.replace("{kwargs}", "{'devices': 2}"))
    command = f"mount -t tmpfs -o size=64k tmpfs /dev/shm && exec {sys.executable} {script}"
    environment = {**clean_environment(), "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command], env=environment, capture_output=True, text=True, timeout=300
    )
    assert "node 0" in result.stdout, result.stdout + result.stderr


def test_the_example_knows_its_accuracy_without_reading_a_checkpoint(tmp_path):
    result = run_script(
        REPOSITORY / "examples/digits.py", "--strategy", "ddp_spawn_ext", "--dir", tmp_path, "--epochs", "6",
        env=EXAMPLE_ENVIRONMENT,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    [row] = [line for line in result.stdout.splitlines() if "held-out images" in line]
    assert float(row.split("│")[2]) >= 0.97
    [row] = [line for line in result.stdout.splitlines() if "images per second" in line]
    assert float(row.split("│")[2].replace(",", "")) > 0
