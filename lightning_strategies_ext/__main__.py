"""Command line: ``python -m lightning_strategies_ext [doctor | install-horovod]``."""

import os
import sys

# ``python -m`` searches the working directory first, where other users may have written a ``json.py`` or ``pip.py``. It
# is removed from the path unless it contains this package.
if (
    __name__ == "__main__"
    and not getattr(sys.flags, "safe_path", False)
    and sys.path[0] != os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
):
    del sys.path[0]

import argparse
import json
from dataclasses import asdict
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_strategies_ext import discovery, lightning_names
from lightning_strategies_ext.horovod_build.command import add_arguments, install_horovod
from lightning_strategies_ext.registry import COMPRESSIONS


def main(arguments: list[str] | None = None) -> int:
    """Runs a command.

    Returns:
        The exit code. ``doctor``: 0 if no registered strategy has an error, otherwise 1. ``install-horovod``: 0 if
        Horovod works, 1 if a step has failed, 2 if a requirement of the build is missing.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-strategies-ext",
        description="Prints the environment and which strategies can run in it, or builds Horovod.",
        epilog="Exit codes of doctor: 0 if no registered strategy has an error, otherwise 1. Of install-horovod: 0 if"
        " Horovod works, 1 if a step has failed, 2 if a requirement of the build is missing.",
    )
    commands = parser.add_subparsers(dest="command")
    doctor = commands.add_parser(
        "doctor", help="print the environment and which strategies can run in it (the default)"
    )
    for command_parser in (parser, doctor):
        command_parser.add_argument("--json", action="store_true", help="print the findings of the doctor as JSON")
    install = commands.add_parser(
        "install-horovod", help="build Horovod for the installed torch and prove that it works"
    )
    add_arguments(install)
    parsed = parser.parse_args(arguments)
    if parsed.command == "install-horovod":
        return install_horovod(parsed, Console())
    return examine(Console(), as_json=parsed.json)


def examine(console: Console, *, as_json: bool = False) -> int:
    """Prints the environment and which strategies can run in it.

    Returns:
        1 if a strategy has an error, or if a malicious release of Lightning is installed; otherwise 0.
    """
    doctor: Any = import_module(lightning_names.current_name().path("lightning_strategies_ext.doctor"))
    malicious = discovery.find_malicious_releases()
    findings = [] if malicious else list(doctor.examine())
    environment = doctor.environment_info()
    if as_json:
        strategies = [asdict(finding) for finding in findings]
        print(json.dumps({"environment": environment, "malicious": malicious, "strategies": strategies}, indent=2))  # noqa: T201
    else:
        _print_environment(console, environment)
        if malicious:
            console.print(f"\n[bold red]{escape(discovery.describe_malicious_releases(malicious))}")
        else:
            _print_strategies(console, doctor.group_variants(findings))
    return int(bool(malicious) or any(finding.is_error for finding in findings))


def _print_environment(console: Console, environment: dict[str, str]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in environment.items():
        table.add_row(f"[bold]{name}", escape(value))
    console.print(table)


def _print_strategies(console: Console, has_variants: dict[Any, bool]) -> None:
    table = Table("strategy", "Trainer", "Fabric", "engine", "can run here")
    reasons: dict[str, list[str]] = {}
    for finding, has_variant in has_variants.items():
        is_in = ["yes" if front_end in finding.front_ends else "no" for front_end in ("Trainer", "Fabric")]
        name = finding.name + ("*" if has_variant else "")
        table.add_row(name, *is_in, finding.engine, "yes" if finding.problem is None else "no, see below")
        if finding.problem is not None:
            reasons.setdefault(finding.problem, []).append(finding.name)
    console.print(table)
    console.print(
        "* also with the suffix _find_unused_parameters_true or _find_unused_parameters_false; ddp_ext and"
        f" ddp_spawn_ext also with {', '.join(f'_{name}' for name in COMPRESSIONS)}, of which Fabric supports _bf16"
        " and _fp16"
    )
    for reason, names in reasons.items():
        console.print(f"[bold]{', '.join(names)}[/]: {escape(reason)}")


if __name__ == "__main__":
    raise SystemExit(main())
