"""Measured side of ``--against REV``: a process of one revision, which measures a row in each of its turns.

:mod:`benchmarks.against` starts one such process per revision, with ``python -m benchmarks.turns``. The process builds
the rows of a :class:`Part`, connects to the comparing process and sends the rows that it has. Then it receives the name
of a row, measures it once, sends the figures, and waits for the next name.

If several ranks measure the rows, rank 0 has the connection. The other ranks wait in the store for the name, without
using their cores, while the other revision measures.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib import import_module
from itertools import count
from multiprocessing.connection import Client
from typing import Any

import torch.distributed as dist

from benchmarks import names, rank_launcher

#: Timeout of a rank for its next turn. The other revision measures in the meantime.
TURN_TIMEOUT = timedelta(hours=12)


@dataclass(frozen=True)
class Row:
    """A row of the table, or several rows that are measured together.

    Attributes:
        measure: Measures once and returns the figures by name. Smaller figures are better.
        needs: Keys of :data:`benchmarks.names.NAMES` without which a revision does not have the row.
    """

    measure: Callable[[], dict[str, float]]
    needs: Sequence[str] = ()


@dataclass(frozen=True)
class Part:
    """Rows of a benchmark that are measured in the same processes.

    Attributes:
        rows: Function that returns the rows by name, as ``module:function``. It runs on every rank.
        arguments: Keyword arguments of the function, of types of JSON.
        rounds: Number of times that each row is measured.
        num_ranks: Number of ranks that measure together; 0 if one process without a process group measures.
        backend: Backend of the ranks' first process group.
    """

    rows: str
    rounds: int
    arguments: dict[str, Any] = field(default_factory=dict)
    num_ranks: int = 0
    backend: str = "gloo"

    def to_json(self) -> str:
        """Returns the part as a command-line argument."""
        return json.dumps(asdict(self))


def take_turns(part: Part, address: str, chosen: Sequence[str]) -> None:
    """Measures rows until there are no more turns. Every rank of the part runs this.

    Args:
        part: The part to measure.
        address: Socket of the comparing process.
        chosen: Substrings that select rows by name; empty for all rows.
    """
    module, _, function = part.rows.partition(":")
    rows: dict[str, Row] = getattr(import_module(module), function)(**part.arguments)
    rows = {name: row for name, row in rows.items() if not chosen or any(text in name for text in chosen)}
    rank = dist.get_rank() if part.num_ranks else 0
    connection = Client(address, "AF_UNIX") if rank == 0 else None
    if connection:
        connection.send({name: names.find_missing(row.needs) for name, row in rows.items()})
    for turn in count():
        name = connection.recv() if connection else None
        if part.num_ranks:
            name = rank_launcher.send_to_all(f"turn {turn}", name, TURN_TIMEOUT)
        if name is None:
            return
        figures = rows[name].measure()
        if part.num_ranks:  # a job is as slow as its slowest rank
            per_rank = rank_launcher.collect_on_first(f"figures {turn}", figures, TURN_TIMEOUT)
            figures = {figure: max(one[figure] for one in per_rank) for figure in figures} if per_rank else {}
        if connection:
            connection.send(figures)


def build() -> None:
    """Builds the native library of the revision, in the cache directory that the environment names."""
    if names.find_missing(["load_native_library"]):
        return  # a revision with another name builds the library at its first use
    try:
        names.load_native_library()
    except names.NativeLibraryError as error:
        sys.exit(f"the native library was not built, and Python code replaces it: {error}")


def main() -> None:
    """Runs in the process of one revision: builds, or measures a part."""
    if sys.argv[1:] == ["--build"]:
        build()
        return
    part, address, chosen = Part(**json.loads(sys.argv[1])), sys.argv[2], sys.argv[3:]
    if part.num_ranks:
        rank_launcher.run_ranks(take_turns, part, address, chosen, world_size=part.num_ranks, backend=part.backend)
    else:
        take_turns(part, address, chosen)


if __name__ == "__main__":
    main()
