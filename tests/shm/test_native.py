"""The native all-reduce: bits identical to rounds, C11 memory order, sleep and wakeup, fallback without a compiler."""

import ctypes
import os
import random
import re
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from lightning_strategies_ext._system import user_cache
from lightning_strategies_ext.identities import FIELDS
from lightning_strategies_ext.shm import compiler, native_build
from lightning_strategies_ext.shm.compiler import SOURCE, NativeLibraryError, compile_library
from lightning_strategies_ext.shm.links import HEADER
from lightning_strategies_ext.shm.native import MAX_RANKS, SharedCopies
from lightning_strategies_ext.shm.native_build import NATIVE_VARIABLE, library
from lightning_strategies_ext.shm.segments import LINE_NUM_BYTES, NUM_SLOTS
from tests.shm.start import start_shm
from tests.support import ranks
from tests.support.ranks import outcomes_of_ranks, run_ranks, run_script

pytestmark = pytest.mark.processes

STRESS = Path(__file__).with_name("all_reduce_stress.c")
SLOT_NUM_BYTES = 32 * 1024
COMPILED_DTYPES = [torch.float32, torch.float64, torch.int32, torch.int64]


def reduce_with_both_implementations(num_tensors: int, seed: int) -> list[bytes]:
    os.environ["LIGHTNING_STRATEGIES_EXT_SHM_SEGMENT_BYTES"] = str(16 * SLOT_NUM_BYTES)
    rank = start_shm()
    os.environ[NATIVE_VARIABLE] = "0"
    library.cache_clear()
    in_rounds = dist.new_group(backend="shm")
    assert dist.group.WORLD._native is not None
    assert in_rounds._native is None
    size, draw = dist.get_world_size(), random.Random(seed)
    own = torch.Generator().manual_seed(rank + 1)
    borders = [1, 16 * size, 2048, 8192 // max(1, size - 1), *(SLOT_NUM_BYTES * k // 4 for k in (1, 2, 3, 4, 9))]
    results = []
    for number in range(num_tensors):
        dtype, op = draw.choice(COMPILED_DTYPES), draw.choice([ReduceOp.SUM, ReduceOp.AVG])
        numel = max(1, draw.choice(borders) // draw.choice([1, 1, 2]) + draw.randint(-3, 3))
        tensor = (torch.randn(numel, generator=own, dtype=torch.float64) * 1000).to(dtype)
        if number % 5 == 0:
            tensor = tensor.repeat(2).view(2, numel).t()  # with strides
        other = tensor.clone()
        works = [dist.all_reduce(tensor, op, async_op=number % 2 == 0)]
        works += [dist.all_reduce(other, op, group=in_rounds, async_op=number % 3 == 0)]
        for work in works:
            if work is not None:
                work.wait()
        assert torch.equal(tensor, other), (number, dtype, op, tensor.shape)
        results.append(tensor.contiguous().numpy().tobytes())
    return results


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_the_bits_are_those_of_rounds_on_every_rank(world_size: int):
    first, *others = run_ranks(reduce_with_both_implementations, 600 // world_size, world_size, world_size=world_size)
    assert all(other == first for other in others)


def stress(source: Path, directory: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs ranks as threads with the thread sanitizer, which stops at its first report."""
    program = directory / "stress"
    flags = ["-g", "-O2", "-std=gnu11", "-fsanitize=thread", f"-I{source.parent}"]
    subprocess.run([*compiler.command(), *flags, "-o", program, STRESS, "-lpthread"], check=True)
    at_the_first = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    return subprocess.run(
        [program, *map(str, arguments)], env=at_the_first, capture_output=True, text=True, timeout=100
    )


@pytest.mark.parametrize("sleeps", [0, 1])
@pytest.mark.parametrize(("num_ranks", "num_tensors"), [(2, 4000), (3, 2000), (7, 400)])
def test_the_library_relies_only_on_guarantees_of_the_c11_memory_model(
    tmp_path: Path, num_ranks: int, num_tensors: int, sleeps: int
):
    done = stress(SOURCE, tmp_path, num_ranks, num_tensors, sleeps)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "all sums are right\n"


@pytest.mark.parametrize(
    ("right", "wrong", "report"),
    [
        ("published, ++g->events)", "published, ++g->events, memory_order_relaxed)", "data race"),
        ("SLOTS = 4", "SLOTS = 2", "data race|wrong sum"),  # depends on which error occurs first
        ("(request & 255) == (uint64_t)g->rank + 1", "(request & 255) == (uint64_t)g->rank + 2", "it was not woken"),
    ],
)
def test_the_stress_test_detects_injected_bugs(tmp_path: Path, right: str, wrong: str, report: str):
    source = SOURCE.read_text()
    assert right in source
    source = source.replace(right, wrong)
    if "relaxed" in wrong:
        source = source.replace("atomic_store(&own->published", "atomic_store_explicit(&own->published")
    (tmp_path / SOURCE.name).write_text(source)
    done = stress(tmp_path / SOURCE.name, tmp_path, 3, 1000, 1)
    assert done.returncode != 0
    assert re.search(report, done.stderr), done.stderr[-3000:]


def wait_for_a_late_rank(is_asynchronous: bool) -> tuple[float, float]:
    rank = start_shm()
    dist.all_reduce(torch.ones(4))
    if rank == 1:
        time.sleep(1.5)
    start, cpu_start = time.monotonic(), time.process_time()
    work = dist.all_reduce(torch.ones(100_000), async_op=is_asynchronous)
    if work is not None:
        work.wait()
    return time.monotonic() - start, time.process_time() - cpu_start


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("implementation", ["compiled", "in rounds"])
def test_a_rank_that_waits_sleeps(implementation: str, is_asynchronous: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ranks.rank_environment, NATIVE_VARIABLE, "1" if implementation == "compiled" else "0")
    seconds, cpu_seconds = run_ranks(wait_for_a_late_rank, is_asynchronous)[0]
    assert seconds > 1
    assert cpu_seconds < 0.2


def differ(difference: str) -> None:
    rank = start_shm(timeout_s=20)
    if difference == "dtype":
        dist.all_reduce(torch.ones(8, dtype=torch.int32 if rank else torch.float32))
    elif difference == "dtype, in rounds":
        dist.all_reduce(torch.ones(8, dtype=torch.int16 if rank else torch.float16))
    elif difference == "op":
        dist.all_reduce(torch.ones(8), op=ReduceOp.AVG if rank else ReduceOp.SUM)
    elif difference == "size":
        dist.all_reduce(torch.ones(100_000 * (1 + rank)))


@pytest.mark.parametrize(
    ("difference", "expected_texts"),
    [
        ("dtype", ["8 x float32 (SUM)", "8 x int32 (SUM)"]),
        ("dtype, in rounds", ["all_reduce of torch.float16", "all_reduce of torch.int16"]),
        ("op", ["8 x float32 (SUM)", "8 x float32 (AVG)"]),
        ("size", ["100000 x float32 (SUM)", "200000 x float32 (SUM)"]),
    ],
)
def test_the_error_of_ranks_that_reduce_different_tensors_names_the_difference(
    difference: str, expected_texts: list[str]
):
    start = time.monotonic()
    for outcome in outcomes_of_ranks(differ, difference):
        assert outcome.error is not None, outcome
        assert "do not call the same collectives" in outcome.error
        assert all(text in outcome.error for text in expected_texts), outcome
    assert time.monotonic() - start < 12


def reduce_into_shared_memory_on_one_rank(numel: int) -> str:
    rank = start_shm(timeout_s=20)
    group, tensor = dist.group.WORLD, torch.ones(numel)
    memory = group.share_memory(tensor.nbytes)
    pointers = (ctypes.c_void_p * 2)(*(each.data_ptr() for each in memory))
    copies = SharedCopies(memory[rank].view(tensor.dtype), pointers, memory)
    start = partial(group.all_reduce_into, copies, tensor) if rank == 0 else partial(group.allreduce, [tensor])
    with pytest.raises(dist.DistBackendError) as caught:
        start(dist.AllreduceOptions()).wait()
    return str(caught.value)


@pytest.mark.parametrize("numel", [8, 100_000])
def test_ranks_that_differ_in_the_memory_of_the_result_get_an_error(numel: int):
    for text in run_ranks(reduce_into_shared_memory_on_one_rank, numel):
        assert "do not call the same collectives" in text
        assert f"{numel} x float32 (SUM) into shared memory" in text


def reduce_in_two_groups() -> tuple[float, bool]:
    start_shm()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, group=dist.new_group(backend="shm"))
    return tensor.sum().item(), dist.group.WORLD._native is not None


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({NATIVE_VARIABLE: "0"}, f"{NATIVE_VARIABLE}=0"),
        ({"CC": "no-such-compiler"}, "there is no C compiler (no-such-compiler)"),
        ({"CC": "false -v"}, "false fails"),
    ],
)
def test_without_a_native_library_operations_use_rounds_and_the_reason_is_logged(
    environment: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    for name, value in {user_cache.CACHE_VARIABLE: str(tmp_path), **environment}.items():
        monkeypatch.setitem(ranks.rank_environment, name, value)
    outcomes = outcomes_of_ranks(reduce_in_two_groups)
    assert [outcome.value for outcome in outcomes] == [(12.0, False)] * 2, str(outcomes[0])
    messages = [[line for line in outcome.output.splitlines() if "in Python" in line] for outcome in outcomes]
    assert [len(lines) for lines in messages] == [1, 0]
    assert reason in messages[0][0]


def reduce_where_one_has_no_compiler() -> tuple[float, bool]:
    if os.environ["LOCAL_RANK"] == "1":
        os.environ[NATIVE_VARIABLE] = "0"
    return reduce_in_two_groups()


def test_all_ranks_use_rounds_if_one_rank_lacks_the_native_library():
    assert run_ranks(reduce_where_one_has_no_compiler, world_size=3) == [(27.0, False)] * 3


@pytest.fixture
def cached_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provides the empty cache directory of the library."""
    monkeypatch.setenv(user_cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(NATIVE_VARIABLE, raising=False)
    library.cache_clear()
    return tmp_path / "cache" / "shm"


def test_the_library_is_compiled_once(cached_library: Path, monkeypatch: pytest.MonkeyPatch):
    library()
    (made,) = cached_library.iterdir()
    monkeypatch.setenv("CC", "no-such-compiler")
    library.cache_clear()
    assert library().functions.all_reduce_group_bytes() > 0
    assert list(cached_library.iterdir()) == [made]


def test_a_file_that_is_no_native_library_is_compiled_again(cached_library: Path):
    library()
    (made,) = cached_library.iterdir()
    made.unlink()  # this process has the file mapped
    made.write_text("an incomplete file, for example after a full disk")
    load = "from lightning_strategies_ext.shm.native_build import library; print(repr(library().uncached_reason))"
    assert run_script("-c", load).stdout == "''\n"
    assert made.stat().st_size > 1000


def test_a_cache_that_is_not_writable_is_ignored(cached_library: Path):
    cached_library.parent.write_text("a file where the directory should be")
    assert library().functions.all_reduce_group_bytes() > 0


def test_a_compiler_that_fails_is_quoted(cached_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'out of order' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(NativeLibraryError, match="out of order"):
        library()
    compiler.write_text("#!/bin/sh\necho 'it ran again' >&2\nexit 3\n")
    with pytest.raises(NativeLibraryError, match="out of order"):
        library()


def test_a_library_of_another_version_in_the_wheel_is_ignored(
    cached_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source, of_another_version = tmp_path / "empty.c", tmp_path / "all_reduce.so"
    source.write_text("int all_reduce_group_bytes(void) { return 0; }")
    subprocess.run([*compiler.command(), *compiler.FLAGS, "-o", of_another_version, source], check=True)
    monkeypatch.setattr(native_build, "IN_WHEEL", of_another_version)
    assert library().functions.all_reduce_group_bytes() > 0


def test_a_long_compiler_error_is_quoted_from_the_start_of_a_line(tmp_path):
    compiler = tmp_path / "cc"
    lines = [f"error {number:03}: undeclared" for number in range(40)]
    compiler.write_text("#!/bin/sh\ncat >&2 <<END\n" + "\n".join(lines) + "\nEND\nexit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(NativeLibraryError) as caught:
        compile_library([str(compiler)], tmp_path / "library.so")
    quoted = str(caught.value).partition("fails: ")[2].splitlines()
    assert quoted == lines[-len(quoted) :]
    assert len(quoted) == 13  # 298 characters of at most 300


def test_python_code_and_the_library_have_the_same_constants():
    source = SOURCE.read_text()
    constants = {name: int(value) for name, value in re.findall(r"\b([A-Z_]+) = (\d+)", source)}
    assert constants["SLOTS"] == NUM_SLOTS
    assert constants["MAX_RANKS"] == MAX_RANKS
    assert constants["LINE"] == LINE_NUM_BYTES
    assert constants["WAKE_BYTES"] <= HEADER.size
    assert {name: constants[name] for name in ("DONE", "WAITS", "MISMATCH")} == {"DONE": 0, "WAITS": 1, "MISMATCH": 2}
    masks = re.search(r"FIELDS\[\] = \{(.*)\}", source)
    assert masks is not None
    assert tuple(int(mask, 16) for mask in masks[1].split(",")) == FIELDS


def test_the_source_compiles_without_a_warning(tmp_path: Path):
    command = [*compiler.command(), *compiler.FLAGS, "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    subprocess.run([*command, "-o", tmp_path / "library.so", SOURCE], check=True)
