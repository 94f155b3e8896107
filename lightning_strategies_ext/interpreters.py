"""Commands that start Python with exactly the module path of this process.

``python -m`` and ``python -c`` search the working directory before all others. Where other users can write to it, they
could have their code run by this user, from a file such as ``json.py``. So the first statement of each command sets the
module path, and ``-P`` (Python 3.11) keeps multiprocessing from searching the working directory when the new process
starts interpreters in turn.
"""

import os
import sys

from lightning_strategies_ext import discovery

_FLAGS = ["-P"] if sys.version_info >= (3, 11) else []


def python(program: str, *arguments: str) -> list[str]:
    """The command of a Python that runs a program.

    Args:
        program: Statements.
        arguments: For ``sys.argv[1:]``.
    """
    return [sys.executable, *_FLAGS, "-c", f"import sys; sys.path[:] = {module_path()!r}; {program}", *arguments]


def python_module(module: str, *arguments: str) -> list[str]:
    """The command of a Python that runs a module as ``python -m`` does.

    Args:
        module: Its name.
        arguments: For ``sys.argv[1:]``.
    """
    return python(f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)", *arguments)


def module_path() -> list[str]:
    """``sys.path`` with absolute directories; relative ones are below the directory in which this process started."""
    here = discovery.INITIAL_DIRECTORY
    return [os.path.join(here, entry) if entry else here for entry in sys.path if isinstance(entry, str)]
