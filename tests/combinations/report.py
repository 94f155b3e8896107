"""Writes ``docs/combinations.md`` from the results of cells."""

from collections import Counter
from string import ascii_letters

from tests.combinations.features import FEATURES
from tests.combinations.table import ALL_PAIRS, STRATEGIES, cells_of

_TOP = """\
# Combinations of features

`make combinations` trains a small model with each feature and each pair of features, and writes this page. The model
and the settings are in [`tests/combinations`](../tests/combinations/features.py). A cell compares two ranks with one
device that trains on the whole batches. With `dp_ext`, it compares two replicas. It compares parameters, states of
optimizers, learning rates, logged metrics, results of `validate` and `test`, and predictions. Parameters of the ranks
must be bitwise equal. The distance to the parameters of one device may be as large as the feature's rounding and
omissions permit. It is relative to the distance that training covers:

| features | maximum distance |
| --- | --- |
| bf16-mixed; compression bf16 and fp16; Horovod: fp16 | a tenth |
| bf16-true; compression powersgd, localsgd and diloco | a half |
| Horovod: adasum, which adds orthogonal gradients | the whole distance |
| all other features, `TopK(fraction=1.0)` included | rounding of float32 |

With "missing loss: skip" and "NaN loss: skip", rank 1 has no finite loss in two of four batches, where one device uses
only the samples of rank 0. With "exact evaluation", rank 0 has one validation batch more than rank 1.

LBFGS amplifies rounding, so its cells train with `precision="64-true"`, unless the other feature is a precision.

A pair that cannot work is refused with one message, which names both features and an alternative. "As alone" means that
one device, or Lightning's `ddp`, raises the same exception of torch or Lightning in the same training.

`ddp_spawn_ext` and the strategies below it in the table, and Fabric, train each feature alone. The strategies that
start workers also train the pairs that involve the launcher.
"""
_MARKS = {"right": "·", "wrong": "!", "as alone": "="}


def report(results: dict[str, dict[str, list[str]]]) -> str:
    """Returns the page.

    Args:
        results: Results by strategy and cell (names joined by " + "), the status and the text of each.
    """
    of_strategies = [strategy for strategy in STRATEGIES if strategy in results]
    statuses = ("right", "refused", "as alone", "wrong")
    lines = [
        _TOP,
        "## Summary",
        "",
        f"| strategy | cells that were run, of all | {' | '.join(statuses)} |",
        "| --- " * 6 + "|",
    ]
    for strategy in of_strategies:
        counts = Counter(status for status, _ in results[strategy].values())
        numbers = " | ".join(str(counts[status]) for status in statuses)
        numbers = f"{len(results[strategy])} of {len(cells_of(strategy))} | {numbers}"
        lines.append(f"| [`{strategy}`](#{strategy.replace(' ', '-')}) | {numbers} |")
    lines.append("")
    for strategy in of_strategies:
        lines += _section(strategy, results[strategy])
    return "\n".join(lines)


def _section(strategy: str, cell_results: dict[str, list[str]]) -> list[str]:
    texts = dict.fromkeys(text for status, text in cell_results.values() if status in ("refused", "as alone"))
    symbols = dict(zip(texts, ascii_letters, strict=False))
    lines = [f"## {strategy}", ""]
    if strategy in ALL_PAIRS:
        lines += [
            "Column 0 is the feature alone. `·` is right, `!` is wrong, a symbol is a message below."
            " A blank pair excludes itself or was not run.",
            "",
        ]
        lines += ["```text", *_matrix(strategy, cell_results, symbols), "```", ""]
    else:
        right = [name or "no feature" for name, (status, _) in cell_results.items() if status == "right"]
        lines += [f"Right: {'; '.join(right)}.", ""]
    for text, symbol in symbols.items():
        cells = [name for name, cell_result in cell_results.items() if cell_result[1] == text]
        kind = "As alone" if cell_results[cells[0]][0] == "as alone" else "Refused"
        shown = "; ".join(cells[:6]) + (f"; {len(cells) - 6} more" if len(cells) > 6 else "")
        lines += [f"**{symbol}.** {kind}: {shown}.", "", "```text", *_wrapped(text), "```", ""]
    wrong = [f"- **Wrong**: {name}: {text}" for name, (status, text) in cell_results.items() if status == "wrong"]
    return [*lines, *wrong, *([""] if wrong else [])]


def _matrix(strategy: str, cell_results: dict[str, list[str]], symbols: dict[str, str]) -> list[str]:
    names = [feature.name for feature in FEATURES if strategy in feature.strategies]
    width = max(map(len, names))
    lines = [" " * (width + 4) + " ".join(f"{number:>2}" for number in range(len(names)))]
    for number, name in enumerate(names):
        marks = [_mark(cell_results.get(name), symbols)]
        marks += [_mark(cell_results.get(f"{other} + {name}"), symbols) for other in names[:number]]
        lines.append(f"{number + 1:>2}  {name:<{width}}" + " ".join(f"{mark:>2}" for mark in marks).rstrip())
    return lines


def _mark(cell_result: list[str] | None, symbols: dict[str, str]) -> str:
    if cell_result is None:
        return ""
    return symbols.get(cell_result[1], "?") if cell_result[0] in ("refused", "as alone") else _MARKS[cell_result[0]]


def _wrapped(text: str) -> list[str]:
    words, lines = text.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) > 110:
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{word}"
    return lines[:6]
