"""Call sites: the innermost call in the user's code, and the library function that it calls."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

from lightning_strategies_ext._system.call_sites import (
    call_site_of_exception,
    call_site_of_process,
    call_site_of_thread,
)


def here() -> str:
    return call_site_of_thread(threading.get_ident())


def test_the_call_site_of_a_thread_is_the_users_innermost_frame() -> None:
    line = here.__code__.co_firstlineno + 1
    assert here() == f"`call_site_of_thread` in here ({__file__}:{line})"


def test_a_thread_without_user_code_has_the_call_site_of_the_main_thread() -> None:
    with ThreadPoolExecutor(1) as executor:  # the thread runs only code of Python and of this package
        site = executor.submit(call_site_of_process).result()
    assert "in test_a_thread_without_user_code" in site


def test_the_call_site_of_an_exception_names_the_function_that_the_user_has_called() -> None:
    try:
        json.loads("{")
    except ValueError as error:
        site = call_site_of_exception(error)
    assert site.startswith("`loads` in test_the_call_site_of_an_exception")
    assert f"({__file__}:" in site
