"""Reads the account: ``accounts/*.md`` and ``hashes.json``.

An entry of the account is for one method of this package and one method of Lightning. There are two forms. A line::

    - `pytorch.buckets.BucketsByTrial.__getstate__` overrides `lightning...strategy:Strategy.__getstate__`: super; ...

with "abstract" (Lightning's method does nothing, or must be overridden), "super" (it is called), or "as `...`" (the
entry of the named method of this package for the same method of Lightning) after the colon. Or a heading, with the code
of Lightning's method, each part of it followed by "done: ..." or "not needed: ...". A line of code that only some
releases have ends in ``  # until 2.5.6`` or ``  # from 2.6.0``.
"""

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.overrides.sources import renamed

DIRECTORY = Path(__file__).parent
HASHES = DIRECTORY / "hashes.json"
_LINE = re.compile(r"- `([^`]+)` (?:overrides|replaces) `([^`]+)`: (abstract|super|as `([^`]+)`)(.*)")
_HEADING = re.compile(r"## `([^`]+)` (?:overrides|replaces) `([^`]+)`")
_RANGE = re.compile(r"(.*?)(?:  # (?:from (\S+?))?(?: ?until (\S+))?)?$")


@dataclass
class Entry:
    """Account of one method of this package for one method of Lightning.

    Attributes:
        override: Qualified name of this package's method.
        overridden: Qualified name of Lightning's method.
        kind: "abstract", "super", "as" or "lines".
        reference: For "as", the method of this package whose entry applies.
        code: For "lines", Lightning's code as quoted.
        accounts: For "lines", the account of each part of the code; empty if there is none.
    """

    override: str
    overridden: str
    kind: str
    reference: str | None = None
    code: list[str] = field(default_factory=list)
    accounts: list[str] = field(default_factory=list)

    def code_in(self, version: str) -> list[str]:
        """Returns the lines that a release has."""
        found = []
        for line in self.code:
            match = _RANGE.fullmatch(line)
            assert match is not None
            text, first, last = match.groups()
            if (first is None or order(first) <= order(version)) and (last is None or order(version) <= order(last)):
                found.append(text)
        return found


def order(version: str) -> tuple[int, ...]:
    """Returns a key by which releases are sorted."""
    return tuple(map(int, re.findall(r"\d+", version)))


def read() -> list[Entry]:
    """Returns all entries."""
    entries: list[Entry] = []
    for path in sorted(DIRECTORY.glob("accounts/*.md")):
        entries += parse(path.read_text())
    return entries


def parse(text: str) -> list[Entry]:
    """Returns the entries of a text.

    Raises:
        ValueError: If a line is in neither form.
    """
    entries: list[Entry] = []
    current: Entry | None = None
    was_code = False
    for line in text.splitlines():
        if heading := _HEADING.fullmatch(line):
            current = Entry(heading[1], renamed(heading[2]), "lines")
            entries.append(current)
            was_code = False
        elif line.startswith("- `"):
            match = _LINE.match(line)
            if match is None:
                raise ValueError(f"Not an entry: {line}")
            kind = match[3].partition(" ")[0]
            entries.append(Entry(match[1], renamed(match[2]), kind, match[4]))
            current = None
        elif line.startswith("    ") and current is not None:
            current.code.append(line.removeprefix("    "))
            if not was_code:
                current.accounts.append("")
            was_code = True
        elif line.strip() and current is not None:
            if not current.accounts:
                raise ValueError(f"{current.override}: an account without code: {line}")
            current.accounts[-1] = f"{current.accounts[-1]} {line}".strip()
            was_code = False
    return entries


def read_hashes() -> dict[str, dict[str, str]]:
    """Returns, by method of Lightning and release, the hash of its code; "-" where the release has no such method."""
    stored: dict[str, dict[str, str]] = json.loads(HASHES.read_text()) if HASHES.exists() else {}
    return {
        method: {version: code for code, versions in by_hash.items() for version in versions.split()}
        for method, by_hash in stored.items()
    }


def write_hashes(hashes: dict[str, dict[str, str]]) -> None:
    """Writes what :func:`read_hashes` returns, with the releases of each hash in one string."""
    stored: dict[str, dict[str, str]] = {}
    for method, by_version in sorted(hashes.items()):
        by_hash: dict[str, list[str]] = {}
        for version in sorted(by_version, key=order):
            by_hash.setdefault(by_version[version], []).append(version)
        stored[method] = {code: " ".join(versions) for code, versions in by_hash.items()}
    HASHES.write_text(json.dumps(stored, indent=1) + "\n")


def merged(by_version: dict[str, list[str]]) -> list[str]:
    """Returns the code of a method in several releases as an entry quotes it.

    Args:
        by_version: The lines, by release; without those releases that do not have the method.
    """
    versions = sorted(by_version, key=order)
    rows: list[tuple[str, set[str]]] = []
    for version in versions:
        before, now = [text for text, _ in rows], by_version[version]
        new: list[tuple[str, set[str]]] = []
        for operation, a, b, c, d in difflib.SequenceMatcher(None, before, now, autojunk=False).get_opcodes():
            if operation == "equal":
                new += [(text, has | {version}) for text, has in rows[a:b]]
            else:
                new += rows[a:b]
                new += [(text, {version}) for text in now[c:d]]
        rows = new
    return [text + _range(has, versions) for text, has in rows]


def _range(has: Iterable[str], versions: list[str]) -> str:
    own = sorted(has, key=order)
    first = f"from {own[0]}" if own[0] != versions[0] else ""
    last = f"until {own[-1]}" if own[-1] != versions[-1] else ""
    return f"  # {first} {last}".replace("#  ", "# ").rstrip() if first or last else ""
