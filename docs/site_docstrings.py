"""Prepares the API reference: Sphinx roles and ``::`` in docstrings become Markdown, and default values are shown."""

import re
from textwrap import dedent
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|func|mod|data|attr|exc):`~?\.*(?P<name>[\w.]+)`")
_LITERAL = re.compile(
    r"^(?P<indent> *)(?P<intro>[^\n]*)::\n\n(?P<code>(?:(?P=indent)    [^\n]*(?:\n|$)|\n)+)", re.MULTILINE
)

_VARIADIC = (griffe.ParameterKind.var_positional, griffe.ParameterKind.var_keyword)

#: Modules whose names the package does not export, although the reference documents them.
_FURTHER = {
    "Collectives": "lightning_strategies_ext.collectives.Collectives",
    "LocalCollectives": "lightning_strategies_ext.collectives.LocalCollectives",
    "lightning_strategies_ext.discovery": "lightning_strategies_ext.discovery",
}


class SphinxToMarkdown(griffe.Extension):
    """An extension that rewrites all docstrings and named default values after the package has been parsed."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Rewrites the docstrings and named default values of a package."""
        offered = {name: f"{pkg.path}.{name}" for name, member in pkg.members.items() if member.is_alias}
        if pkg.path == "lightning_strategies_ext":
            constants = pkg["arguments"].attributes
            values = {name: item.value for name, item in constants.items() if name.startswith("DEFAULT_")}
            self._rewrite(pkg, offered | _FURTHER, values)

    def _rewrite(self, item: griffe.Object, links: dict[str, str], values: dict[str, Any]) -> None:
        if item.docstring is not None:
            item.docstring.value = markdown_of(item.docstring.value, links)
        for parameter in getattr(item, "parameters", ()):
            if parameter.kind in _VARIADIC:
                parameter.default = None  # griffe has "{}" and "()" there, which a caller cannot write
                continue
            parameter.default = values.get(str(parameter.default).rpartition(".")[2], parameter.default)
        for member in item.members.values():
            if not member.is_alias:
                self._rewrite(member, links, values)


def markdown_of(docstring: str, links: dict[str, str]) -> str:
    """Converts a docstring to Markdown.

    Args:
        docstring: Docstring with Sphinx markup.
        links: Identifiers in the reference, by documented name.
    """

    def linked(role: re.Match[str]) -> str:
        name = role["name"]
        return f"[`{name}`][{links[name]}]" if name in links else f"`{name}`"

    return _LITERAL.sub(_fenced, _ROLE.sub(linked, docstring))


def _fenced(found: re.Match[str]) -> str:
    code = dedent(found["code"]).strip("\n")
    language = "toml" if code.startswith("[") else "python"
    intro = "**Example**" if found["intro"] == "Example" else found["intro"] + ":"
    lines = ["", f"```{language}", *code.splitlines(), "```", ""]
    return "\n".join([found["indent"] + intro, *(found["indent"] + line if line else "" for line in lines)]) + "\n"
