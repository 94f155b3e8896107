"""Rejects retired terms: ``python -m tests.guards.prose``, part of ``make lint``.

``docs/retired_terms.txt`` has the terms: phrases, which must not occur in comments, docstrings, messages, and pages,
and identifiers, which must not occur in code. The mirror for ``pytorch_lightning`` is generated, and is not searched.
"""

import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
SEARCHED_PATHS = (
    *("lightning_strategies_ext", "benchmarks", "docs", "examples", "tests"),
    *("CONTRIBUTING.md", "README.md", "SECURITY.md", "Makefile", "hatch_build.py", "noxfile.py"),
)
_SUFFIXES = {".py", ".md", ".c"}
#: Beginnings of paths that are not searched: the mirror, and the test with examples of retired terms.
_NOT_SEARCHED = ("lightning_strategies_ext/pytorch_lightning/", "tests/guards/test_prose.py")
_TEXT_TOKENS = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


class Term(NamedTuple):
    """A retired term.

    Attributes:
        pattern: Pattern that finds it, in a text or as a whole identifier.
        use: What to use instead.
        is_identifier: Whether the term is retired as an identifier only.
        exceptions: Patterns of paths in which the term is allowed.
    """

    pattern: re.Pattern[str]
    use: str
    is_identifier: bool
    exceptions: tuple[str, ...]


def read_terms(lines: Iterable[str]) -> list[Term]:
    """Returns the terms of a file; the first lines of the file describe the format."""
    terms = []
    for line in lines:
        if line and not line.startswith("#"):
            pattern, use, *exceptions = line.split("\t")
            is_identifier = pattern.startswith("=")
            compiled = re.compile(pattern.removeprefix("="), 0 if is_identifier else re.IGNORECASE)
            terms.append(Term(compiled, use, is_identifier, tuple(exceptions)))
    return terms


def find_terms(content: str, terms: Iterable[Term], *, is_python: bool) -> Iterator[tuple[int, str, Term]]:
    """Returns each retired term in a module, or in another text, with its line number."""
    for number, text, is_identifier in _parts(content, is_python):
        for term in terms:
            if term.is_identifier == is_identifier:
                found = term.pattern.fullmatch(text) if is_identifier else term.pattern.search(text)
                if found is not None:
                    yield number, found[0], term


def _parts(content: str, is_python: bool) -> Iterator[tuple[int, str, bool]]:
    """Returns lines of comments and strings, identifiers, and names of tests as text.

    Returns:
        Line number, text, and whether the text is an identifier.
    """
    if not is_python:
        yield from ((number, line, False) for number, line in enumerate(content.splitlines(), 1))
        return
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type in _TEXT_TOKENS:
            yield from ((number, line, False) for number, line in enumerate(token.string.splitlines(), token.start[0]))
        elif token.type == tokenize.NAME:
            yield token.start[0], token.string, True
            if token.string.startswith("test_"):
                yield token.start[0], token.string.replace("_", " "), False


def faults() -> Iterator[str]:
    """Returns each retired term in the searched places."""
    terms = read_terms((REPOSITORY / "docs" / "retired_terms.txt").read_text().splitlines())
    for path in SEARCHED_PATHS:
        root = REPOSITORY / path
        paths = sorted(root.rglob("*")) if root.is_dir() else [root]
        for path in paths:
            name = str(path.relative_to(REPOSITORY))
            if name.startswith(_NOT_SEARCHED) or (path != root and path.suffix not in _SUFFIXES):
                continue
            applicable = [term for term in terms if not any(fnmatch(name, each) for each in term.exceptions)]
            for number, found, term in find_terms(path.read_text(), applicable, is_python=path.suffix == ".py"):
                yield f"{name}:{number}: {found!r} is a retired term; use: {term.use}"


if __name__ == "__main__":
    found = list(faults())
    sys.stdout.writelines(f"{fault}\n" for fault in found)
    sys.exit(bool(found))
