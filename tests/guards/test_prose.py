"""The guard against retired terms finds a term only in the places where it is retired."""

import pytest

from tests.guards.prose import REPOSITORY, SEARCHED_PATHS, faults, find_terms, read_terms

TERMS = read_terms(
    (
        "# A comment.",
        "\\bnobody\\b\tno rank",
        "=[Vv]igil\tKillHungRanks",
    )
)
MODULE = '''
"""A module for
nobody."""

Nobody = 1  # Nobody reads this
vigil = "the vigil"
raise ValueError(f"nobody {1}")
'''


def test_phrases_are_found_in_texts_and_identifiers_in_code() -> None:
    found = [(number, text) for number, text, _ in find_terms(MODULE, TERMS, is_python=True)]
    assert found == [(3, "nobody"), (5, "Nobody"), (6, "vigil"), (7, "nobody")]


def test_names_of_tests_are_searched_for_phrases() -> None:
    content = "def test_nobody_waits(): ...\ndef nobody_waits(): ...\n"
    assert [number for number, *_ in find_terms(content, TERMS, is_python=True)] == [1]


def test_other_files_are_text() -> None:
    found = [(number, text, term.use) for number, text, term in find_terms("a\nNobody\nvigil", TERMS, is_python=False)]
    assert found == [(2, "Nobody", "no rank")]


def test_a_term_may_be_allowed_in_some_paths() -> None:
    (term,) = read_terms(["\\bwatch\\b\tfailure monitor\tdocs/*\tbenchmarks/failure_monitor.py"])
    assert term.exceptions == ("docs/*", "benchmarks/failure_monitor.py")


@pytest.mark.parametrize("path", SEARCHED_PATHS)
def test_each_searched_path_exists(path: str) -> None:
    assert (REPOSITORY / path).exists()


def test_the_repository_has_no_retired_terms() -> None:
    assert list(faults()) == []
