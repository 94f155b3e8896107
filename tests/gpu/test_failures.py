"""Failure, SIGKILL, and hang of a rank while others wait in NCCL: all ranks exit soon, and a message names the cause.

The tests run the script of :mod:`tests.faults`. For all moments, run ``python -m tests.faults --accelerator gpu
--worlds 1x2 --strategies ddp_ext fabric``.
"""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric

from lightning_strategies_ext.torch_distributed import disconnect
from tests.faults.cases import Case, try_case
from tests.gpu.devices import ACCELERATOR, ON_CPU, Ranks, cuda_only

pytestmark = pytest.mark.processes

#: Time limit in seconds, which only a hang reaches; NCCL's watchdog waits for ten minutes.
HANGS_S = 60


def case(kind: str, moment: str, rank: int, strategy: str = "ddp_ext") -> Case:
    return Case(kind, moment, rank, strategy, 2, hosts=1 if ON_CPU else 2, accelerator=ACCELERATOR)


CASES = [
    case("exception", "backward", 1),
    case("exception", "end of epoch", 0),
    case("sigkill", "forward", 1),
    case("sigkill", "optimizer step", 0),
    case("sigkill", "predict", 1),
    case("sigterm", "forward", 1),
    case("sigsegv", "validation", 1),
    case("os_exit", "backward", 1),
    case("sleep", "forward", 1),
    case("sleep", "validation", 0),
    case("sigstop", "backward", 1),
    case("hold_gil", "optimizer step", 0),
    case("collective", "forward", 1),
    case("sigkill", "checkpoint", 1),
    case("sleep", "checkpoint", 1),
    case("exception", "optimizer step", 1, "fabric"),
    case("sigterm", "checkpoint", 1, "fabric"),
    case("sleep", "checkpoint", 1, "fabric"),
    case("sigkill", "backward", 0, "fabric"),
    case("sleep", "forward", 1, "fabric"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_ranks_exit_soon_and_report_the_reason(case: Case, two_ranks: Ranks, tmp_path: Path) -> None:
    result = try_case(case, tmp_path, limit_s=HANGS_S)
    assert result.problems == [], result.output
    print(f"{case}: {result.seconds:.1f} s, exit codes {result.exit_codes}\n{result.output}")


def save_after_an_abort(where: dict[str, Any], directory: Path, waits_in: tuple[bool, ...]) -> list[str]:
    """Returns the longest pause of other threads during the save on rank 0, and the names of the checkpoints."""
    fabric = Fabric(strategy="ddp_ext", **where)
    fabric.launch()
    tensor = torch.ones(1000, device=fabric.device)
    groups = {False: dist.group.WORLD, True: dist.new_group()}
    for group in groups.values():
        dist.all_reduce(tensor, group=group)
    fabric.strategy.checkpoint_io.save_checkpoint({"tensor": tensor}, directory / f"good{fabric.global_rank}.ckpt")
    fabric.barrier()
    blocked_s: list[float] = [0.0]

    def cut_off() -> None:
        begin = before = time.monotonic()
        while before - begin < 1.5:
            time.sleep(0.01)
            now = time.monotonic()
            before, blocked_s[0] = now, max(blocked_s[0], now - before)
        disconnect.abort()

    if fabric.global_rank == 0:
        for is_in_other_group in waits_in:
            dist.all_reduce(tensor.clone(), group=groups[is_in_other_group])  # which the other rank does not enter
        threading.Thread(target=cut_off).start()
        with pytest.raises(dist.DistBackendError, match="were aborted"):
            fabric.strategy.checkpoint_io.save_checkpoint({"tensor": tensor}, directory / "bad.ckpt")
        (directory / "is over").touch()
    while not (directory / "is over").exists():
        time.sleep(0.05)
    return [f"{blocked_s[0]:.2f} s", *sorted(path.name for path in directory.glob("*.ckpt"))]


@cuda_only
@pytest.mark.parametrize("waits_in", [(False,), (True,), (False, True)], ids=["default group", "another", "both"])
def test_the_result_of_an_aborted_exchange_is_in_no_checkpoint(
    waits_in: tuple[bool, ...], two_ranks: Ranks, tmp_path: Path
) -> None:
    blocked_s, *names = two_ranks.run(save_after_an_abort, tmp_path, waits_in)[0]
    assert names == ["good0.ckpt", "good1.ckpt"]
    assert float(blocked_s.removesuffix(" s")) < 1
