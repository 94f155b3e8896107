"""Runs a case with a strategy of this package and with its reference, and finds differences.

with Pools() as pools:
    result = check(draw("ddp_ext", 17), pools)
assert not result.differences, result
"""

import pickle
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.cases import Case
from tests.fuzz.pool import CASE_LIMIT_S, Pool
from tests.fuzz.training import run
from tests.support.rank_pool import Outcome

#: Relative and absolute tolerance in float64, where only the order of additions differs.
TOLERANCE = 1e-7
#: Tolerances of logged values in float32. This package adds the ranks' values in the order of ranks, and divides a sum
#: by a number of samples. Lightning divides a mean by a mean, and gloo adds the values of more than two ranks in a
#: different order.
TOLERANCE_OF_METRICS = 1e-6
#: Parts of a state that contain logged values.
METRICS = ("callback_metrics", "logged_metrics")
#: Exceptions with which a strategy or Lightning rejects a combination.
REFUSALS = ("ValueError", "MisconfigurationException", "TypeError", "NotImplementedError")
#: A value that is not compared.
_ANY = object()


@dataclass
class Result:
    """The result of a case.

    Attributes:
        kind: "right", "refused" by the strategy under test, "both raise", or "wrong".
        differences: Differences between the strategy under test and the reference.
    """

    case: Case
    kind: str
    differences: list[str] = field(default_factory=list)
    note: str = ""

    def __str__(self) -> str:
        return "\n".join([f"{self.kind}: {self.case}", *self.differences[:12], self.note])


class Pools:
    """All processes that run cases; the first case that needs a process starts it."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, int], Pool] = {}

    def __enter__(self) -> "Pools":
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()

    def run(self, case: Case, kind: str, directory: Path, limit_s: float) -> list[Outcome]:
        directory.mkdir()
        pool = _pool_of(case, kind)
        return self._pools.setdefault(pool, Pool(*pool)).run(run, case, kind, directory, limit_s=limit_s)


def _pool_of(case: Case, kind: str) -> tuple[str, int]:
    if kind == "one" or (kind == "ext" and case.strategy in ("dp_ext", "ddp_spawn_ext", "ddp_fork_ext")):
        return "single", 1
    return "horovod" if kind == "ext" and case.strategy == "horovod_ext" else "torch", case.world_size


def check(case: Case, pools: Pools, limit_s: float = CASE_LIMIT_S) -> Result:
    """Runs a case and its reference, and returns the result."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        ext = pools.run(case, "ext", directory / "ext", limit_s)
        failed = [outcome for outcome in ext if outcome.error is not None]
        if failed and all(outcome.error[0] in REFUSALS for outcome in failed if outcome.error is not None):
            error = failed[0].error
            assert error is not None
            if "lightning_strategies_ext" in failed[0].trace.splitlines()[-2] + _raised_in(failed[0].trace):
                return Result(case, "refused", note=f"{error[0]}: {error[1]}"[:300])
        kind = {"ddp": "stock", "one": "one", "none": ""}[case.reference]
        reference = pools.run(case, kind, directory / "reference", limit_s) if kind else []
        if failed:
            return _of_failed(case, failed[0], reference)
        if any(outcome.error is not None for outcome in reference):
            note = next(f"{outcome.error}\n{outcome.trace}" for outcome in reference if outcome.error is not None)
            return Result(case, "wrong", ["only the reference raises"], note)
        differences = list(_compare(case, ext, reference, directory))
        return Result(case, "wrong" if differences else "right", differences)


def _raised_in(trace: str) -> str:
    """Returns the last file of a traceback."""
    files = re.findall(r'File "([^"]+)"', trace)
    return files[-1] if files else ""


def _of_failed(case: Case, failed: Outcome, reference: list[Outcome]) -> Result:
    assert failed.error is not None
    classes = {outcome.error[0] for outcome in reference if outcome.error is not None}
    texts = {outcome.error[1][:60] for outcome in reference if outcome.error is not None}
    if failed.error[0] in classes or any(text in failed.error[1] + failed.trace for text in texts):
        return Result(case, "both raise", note=f"{failed.error[0]}: {failed.error[1]}"[:300])
    note = f"{failed.error[0]}: {failed.error[1]}\n{failed.trace}"
    return Result(case, "wrong", ["the strategy raises", f"the reference: {classes or 'no exception'}"], note)


def _compare(case: Case, ext: list[Outcome], reference_outcomes: list[Outcome], directory: Path) -> Any:
    num_stages = 1 + len(case.later)
    if case.reference == "none":
        yield from _agree(case, directory / "ext", num_stages)
        return
    tolerance = TOLERANCE if case.is_close_enough else 0.0
    tolerance_of_metrics = max(tolerance, TOLERANCE_OF_METRICS if case.world_size > 2 else 0.0)

    def compare(own: Any, other: Any, where: str) -> Any:
        for names, limit in (({*own, *other} - {*METRICS}, tolerance), (METRICS, tolerance_of_metrics)):
            parts = [{key: state[key] for key in state if key in names} for state in (own, other)]
            yield from differences(*parts, where, limit)

    for number in range(num_stages):
        stage = ("fit", *case.later)[number]
        ranks = [_state(directory / "ext", number, rank) for rank in range(_num_states(case))]
        is_spawned = case.strategy in ("ddp_spawn_ext", "ddp_fork_ext")
        if is_spawned and stage not in ("fit", "resume"):
            # Workers of a later stage have no optimizers; the main process has those of `fit`.
            ranks = [{**rank, "optimizers": _ANY, "schedulers": _ANY} for rank in ranks]
        # Lightning's `ddp` seeds the random generators again in each stage. Those of workers continue.
        draws_otherwise = is_spawned and number > 0
        if draws_otherwise:
            ranks = [{**rank, "random": _ANY} for rank in ranks]
        if case.reference == "ddp":
            references = [_state(directory / "reference", number, rank) for rank in range(case.world_size)]
        else:
            references = [_state(directory / "reference", number, 0)] * len(ranks)
            samples = _joined([rank.pop("samples") for rank in ranks])
            for reference in references[:1]:
                yield from differences(samples, _joined([reference.pop("samples")]), f"{number} {stage}: samples")
            for state in [*ranks, *references]:
                state["random"] = _ANY
        for rank, (state, reference) in enumerate(zip(ranks, references, strict=True)):
            yield from compare(state, reference, f"{number} {stage}: rank {rank}")
        # The state of the process that calls the Trainer, and the return value of the stage.
        for rank, outcome in enumerate(ext):
            other = reference_outcomes[rank] if len(reference_outcomes) > rank else reference_outcomes[0]
            own, reference = outcome.value.states[number], other.value.states[number]
            if case.reference == "one" or draws_otherwise:
                own["random"] = _ANY
            yield from compare(own, reference, f"{number} {stage}: caller {rank}")
        returned = [outcome.value.returned[number] for outcome in ext]
        expected = [outcome.value.returned[number] for outcome in reference_outcomes]
        if stage == "predict":
            yield from differences(
                _by_sample(returned), _by_sample(expected), f"{number} {stage}: predictions", tolerance
            )
        else:
            yield from differences(returned[0], expected[0], f"{number} {stage}: returned", tolerance_of_metrics)
    yield from _compare_checkpoints(directory, tolerance)


def _num_states(case: Case) -> int:
    return 1 if case.strategy == "dp_ext" else case.world_size


def _state(directory: Path, number: int, rank: int) -> dict[str, Any]:
    return pickle.loads((directory / f"stage-{number}.rank-{rank}").read_bytes())


def _joined(ranks: list[list[tuple[str, list[int]]]]) -> list[tuple[str, list[int]]]:
    """Returns the samples of each global batch."""
    return [
        (batches[0][0], sorted(number for _, numbers in batches for number in numbers))
        for batches in zip(*ranks, strict=False)
    ]


def _by_sample(returned: list[Any]) -> dict[int, Tensor]:
    """Returns the predictions of all ranks, by number of the sample."""
    values: dict[int, Tensor] = {}
    for batches in returned:
        for batch in batches:
            for index, value in zip(batch["index"].tolist(), batch["value"], strict=True):
                values[index] = value
    return dict(sorted(values.items()))


def _agree(case: Case, directory: Path, num_stages: int) -> Any:
    """Checks a case without a reference: ranks must have equal parameters and progress, and finite numbers."""
    for number in range(num_stages):
        paths = sorted(directory.glob(f"stage-{number}.rank-*"))
        states = [pickle.loads(path.read_bytes()) for path in paths]
        if not states:
            yield f"no rank has finished stage {number}"
            continue
        first = states[0]
        has_buffers = "batch_norm" in case.blocks or "buffer" in case.blocks
        for rank, state in enumerate(states[1:], 1):
            parameters = [
                {name: one["model"][name] for name in one["requires_grad"]} if has_buffers else one["model"]
                for one in (first, state)
            ]
            yield from differences(*parameters, f"stage {number}: ranks 0 and {rank}: model")
            yield from differences(
                first["progress"], state["progress"], f"stage {number}: ranks 0 and {rank}: progress"
            )
        for name, tensor in first["model"].items():
            if not torch.isfinite(tensor).all():
                yield f"stage {number}: {name} is not finite"
        if number == 0 and case.max_steps == -1 and not case.callback and first["progress"][1] != case.max_epochs:
            yield f"stage 0 ended in epoch {first['progress'][1]} of {case.max_epochs}"


def _compare_checkpoints(directory: Path, tolerance: float) -> Any:
    files = [
        {str(path.relative_to(directory / run)): path for path in sorted((directory / run).rglob("*.ckpt"))}
        for run in ("ext", "reference")
    ]
    if files[0].keys() != files[1].keys():
        yield f"checkpoints: {sorted(files[0])} and {sorted(files[1])}"
        return
    for name in files[0]:
        own, other = (
            _without_paths(torch.load(one[name], weights_only=False), str(directory / run))
            for one, run in zip(files, ("ext", "reference"), strict=True)
        )
        yield from differences(own, other, f"checkpoint {name}", tolerance)


def _without_paths(value: Any, directory: str) -> Any:
    if isinstance(value, dict):
        return {_without_paths(key, directory): _without_paths(one, directory) for key, one in value.items()}
    if isinstance(value, str | Path):
        return str(value).replace(directory, "DIRECTORY")
    return value


def differences(own: Any, other: Any, where: str, tolerance: float = 0.0) -> Any:
    """Yields the differences of two values of builtin types and tensors."""
    if own is _ANY:
        return
    if isinstance(own, Tensor) and isinstance(other, Tensor):
        if own.is_sparse and other.is_sparse:
            yield from differences(own.to_dense(), other.to_dense(), where, tolerance)
        elif own.dtype != other.dtype or own.shape != other.shape:
            yield f"{where}: {own.dtype} {tuple(own.shape)} and {other.dtype} {tuple(other.shape)}"
        elif own.is_floating_point() and tolerance:
            if not torch.allclose(own, other, rtol=tolerance, atol=tolerance, equal_nan=True):
                yield f"{where}: differs by {(own - other).abs().max()}"
        elif not torch.equal(own.nan_to_num(7.0), other.nan_to_num(7.0)):
            yield f"{where}: differs by {(own.double() - other.double()).abs().max()}"
    elif isinstance(own, dict) and isinstance(other, dict):
        if own.keys() != other.keys():
            yield f"{where}: keys {sorted(map(str, own.keys() ^ other.keys()))} on one side only"
        for key in own:
            if key in other:
                yield from differences(own[key], other[key], f"{where}.{key}", tolerance)
    elif isinstance(own, list | tuple) and isinstance(other, list | tuple):
        if len(own) != len(other):
            first = next((i for i, (a, b) in enumerate(zip(own, other, strict=False)) if _differ(a, b)), None)
            yield f"{where}: {len(own)} and {len(other)} entries, from {first} on: {own[-3:]}, {other[-3:]}"
            return
        for index, (one, two) in enumerate(zip(own, other, strict=True)):
            yield from differences(one, two, f"{where}[{index}]", tolerance)
    elif isinstance(own, float) and isinstance(other, float):
        if own != other and not (own != own and other != other) and abs(own - other) > tolerance * (1 + abs(own)):
            yield f"{where}: {own} and {other}"
    elif type(own) is not type(other) or (_is_plain(own) and own != other):
        yield f"{where}: {own!r} and {other!r}"


def _differ(own: Any, other: Any) -> bool:
    return any(True for _ in differences(own, other, ""))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | bool)
