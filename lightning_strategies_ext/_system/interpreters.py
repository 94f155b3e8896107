"""Commands that start Python with exactly the module path of this process.

``python -m`` and ``python -c`` search the working directory first. If other users can write to it, they could make this
user run their code, from a file such as ``json.py``. The first statement of each command therefore sets the module
path, and ``-P`` (Python 3.11) prevents multiprocessing from searching the working directory when the new process starts
further interpreters.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

from lightning_strategies_ext import discovery

_SAFE_PATH = ["-P"] if sys.version_info >= (3, 11) else []
#: Flags of :data:`sys.flags` and names of ``-X`` options, by the environment variable with the same meaning.
_FLAGS_BY_VARIABLE = {
    "PYTHONOPTIMIZE": "optimize",
    "PYTHONDONTWRITEBYTECODE": "dont_write_bytecode",
    "PYTHONNOUSERSITE": "no_user_site",
    "PYTHONSAFEPATH": "safe_path",
    "PYTHONDEVMODE": "dev_mode",
}
_X_OPTIONS_BY_VARIABLE = {
    "PYTHONUTF8": "utf8",
    "PYTHONFAULTHANDLER": "faulthandler",
    "PYTHONPROFILEIMPORTTIME": "importtime",
    "PYTHONTRACEMALLOC": "tracemalloc",
    "PYTHONNODEBUGRANGES": "no_debug_ranges",
    "PYTHONINTMAXSTRDIGITS": "int_max_str_digits",
}


def python(program: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    """Returns the command of an interpreter that runs a program.

    Args:
        program: Statements of the program.
        arguments: Command-line arguments, ``sys.argv[1:]``.
        options: Options of the interpreter.
    """
    path = f"import sys; sys.path[:] = {module_path()!r}"
    return [sys.executable, *_SAFE_PATH, *options, "-c", f"{path}; {program}", *arguments]


def python_module(module: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    """Returns the command of an interpreter that runs a module as ``python -m`` does.

    Args:
        module: Name of the module.
        arguments: Command-line arguments, ``sys.argv[1:]``.
        options: Options of the interpreter.
    """
    program = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return python(program, *arguments, options=options)


def current_options() -> list[str]:
    """Returns the options of this interpreter, such as ``-O``, ``-W error``, and ``-X dev``."""
    # Private, but multiprocessing starts its processes with it (Python 3.10 to 3.14).
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return options


def current_options_as_variables() -> dict[str, str]:
    """Returns the environment variables with the meaning of :func:`current_options`, for interpreters that Ray starts.

    Leaves out variables that this process has already. ``-E``, the part of ``-I`` that ignores environment variables,
    some ``-X`` options, and ``-W`` options with a comma, which separates those of ``PYTHONWARNINGS``, have no variable.
    """
    flags = {variable: getattr(sys.flags, name, 0) for variable, name in _FLAGS_BY_VARIABLE.items()}
    variables = {variable: str(int(value)) for variable, value in flags.items() if value}
    for variable, name in _X_OPTIONS_BY_VARIABLE.items():
        if name in sys._xoptions:
            variables[variable] = "1" if sys._xoptions[name] is True else str(sys._xoptions[name])
    if options := [option for option in sys.warnoptions if "," not in option]:
        variables["PYTHONWARNINGS"] = ",".join(options)
    return {name: value for name, value in variables.items() if os.environ.get(name) != value}


def module_path() -> list[str]:
    """Returns ``sys.path`` with absolute directories; relative ones are below the initial working directory."""
    start = discovery.INITIAL_DIRECTORY
    return [os.path.join(start, entry) if entry else start for entry in sys.path if isinstance(entry, str)]
