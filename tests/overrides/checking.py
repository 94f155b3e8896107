"""Compares the account with the code of a release of Lightning."""

import re
from collections.abc import Sequence

from tests.overrides.accounts import Entry
from tests.overrides.finding import find, targets_in
from tests.overrides.replacing import REPLACED
from tests.overrides.sources import Release, body_of

_NOTHING = ("...", "pass", "return", "return None")


def expected_pairs(release: Release) -> set[tuple[str, str]]:
    """Returns the methods of this package, each with the method of Lightning that it replaces in a release."""
    found = find()
    pairs = set()
    for override, by_target in found.overrides.items():
        for chain in by_target.values():
            pairs |= {(override, overridden) for overridden in targets_in(chain, found.sources[override], release)}
    replaced = {(override, overridden) for override, targets in REPLACED.items() for overridden in targets}
    return pairs | {pair for pair in replaced if release.source_of(pair[1]) is not None}


def problem_of(entry: Entry, entries: Sequence[Entry], release: Release) -> str | None:
    """Returns the problem of an entry for a release, or None."""
    source = release.source_of(entry.overridden)
    lines = [] if source is None else body_of(source)
    if entry.kind == "abstract" and any(line not in _NOTHING for line in lines):
        return f"it is not abstract: {lines}"
    if entry.kind == "lines" and source is not None and entry.code_in(release.version) != lines:
        return f"it quotes {entry.code_in(release.version)}, but the code is {lines}"
    if entry.kind == "super" and entry.override not in REPLACED:
        own_source = find().sources.get(entry.override)
        if own_source is not None and not re.search(rf"super\(\)\.{entry.override.rpartition('.')[2]}\b", own_source):
            return "it does not call `super()`"
    if entry.kind == "as":
        others = [
            each.kind for each in entries if (each.override, each.overridden) == (entry.reference, entry.overridden)
        ]
        if others != ["lines"]:
            return f"`{entry.reference}` has no entry with lines"
    return None
