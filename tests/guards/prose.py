"""Rejects retired terms in comments, docstrings, and messages: ``python -m tests.guards.prose``, part of ``make lint``.

``docs/retired_terms.txt`` has the terms. Packages that are not rewritten yet are left out.
"""

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
#: Rewritten so far; the others follow.
CONVERTED = (
    "lightning_strategies_ext/_system",
    "lightning_strategies_ext/failure",
    "lightning_strategies_ext/stage_context.py",
    "docs/glossary.md",
)


def terms() -> list[tuple[re.Pattern[str], str]]:
    """Returns each retired term as a pattern, with the term to use."""
    lines = (REPOSITORY / "docs" / "retired_terms.txt").read_text().splitlines()
    rows = (line.split("\t") for line in lines if line and not line.startswith("#"))
    return [(re.compile(pattern, re.IGNORECASE), use) for pattern, use in rows]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Returns the comments and string literals of a module, or the lines of another file, with line numbers."""
    content = path.read_text()
    if path.suffix != ".py":
        yield from enumerate(content.splitlines(), 1)
        return
    strings = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type in strings:
            yield from enumerate(token.string.splitlines(), token.start[0])


def faults() -> Iterator[str]:
    """Returns each retired term in the packages that have been rewritten."""
    retired = terms()
    for place in CONVERTED:
        root = REPOSITORY / place
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            name = str(path.relative_to(REPOSITORY))
            for number, text in texts(path):
                for pattern, use in retired:
                    if (found := pattern.search(text)) is not None:
                        yield f"{name}:{number}: {found[0]!r} is a retired term; use: {use}"


if __name__ == "__main__":
    found = list(faults())
    sys.stdout.writelines(f"{fault}\n" for fault in found)
    sys.exit(bool(found))
