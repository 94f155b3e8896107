"""Turns what Sphinx reads in our docstrings (roles, ``::``) into what mkdocstrings reads: Markdown."""

import re
from textwrap import dedent
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|func|mod|data|attr|exc):`~?\.*(?P<name>[\w.]+)`")
_LITERAL = re.compile(
    r"^(?P<indent> *)(?P<intro>[^\n]*)::\n\n(?P<code>(?:(?P=indent)    [^\n]*(?:\n|$)|\n)+)", re.MULTILINE
)


class SphinxToMarkdown(griffe.Extension):
    """Rewrites each docstring once, when the package has been read."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Rewrites the docstrings of a package."""
        self._rewrite(pkg)

    def _rewrite(self, item: griffe.Object) -> None:
        if item.docstring is not None:
            item.docstring.value = markdown_of(item.docstring.value)
        for member in item.members.values():
            if not member.is_alias:
                self._rewrite(member)


def markdown_of(docstring: str) -> str:
    """A docstring in Markdown."""
    return _LITERAL.sub(_fenced, _ROLE.sub(r"`\g<name>`", docstring))


def _fenced(found: re.Match[str]) -> str:
    code = dedent(found["code"]).strip("\n")
    language = "toml" if code.startswith("[") else "python"
    intro = "**Example**" if found["intro"] == "Example" else found["intro"] + ":"
    lines = ["", f"```{language}", *code.splitlines(), "```", ""]
    return "\n".join([found["indent"] + intro, *(found["indent"] + line if line else "" for line in lines)]) + "\n"
