"""torch's flight recorder with the ``shm`` process group: records, results, and torch's trace analyzer."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_strategies_ext._system import flight_recorder
from lightning_strategies_ext.shm.recorded_group import RecordedShmProcessGroup
from tests.shm.start import PER_HOST, start_shm
from tests.shm.test_semantics import run_random_programs
from tests.support.ranks import rank_environment, run_ranks, run_script

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        flight_recorder.hook_class() is None,
        reason=f"torch {torch.__version__} does not record process groups with a Python class (2.15 does)",
    ),
]
VARIABLE = "TORCH_FR_BUFFER_SIZE"


@pytest.fixture(autouse=True)
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rank_environment, VARIABLE, "1000")


def record() -> list[tuple[str, Any, bool]]:
    """Returns the name, sizes of inputs, and state of each recorded collective over shm."""
    entries = flight_recorder._load("shm")["entries"]
    return [(entry["profiling_name"], entry["input_sizes"], entry["retired"]) for entry in entries]


def call_each_collective() -> tuple[list[tuple[str, Any, bool]], list[str]]:
    rank = start_shm()
    assert isinstance(dist.group.WORLD, RecordedShmProcessGroup)
    row, rows, halves = torch.full((2,), rank + 1.0), torch.empty(4), [torch.empty(2), torch.empty(2)]

    dist.all_reduce(torch.ones(3))
    asynchronous = dist.all_reduce(torch.ones(5), async_op=True)
    asynchronous.wait()
    assert asynchronous.is_completed()
    dist.reduce(torch.ones(3), 0)
    dist.broadcast(row.clone(), 1)
    dist.all_gather(halves, row)
    assert [half[0].item() for half in halves] == [1.0, 2.0]
    dist.all_gather_into_tensor(rows, row)
    assert rows.tolist() == [1.0, 1.0, 2.0, 2.0]
    dist.gather(row, halves if rank == 0 else None)
    dist.scatter(torch.empty(2), halves if rank == 0 else None)
    dist.reduce_scatter(torch.empty(2), halves)
    dist.reduce_scatter_tensor(torch.empty(2), rows)
    dist.all_to_all_single(torch.empty(4), rows)
    dist.all_to_all([torch.empty(2), torch.empty(2)], halves)
    dist.barrier()
    if rank == 0:
        dist.send(row, 1)
    else:
        dist.recv(row, 0)
    return record(), flight_recorder.recorded_collectives()


def test_the_recorder_has_each_collective_of_a_group_with_its_sizes_and_call():
    for rank, (recorded, described) in enumerate(run_ranks(call_each_collective)):
        peer_to_peer = "shm:send 0->1" if rank == 0 else "shm:recv 1<-0"
        assert [name for name, _, _ in recorded] == [
            "shm:all_reduce",
            "shm:all_reduce",
            "shm:reduce",
            "shm:broadcast",
            "shm:all_gather",
            "shm:_all_gather_base",
            "shm:gather",
            "shm:scatter",
            "shm:reduce_scatter",
            "shm:_reduce_scatter_base",
            "shm:all_to_all_single",
            "shm:all_to_all",
            "shm:barrier",
            peer_to_peer,
        ]
        assert recorded[1][1] == [[5]]
        assert all(is_retired for _, _, is_retired in recorded)
        assert described[0].startswith(f"1: shm:all_reduce [3], at {__file__}:")
        assert described[0].endswith("in call_each_collective")
        assert len(described) == len(recorded)  # without the operations that gloo has executed for the group


def train_and_use_a_subgroup() -> tuple[list[str], Any]:
    rank = start_shm()
    subgroup = dist.new_group([1], group_desc="validation")
    if rank == 1:
        dist.all_reduce(torch.ones(7), group=subgroup)
    model = DistributedDataParallel(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    return [name for name, _, _ in record()], flight_recorder._load("shm")["pg_config"]


def test_the_recorder_has_the_collectives_of_ddp_and_the_ranks_of_groups():
    of_rank_0, of_rank_1 = run_ranks(train_and_use_a_subgroup)
    for names, groups in (of_rank_0, of_rank_1):
        assert "shm:all_reduce" in names
        assert {"default_pg": "[0, 1]"}.items() <= {each["desc"]: each["ranks"] for each in groups.values()}.items()
    assert "[1]" in [each["ranks"] for each in of_rank_1[1].values() if each["desc"] == "validation"]


@pytest.mark.parametrize("per_host", [None, "1"])
def test_recorded_groups_give_what_gloo_gives(per_host: str | None, monkeypatch: pytest.MonkeyPatch):
    if per_host is not None:
        monkeypatch.setitem(rank_environment, PER_HOST, per_host)
    run_random_programs(2, 3)


def fail_and_wait() -> list[tuple[str, bool]]:
    rank = start_shm(timeout_s=3)
    dist.all_reduce(torch.ones(2))
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="rank 1"):
            dist.all_reduce(torch.ones(2))
    return [(name, is_retired) for name, _, is_retired in record()]


def test_a_collective_that_has_failed_is_recorded_and_not_retired():
    of_rank_0, of_rank_1 = run_ranks(fail_and_wait)
    assert of_rank_0 == [("shm:all_reduce", True), ("shm:all_reduce", False)]
    assert of_rank_1 == of_rank_0[:1]


def differ(directory: str) -> None:
    rank = start_shm()
    for _ in range(2):
        dist.all_reduce(torch.ones(2))
    with pytest.raises(dist.DistBackendError, match="do not call the same collectives"):
        dist.all_reduce(torch.ones(5 + rank))
    trace = flight_recorder.trace()
    assert trace is not None
    Path(directory, f"collectives-{rank}").write_bytes(trace)


def test_torchs_trace_analyzer_finds_the_collective_in_which_ranks_differ(tmp_path: Path):
    run_ranks(differ, str(tmp_path))
    result = run_script("-m", "torch.distributed.flight_recorder.fr_trace", str(tmp_path))
    assert result.returncode == 0, result.stdout
    assert "Collective sequence number: 3 has errors" in result.stdout
    assert "Culprit rank 1; Error type: SIZE_OR_SYNTAX_MISMATCH" in result.stdout
    assert f"differ at {__file__}" in result.stdout
    assert "unrecognized" not in result.stdout


def call_without_recorder() -> tuple[str, list[str]]:
    start_shm()
    dist.all_reduce(torch.ones(3))
    return type(dist.group.WORLD).__name__, flight_recorder.recorded_collectives()


@pytest.mark.parametrize("size", [None, "0"])
def test_nothing_is_recorded_unless_the_variable_has_a_size(size: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(rank_environment, VARIABLE)
    if size is not None:
        monkeypatch.setitem(rank_environment, VARIABLE, size)
    assert run_ranks(call_without_recorder) == [("ShmProcessGroup", [])] * 2
