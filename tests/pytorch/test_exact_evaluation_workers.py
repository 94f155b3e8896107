"""``exact_evaluation=True`` on ranks of torchrun, elastic workers, and Ray's workers, also if one is lost meanwhile.

This module is also the program of the ranks: ``python -m tests.pytorch.test_exact_evaluation_workers DIRECTORY spawn``.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_strategies_ext import (
    DDPElasticStrategy,
    DDPRayElasticStrategy,
    DDPRayStrategy,
    DDPSpawnElasticStrategy,
)
from tests.pytorch.test_exact_evaluation import FIT, evaluate, loader_of
from tests.support.ranks import run_command, run_script
from tests.support.ray_clusters import FOREVER_S, HALF, PROGRAM_S, needs_ray, variables_of_own_ray

pytestmark = pytest.mark.processes

#: Samples of two DataLoaders. Two ranks have eight and seven batches of the first, and one and none of the second.
NUMBERS = (99, 1)
BATCH_SIZE = 7
STRATEGIES = {
    "torchrun": DDPElasticStrategy,
    "spawn": DDPSpawnElasticStrategy,
    "ray": DDPRayStrategy,
    "ray elastic": DDPRayElasticStrategy,
}


class LosesRank(Callback):
    """Kills rank 1 once, between two validation steps of the second epoch, and writes the results of each rank."""

    def __init__(self, directory: Path, is_killed: bool) -> None:
        self.directory, self.is_killed = directory, is_killed

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, *args: Any) -> None:
        is_due = trainer.current_epoch == 1 and batch_idx == 4 and trainer.global_rank == 1
        if self.is_killed and is_due and not (self.directory / "killed").exists():
            (self.directory / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            path = self.directory / f"{trainer.global_step} {trainer.global_rank} {trainer.world_size}"
            path.write_text(json.dumps(module.seen))


def loaders() -> list[Any]:
    return [loader_of(number, BATCH_SIZE) for number in NUMBERS]


def main() -> None:
    directory, kind, *flags = sys.argv[1:]
    arguments: dict[str, Any] = {"exact_evaluation": True}
    if "ray" in kind:
        arguments |= {"num_workers": 2, **HALF}
    callbacks = (LosesRank(Path(directory), bool(flags)),)
    result = evaluate(STRATEGIES[kind](**arguments), 2, loaders(), callbacks=callbacks, **FIT)
    Path(directory, f"result {os.environ.get('RANK', 0)}").write_text(json.dumps(result))


def check(directory: Path, *, num_ranks: int = 1) -> None:
    """Compares the results of the ranks, and the samples of each validation, with one device."""
    one = evaluate("auto", 1, loaders(), **FIT)
    for rank in range(num_ranks):
        result = json.loads((directory / f"result {rank}").read_text())
        assert result["values"] == pytest.approx(one["values"], rel=1e-5)
        assert result["sums"] == one["sums"]
        assert result["gathered"] == one["gathered"] or rank > 0  # only rank 0 has the results of all steps
        assert result["warnings"] == []
    seen: dict[tuple[str, str], list[int]] = {}
    for path in directory.glob("* * *"):
        step, _, size = path.name.split()
        seen.setdefault((step, size), []).extend(json.loads(path.read_text()))
    assert len({step for step, _ in seen}) >= 4  # two epochs with two batches each; a rank alone has more
    assert {tuple(sorted(indices)) for indices in seen.values()} == {tuple(sorted(one["seen"]))}


@pytest.mark.parametrize("flags", [(), ("killed",)], ids=["undisturbed", "killed"])
def test_ranks_of_torchrun(flags: tuple[str, ...], tmp_path: Path) -> None:
    run_id = f"--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --rdzv-id={os.urandom(8).hex()}"
    options = f"--nproc-per-node=2 --max-restarts=1 --monitor-interval=0.1 {run_id} -m {__name__}"
    start = sys.executable, "-m", "torch.distributed.run", *options.split()
    result = run_command(*start, tmp_path, "torchrun", *flags)
    assert result.returncode == 0, result.stdout
    assert (tmp_path / "killed").exists() == bool(flags)
    check(tmp_path, num_ranks=2)


@pytest.mark.parametrize("flags", [(), ("killed",)], ids=["undisturbed", "killed"])
def test_spawned_elastic_workers(flags: tuple[str, ...], tmp_path: Path) -> None:
    result = run_script("-m", __name__, tmp_path, "spawn", *flags)
    assert result.returncode == 0, result.stdout
    assert (tmp_path / "killed").exists() == bool(flags)
    check(tmp_path)


@needs_ray
@pytest.mark.timeout(FOREVER_S)
@pytest.mark.parametrize(("kind", "flags"), [("ray", ()), ("ray elastic", ("killed",))])
def test_workers_of_ray(kind: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    with variables_of_own_ray() as variables:
        result = run_script("-m", __name__, tmp_path, kind, *flags, env=variables, timeout_s=PROGRAM_S)
    assert result.returncode == 0, result.stdout
    assert (tmp_path / "killed").exists() == bool(flags)
    check(tmp_path)


if __name__ == "__main__":
    from tests.pytorch import test_exact_evaluation_workers as program  # so that workers find the classes

    program.main()
