"""Each method that overrides or replaces a method of Lightning has an account of all lines, for each release.

If a test fails, see the docstring of the package, :mod:`tests.overrides`.
"""

import ast
from pathlib import Path

import pytest

import lightning_strategies_ext
from tests.overrides import accounts
from tests.overrides.accounts import Entry, order
from tests.overrides.checking import expected_pairs, problem_of
from tests.overrides.finding import find, short_name
from tests.overrides.replacing import SET_ON_OBJECTS
from tests.overrides.sources import Release, body_of, hash_of, installed

ENTRIES = accounts.read()
HASHES = accounts.read_hashes()
VERSIONS = sorted({version for by_version in HASHES.values() for version in by_version}, key=order)
_EXPECTED = ("done:", "not needed:")


def is_checked(override: str) -> bool:
    """Returns whether the module of a method could be imported."""
    return not any(override.startswith(f"{module}.") for module in find().not_imported)


def test_each_override_has_one_entry():
    pairs = [(entry.override, entry.overridden) for entry in ENTRIES]
    assert sorted(pairs) == sorted(set(pairs)), "an override has several entries"
    missing = expected_pairs(installed()) - set(pairs)
    assert not missing, f"without an entry, see `python -m tests.overrides --skeleton`: {sorted(missing)}"


def test_no_entry_is_left_over():
    needed = expected_pairs(installed())
    by_method = {
        entry.override: {overridden for override, overridden in needed if override == entry.override}
        for entry in ENTRIES
    }
    for entry in ENTRIES:
        assert set(HASHES[entry.overridden].values()) != {"-"}, f"no release of Lightning has {entry.overridden}"
        if (entry.override, entry.overridden) in needed or not is_checked(entry.override):
            continue
        # The entry is for another release, whose base classes define different methods.
        methods = {entry.overridden} | by_method[entry.override]
        differ = any(len({code == "-" for code in HASHES[method].values()}) > 1 for method in methods)
        is_absent = HASHES[entry.overridden].get(installed().version) == "-"
        assert by_method[entry.override] or is_absent, f"{entry.override} overrides nothing"
        assert differ, f"{entry.override} does not override {entry.overridden}"


def test_the_code_of_the_installed_release_is_known():
    release = installed()
    methods = sorted({entry.overridden for entry in ENTRIES})
    codes = {method: hash_of(release.source_of(method)) for method in methods}
    newest = VERSIONS[-1]
    if release.version not in VERSIONS:
        changed = [method for method, code in codes.items() if code != HASHES[method][newest]]
        pytest.fail(
            f"Lightning {release.version} is not in tests/overrides/hashes.json. Of the methods that this package"
            f" overrides, {len(changed)} differ from {newest}: {', '.join(changed) or 'none'}. Account for the changes"
            " in tests/overrides/accounts, and run `python -m tests.overrides --write`."
        )
    changed = [method for method, code in codes.items() if code != HASHES[method][release.version]]
    assert not changed, f"not the code that Lightning {release.version} had: {changed}"


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.override}-{entry.overridden.partition(':')[2]}")
def test_an_entry_accounts_for_each_line(entry: Entry):
    if entry.kind == "lines":
        assert all(each.startswith(_EXPECTED) for each in entry.accounts), "neither done nor not needed"
    assert problem_of(entry, ENTRIES, installed()) is None


def test_each_replaced_method_is_named_where_it_is_replaced():
    """`SET_ON_OBJECTS` lists all methods that `_lightning` replaces on objects of Lightning, by name."""
    root = Path(lightning_strategies_ext.__file__).parent / "_lightning"
    found: dict[str, set[str]] = {}
    for path in root.glob("*.py"):
        for function in ast.parse(path.read_text()).body:
            if isinstance(function, ast.FunctionDef):
                replaced = _replaced_in(function)
                if replaced:
                    found[f"_lightning.{path.stem}.{function.name}"] = replaced
    expected = {
        override: {overridden.rpartition(".")[2] for overridden in targets}
        for override, targets in SET_ON_OBJECTS.items()
    }
    assert found == expected


def _replaced_in(function: ast.FunctionDef) -> set[str]:
    """Returns the attribute names to which a function assigns an inner function, a partial, or a lambda."""
    own = {node.name for node in ast.walk(function) if isinstance(node, ast.FunctionDef)} - {function.name}
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            value = node.value
            is_function = isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in own)
            is_partial = isinstance(value, ast.Call) and getattr(value.func, "id", "") == "partial"
            if is_function or is_partial:
                found.add(node.targets[0].attr)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "replace_method":
            assert isinstance(node.args[1], ast.Constant)
            found.add(node.args[1].value)
    return found


# --- the tests can fail ---

CHANGED = '''
class Base:
    @property
    def size(self):
        """Its size."""
        if self._size:  # a comment
            return self._size(
                1,
                2,
            )
        return 0
'''


class Source(Release):
    """A release with one module."""

    def __init__(self, text: str) -> None:
        super().__init__("9.9.9", Path())
        self._text = text

    def _read(self, file: str) -> str | None:
        return self._text if file == "base.py" else None


def test_code_is_read_without_comments_docstrings_and_line_breaks():
    lines = ["if self._size:", "    return self._size(1, 2)", "return 0"]
    assert body_of(Source(CHANGED).source_of("base:Base.size") or "") == lines
    same = CHANGED.replace("# a comment", "").replace("1,\n                2,\n", "1, 2")
    assert hash_of(Source(same).source_of("base:Base.size")) == hash_of(Source(CHANGED).source_of("base:Base.size"))


@pytest.mark.parametrize(("old", "new"), [("return 0", "return 1"), ("@property", ""), ("(self)", "(self, x)")])
def test_changed_code_has_another_hash(old, new):
    before, after = (Source(text).source_of("base:Base.size") for text in (CHANGED, CHANGED.replace(old, new)))
    assert hash_of(before) != hash_of(after) != "-"
    assert hash_of(Source(CHANGED).source_of("base:Base.length")) == "-"


def test_code_of_several_releases_is_one_entry():
    versions = {"2.5.0": ["a", "b", "c"], "2.5.0.post0": ["a", "b", "c"], "2.6.0": ["a", "d", "c", "e"]}
    entry = Entry("", "", "lines", code=accounts.merged(versions))
    assert entry.code == ["a", "b  # until 2.5.0.post0", "d  # from 2.6.0", "c", "e  # from 2.6.0"]
    assert all(entry.code_in(version) == lines for version, lines in versions.items())


def test_a_line_without_an_account_is_found():
    entry = accounts.parse("## `a.B.c` overrides `d:E.c`\n\n    x\n\ndone: the same.\n\n    y\n")[0]
    assert entry.accounts == ["done: the same.", ""]
    with pytest.raises(ValueError, match="Not an entry"):
        accounts.parse("- `a.B.c` overrides `d:E.c`: nothing.")


def test_names_are_the_same_for_both_names_of_lightning():
    package = lightning_strategies_ext.__name__
    assert short_name(f"{package}.pytorch.ddp") == "pytorch.ddp"
    assert short_name(".".join([package, "pytorch_lightning", "pytorch", "ddp"])) == "pytorch.ddp"
