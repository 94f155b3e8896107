"""Command line: ``python -m lightning_strategies_ext [doctor | install-horovod]``."""

import argparse
from importlib.metadata import version

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_strategies_ext.horovod_build.command import add_arguments, install_horovod


def main(arguments: list[str] | None = None) -> int:
    """Runs a command.

    Returns:
        The exit code. Of ``doctor``: 0 if every registered strategy can run here, 1 if not. Of ``install-horovod``: 0
        if Horovod works, 1 if a step failed, 2 if something is missing that its build needs.
    """
    parser = argparse.ArgumentParser(prog="lightning-strategies-ext", description=main.__doc__)
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("doctor", help="which strategies are registered, and which can run here (the default)")
    install = commands.add_parser(
        "install-horovod", help="build Horovod for the installed torch and prove that it works"
    )
    add_arguments(install)
    parsed = parser.parse_args(arguments)
    if parsed.command == "install-horovod":
        return install_horovod(parsed, Console())
    return doctor(Console())


def doctor(console: Console) -> int:
    """Prints the table of strategies; returns 1 if one of them cannot run here."""
    from lightning_strategies_ext.doctor import examine

    table = Table(title="Strategies of lightning-strategies-ext and of packages registered through it")
    for column in ("name", "front ends", "engine", "can run here"):
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    problems = 0
    for finding in examine():
        problems += finding.is_fault
        verdict = "yes" if finding.problem is None else f"no: {finding.problem}"
        table.add_row(finding.name, ", ".join(finding.front_ends), finding.engine, escape(verdict))
    console.print(table)
    console.print(f"shm, among CPU ranks of one host: {_shm_verdict()}")
    console.print("  ".join(f"{name} {version(name)}" for name in ("lightning-strategies-ext", "lightning", "torch")))
    return 1 if problems else 0


def _shm_verdict() -> str:
    from lightning_strategies_ext import shm
    from lightning_strategies_ext.shm import native_build

    if not shm.is_available():
        return "no, it needs Linux; gloo takes its place"
    try:
        native_build.library()
    except native_build.NotCompiledError as error:
        return f"yes, but slower than it could be: all-reduces are not compiled, since {error}"
    return "yes, all-reduces are compiled"


if __name__ == "__main__":
    raise SystemExit(main())
