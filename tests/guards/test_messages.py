"""The page of messages agrees with the sources; see :mod:`tests.guards.messages`."""

from tests.guards.messages import COMMAND, PAGE, Message, messages_in, page

MODULE = '''
"""A docstring of a module."""

TEXT = "a text of four words"


def check(name: "a | type | annotation", value):
    """Checks a value that is given."""
    if value < 0:
        raise ValueError(f"`{name}={value!r}` must not be negative. " "Use " + str(-value) + ".")
    log.warning("rank %d of %d", *(value, name), value)
    log.debug("this is not shown to users")
    return f"`{name}` is {'good' if value else 'zero'}"
'''


def test_texts_of_exceptions_log_lines_and_functions_are_found() -> None:
    assert messages_in(MODULE) == [
        Message("module", "a text of four words"),
        Message("ValueError", "`{name}={value}` must not be negative. Use {str(-value)}."),
        Message("warning", "rank {value} of {name}"),
        Message("check", "`{name}` is {'good' if value else 'zero'}"),
    ]


def test_the_page_is_that_of_the_sources() -> None:
    assert PAGE.read_text() == page(), f"To write it: {COMMAND}"
