"""Writes hashes, and rows for new overrides; see the package's docstring."""

import argparse
from pathlib import Path

from tests.overrides import accounts
from tests.overrides.checking import expected_pairs, problem_of
from tests.overrides.finding import find, targets_in
from tests.overrides.replacing import REPLACED
from tests.overrides.sources import Release, body_of, hash_of, installed


def methods() -> set[str]:
    """Returns all methods of Lightning that have an account."""
    chains = [chain for by_target in find().overrides.values() for chain in by_target.values()]
    return {each for chain in [*chains, *REPLACED.values()] for each in chain} | {e.overridden for e in accounts.read()}


def write(releases: list[Release]) -> None:
    """Adds releases to ``hashes.json``; two wheels of one release must have the same code."""
    hashes, wanted = accounts.read_hashes(), methods()
    hashes = {method: by_version for method, by_version in hashes.items() if method in wanted}
    seen: set[tuple[str, str]] = set()
    for release in releases:
        for method in sorted(wanted):
            if not release.has_package(method):
                continue
            code = hash_of(release.source_of(method))
            known = hashes.setdefault(method, {})
            if (method, release.version) in seen and known[release.version] != code:
                print(f"{release.version}: {method} differs between the names of Lightning")
            seen.add((method, release.version))
            known[release.version] = code
    accounts.write_hashes(hashes)
    print(f"{len(hashes)} methods, {len({version for each in hashes.values() for version in each})} releases")


def skeleton(releases: list[Release]) -> None:
    """Prints entries for overrides without an entry, with the code of all given releases."""
    known = {(entry.override, entry.overridden) for entry in accounts.read()}
    pairs = {
        (override, overridden)
        for override, by_target in find().overrides.items()
        for chain in by_target.values()
        for release in releases
        for overridden in targets_in(chain, find().sources[override], release)
    } | {(override, overridden) for override, targets in REPLACED.items() for overridden in targets}
    for override, overridden in sorted(pairs - known):
        sources = {release.version: release.source_of(overridden) for release in releases}
        code = {version: body_of(source) for version, source in sources.items() if source is not None}
        lines = accounts.merged(code)
        word = "replaces" if override in REPLACED else "overrides"
        name = override.rpartition(".")[2]
        if all(line in ("...", "pass") for line in lines):
            print(f"- `{override}` {word} `{overridden}`: abstract.\n")
        elif f"super().{name}" in find().sources.get(override, ""):
            print(f"- `{override}` {word} `{overridden}`: super; TODO\n")
        else:
            print(f"## `{override}` {word} `{overridden}`\n")
            print("".join(f"    {line}\n" for line in lines) + "\nTODO\n")


def check(releases: list[Release]) -> int:
    """Prints the problems of the account for the given releases; returns their number."""
    entries = accounts.read()
    pairs = {(entry.override, entry.overridden) for entry in entries}
    found = []
    for release in releases:
        if not all(map(release.has_package, ("lightning.pytorch", "lightning.fabric"))):
            raise SystemExit("--check needs wheels of `lightning`, which contain both packages.")
        found += [f"{release.version}: no entry for {pair}" for pair in sorted(expected_pairs(release) - pairs)]
        problems = {f"{entry.override}, {entry.overridden}": problem_of(entry, entries, release) for entry in entries}
        found += [f"{release.version}: {name}: {problem}" for name, problem in problems.items() if problem]
    print("\n".join(found) or f"{len(entries)} entries, {len(releases)} releases: the account is complete")
    return len(found)


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.overrides", description=__doc__)
    parser.add_argument("--write", action="store_true", help="extend hashes.json")
    parser.add_argument("--check", action="store_true", help="compare the account with releases")
    parser.add_argument("--skeleton", action="store_true", help="print rows for overrides without an entry")
    parser.add_argument("wheels", nargs="*", type=Path, help="wheels; by default, the installed release")
    given = parser.parse_args()
    releases = [Release(path.name.split("-")[1], path) for path in given.wheels] or [installed()]
    if given.write:
        write(releases)
    if given.skeleton:
        skeleton(releases)
    if given.check and check(releases):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
