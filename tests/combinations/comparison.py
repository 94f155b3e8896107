"""Decides whether a cell is right, refused, or wrong."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tests.combinations.cells import Cell, Failure
from tests.combinations.features import closeness_of

#: Maximum distance from the parameters of the reference, relative to the distance that training covers.
SHARES = {"rounded": 0.1, "lossy": 0.5, "summed": 1.0}
#: Statuses. "as alone": one device, or Lightning's `ddp`, raises the same exception.
Status = Literal["right", "refused", "as alone", "wrong"]


@dataclass
class CellResult:
    """The result of a cell.

    Attributes:
        status: See :data:`Status`.
        text: The message of a refusal, or the difference that was found.
    """

    status: Status
    text: str = ""


def compare(cell: Cell, outcomes: list[Any], reference: Any, stock: list[Any] | None = None) -> CellResult:
    """Compares the observations of the ranks with one device, and with Lightning's `ddp` if it has run the cell."""
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    if failures:
        return _compare_failure(cell, failures, len(failures) == len(outcomes), reference, stock)
    if isinstance(reference, Failure):
        return CellResult("wrong", f"one device raises {reference.kind}: {reference.text}")
    problems = _differences_of_ranks(cell, outcomes) or _differences(cell, outcomes, reference)
    if not problems and stock is not None and not any(isinstance(each, Failure) for each in stock):
        problems = [
            f"rank {rank}: {name} differs between the strategy and Lightning's `ddp`"
            for rank, (ext, stock_outcome) in enumerate(zip(outcomes, stock, strict=True))
            for name, value in stock_outcome["weights"].items()
            if not torch.equal(value, ext["weights"][name])
        ]
    return CellResult("wrong", "; ".join(problems[:3])) if problems else CellResult("right")


def _compare_failure(cell: Cell, failures: list[Failure], of_all: bool, reference: Any, stock: Any) -> CellResult:
    first = next((failure for failure in failures if failure.kind != "ended"), failures[0])
    ext = next((failure for failure in failures if failure.module.startswith("lightning_strategies_ext")), None)
    if ext is not None:
        return CellResult("refused", ext.text)
    if isinstance(reference, Failure) and reference.kind == first.kind:
        return CellResult("as alone", f"one device: {reference.kind}: {reference.text[:200]}")
    for failure in stock or ():
        if isinstance(failure, Failure) and failure.kind == first.kind:
            return CellResult("as alone", f"Lightning's `ddp`: {failure.kind}: {failure.text[:200]}")
    return CellResult("wrong", f"{first.kind} in {first.module}: {first.text or first.trace[-600:]}")


def _differences_of_ranks(cell: Cell, outcomes: list[Any]) -> list[str]:
    problems: list[str] = []
    first = outcomes[0]
    averages = any(name in cell for name in ("compression localsgd", "compression diloco", "Horovod: adasum"))
    for rank, other in enumerate(outcomes[1:], 1):
        for name, value in first["weights"].items():
            if "running" not in name and not torch.equal(value, other["weights"][name]):
                distance = (value.double() - other["weights"][name].double()).abs().max().item()
                problems.append(f"ranks 0 and {rank} differ in {name} by {distance:.3g}")
        if not averages and len(first["optimizers"]) == len(other["optimizers"]):
            for state, other_state in zip(first["optimizers"], other["optimizers"], strict=True):
                if len(state) != len(other_state) or not all(map(torch.equal, state, other_state)):
                    problems.append(f"ranks 0 and {rank} differ in the state of an optimizer")
        for name in ("lrs", "steps", "metrics"):
            if first[name] != other[name]:
                problems.append(f"ranks 0 and {rank} differ in {name}: {first[name]} and {other[name]}")
    return problems


def _differences(cell: Cell, outcomes: list[Any], reference: dict[str, Any]) -> list[str]:
    closeness, ext = closeness_of(cell), outcomes[0]
    problems = [
        f"{what}: {ext[what]}, one device: {reference[what]}" for what in ("steps",) if ext[what] != reference[what]
    ]
    if not torch.allclose(torch.tensor(ext["lrs"]), torch.tensor(reference["lrs"])):
        problems.append(f"learning rates {ext['lrs']}, one device: {reference['lrs']}")
    if ext["metrics"].keys() != reference["metrics"].keys():
        problems.append(f"logs {sorted(ext['metrics'])}, one device {sorted(reference['metrics'])}")
        return problems
    if closeness != "exact":
        update_norm = _distance(reference["weights"], reference["before"])
        share = _distance(ext["weights"], reference["weights"]) / update_norm
        if not share <= SHARES[closeness]:
            problems.append(f"parameters differ from one device by {share:.3g} of the distance that training covers")
        return problems
    problems += _unequal("", ext["weights"], reference["weights"])
    problems += _unequal("the metric ", ext["metrics"], reference["metrics"])
    for number, (state, expected) in enumerate(zip(ext["optimizers"], reference["optimizers"], strict=True)):
        if len(state) != len(expected):
            problems.append(f"the state of optimizer {number} has {len(state)} tensors, one device: {len(expected)}")
        else:
            problems += _unequal(
                f"in the state of optimizer {number}: ", dict(enumerate(state)), dict(enumerate(expected))
            )
    for stage in ("validated", "tested"):
        if stage in reference:
            results, expected = (
                {k: torch.tensor(v) for part in o[stage] for k, v in part.items()} for o in (ext, reference)
            )
            problems += (
                _unequal(f"{stage} ", results, expected)
                if results.keys() == expected.keys()
                else [f"{stage}: {results}"]
            )
    if "predicted" in reference:
        rows = [dict(each["predicted"]) for each in outcomes]
        predicted = {index: row for part in rows for index, row in part.items()}
        expected_rows = dict(reference["predicted"])
        if predicted.keys() != expected_rows.keys():
            problems.append(f"predictions of {sorted(predicted)}, one device: {sorted(expected_rows)}")
        else:
            problems += _unequal("prediction ", predicted, expected_rows)
    return problems


def _distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    parts = [(first[name].double() - second[name].double()).flatten() for name in first]
    return torch.cat(parts).norm().item()


def _unequal(prefix: str, ext: dict[Any, Tensor], expected: dict[Any, Tensor]) -> list[str]:
    return [
        f"{prefix}{name} differs by {(value.double() - expected[name].double()).abs().max().item():.3g}"
        for name, value in ext.items()
        if not torch.allclose(value.double(), expected[name].double(), rtol=1e-4, atol=2e-5)
    ]
