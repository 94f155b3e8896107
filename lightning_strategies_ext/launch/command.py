"""Command that starts another rank with the script of the current process.

The other rank runs the script from its beginning. Its command is the one with which the current interpreter was
started, with the same options, in the initial directory, even if the script has removed arguments from ``sys.argv`` or
changed the directory.

If ``sys.argv`` was set on purpose, as tests and sweeps do, the command follows it:

- If ``sys.argv[0]`` is the path of another script or module, the command runs that with the arguments in ``sys.argv``,
  in the current directory.
- If arguments in ``sys.argv`` were added or replaced, and not only removed, the command has the arguments in
  ``sys.argv``.
"""

import os
import sys

from lightning_strategies_ext import discovery
from lightning_strategies_ext.interpreters import current_options

_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def find_command() -> tuple[list[str], str | None]:
    """Returns the command and its working directory, which is None for the current directory.

    Raises:
        RuntimeError: If the script was read from the standard input, which can be read only once.
    """
    kind, rest = _find_target()
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    entry, arguments = sys.argv[0], sys.argv[1:]
    if spec is not None and spec.origin == entry and spec.name != "__main__":
        if kind != "-m" or _package(rest[0]) != _package(spec.name):
            return [sys.executable, *current_options(), "-m", spec.name, *arguments], None
    elif entry != kind and os.path.isfile(entry):
        return [sys.executable, *current_options(), os.path.abspath(entry), *arguments], None
    if kind in ("", "-"):
        raise RuntimeError(
            "The script was read from the standard input, so it cannot run again for each rank. Save it to a file, or"
            " use `strategy='ddp_spawn_ext'`."
        )
    if kind in ("-c", "-m"):
        target, original = [kind, rest[0]], rest[1:]
    else:
        target, original = [_path_of_script(kind)], rest
    unmatched = iter(original)
    has_only_removed = all(argument in unmatched for argument in arguments)
    return [
        sys.executable,
        *current_options(),
        *target,
        *(original if has_only_removed else arguments),
    ], discovery.INITIAL_DIRECTORY


def _path_of_script(path: str) -> str:
    """Returns the absolute path of the script, even if the script changed the directory before it imported torch.

    Another directory may have a file of the same name, which may belong to another user.
    """
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is not None and os.path.isabs(file) and os.path.basename(file) == os.path.basename(path):
        return str(file)
    return os.path.join(discovery.INITIAL_DIRECTORY, path)


def _find_target() -> tuple[str, list[str]]:
    """Returns what the interpreter runs, a script, ``-c``, ``-m``, ``-``, or "", and the arguments that follow."""
    options = sys.orig_argv[1:]
    while options and options[0].startswith("-") and options[0] not in ("-", "-c", "-m"):
        del options[: 2 if options[0] in _WITH_VALUE else 1]
    return (options[0], options[1:]) if options else ("", [])


def _package(module: str) -> str:
    return module.removesuffix(".__main__")
