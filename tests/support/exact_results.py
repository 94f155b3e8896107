"""Results that the evaluations of :mod:`.exact_evaluations` should have, computed without Lightning."""

import random
from collections import defaultdict
from typing import Any

from tests.support.exact_evaluations import EPOCH_HOOKS, NUM_TRAINING_BATCHES, STEP_HOOKS, Case


def is_skipped(case: Case, *, is_sanity_check: bool = False) -> bool:
    """Returns whether Lightning calls no hook of an evaluation, because it knows that there are no batches."""
    if is_sanity_check and not case.num_sanity_steps:
        return True
    are_known = all(samples.kind in ("shards", "sized stream") for samples in case.loaders)
    batches = [case.batches_of(rank, index) for rank in range(case.world_size) for index in range(len(case.loaders))]
    return case.limit == 0 or (are_known and not any(batches))


def evaluations_of(case: Case, rank: int) -> list[dict[str, Any]]:
    """Returns the evaluations that a rank should have, without steps and buffers."""
    are_sanity_checks = [True, *[False] * NUM_TRAINING_BATCHES] if case.stage == "fit" else [False]
    return [
        {"is_sanity_check": each, **evaluation_of(case, rank, is_sanity_check=each)}
        for each in are_sanity_checks
        if not is_skipped(case, is_sanity_check=each)
    ]


def evaluation_of(case: Case, rank: int, *, is_sanity_check: bool) -> dict[str, Any]:
    """Returns the samples and the results of a rank in an evaluation."""
    batches = [batches_of_ranks(case, index, is_sanity_check=is_sanity_check) for index in range(len(case.loaders))]
    seen = [[sample for loader in batches for batch in loader[each] for sample in batch] for each in ranks_of(case)]
    results: dict[str, list[float]] = defaultdict(list)
    for hook, call in case.calls:
        name = f"{hook} {call}"
        results[name] = []
        if hook in STEP_HOOKS:
            for loader in batches:
                for number in range(len(loader[rank])):
                    results[name] += result_of(call, [of[number] for of in loader if number < len(of)], case)
        else:
            results[name] = result_of(call, [[1 + each] for each in ranks_of(case)] if "start" in hook else seen, case)
    if "cat" in case.metrics:
        results["cat"] = sorted(sample for samples in seen for sample in samples)
    generator = random.Random(0)
    for loader in batches:
        for _ in loader[rank]:
            generator.random()
    return {"seen": seen[rank], "results": results, "random": generator.random()}


def ranks_of(case: Case) -> range:
    return range(case.world_size)


def batches_of_ranks(case: Case, index: int, *, is_sanity_check: bool = False) -> list[list[list[int]]]:
    return [case.batches_of(rank, index, is_sanity_check=is_sanity_check) for rank in ranks_of(case)]


def result_of(call: str, samples: list[list[int]], case: Case) -> list[float]:
    """Returns the result of a collective in which ranks with the given samples take part."""
    totals: list[float] = [sum(each) for each in samples]
    lengths = [len(each) for each in samples]
    results: dict[str, list[float]] = {
        "all_gather": [len(samples), *totals],
        "all_gather_dict": [len(samples), *totals, len(samples), *lengths],
        "sum": [sum(totals)],
        "mean": [sum(totals) / len(totals)],
        "broadcast": [case.world_size],
    }
    return results.get(call, [])


def values_of(case: Case) -> dict[str, float]:
    """Returns the values that a case should log, on all ranks."""
    if is_skipped(case):
        return {}
    values: dict[str, float] = {}
    totals = [0.0] * case.world_size
    for index in range(len(case.loaders)):
        batches = batches_of_ranks(case, index)
        suffix = f"/dataloader_idx_{index}" if len(case.loaders) > 1 else ""
        sums = [sum(batch) for of_rank in batches for batch in of_rank]
        totals = [total + sum(map(sum, of_rank)) for total, of_rank in zip(totals, batches, strict=True)]
        if not sums:
            continue
        mean = sum(sums) / sum(len(batch) for of_rank in batches for batch in of_rank)
        reduced = {"log_mean": mean, "log_sum": sum(sums), "log_max": max(sums)}
        for hook, call in case.calls:
            if hook in STEP_HOOKS and call in reduced:
                values[f"{hook}_{call}{suffix}"] = reduced[call]
                if case.logs_steps:
                    values[f"{hook}_{call}_epoch{suffix}"] = reduced[call]
        if "mean" in case.metrics:
            values[f"metric_mean{suffix}"] = mean
    for hook, call in case.calls:
        if hook in EPOCH_HOOKS and call.startswith("log"):
            each = [1.0 + rank for rank in ranks_of(case)] if hook == "epoch_start" else totals
            reduced = {"log_mean": sum(each) / len(each), "log_sum": sum(each), "log_max": max(each)}
            values[f"{hook}_{call}"] = reduced[call]
    return values
