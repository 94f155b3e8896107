"""Collects the messages of the package: ``python -m tests.guards.messages`` writes them to ``docs/messages.md``.

The page has the texts of exceptions, of log lines at INFO and above, and of printed lines. It also has every other text
of three words or more, with the name of its function: parts of messages, and tables.
"""

import ast
import itertools
import re
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "messages.md"
COMMAND = ".venv/bin/python -m tests.guards.messages"
_ROOT = REPOSITORY / "lightning_strategies_ext"
_MIRROR = "pytorch_lightning/"
_LEVELS = {"info", "warning", "error", "exception", "critical", "warn", "print", "write", "advise"}
_LEVELS |= {"rank_zero_info", "rank_zero_warn"}
_NOT_SHOWN = {"debug", "compile", "namedtuple", "TypeVar", "cast"}
_EXCEPTION = re.compile(r"[A-Z]\w*(Error|Exception|Warning|Exit|Interrupt)")
_WORDS = re.compile(r"[A-Za-z{`][^\s/]*(\s+\S*[A-Za-z`}]\S*){2}")
_CODE = re.compile(
    r"^(import|from|\w+ =) |^(print|set)\(|[;{]\n|;$|\],$|<<"
)  # programs, and patches of Horovod's sources
_WIDTH = 124
_INTRODUCTION = """# Messages

Every text that users can see, by package and module: `module:exception`, `module:level` of a log line, or
`module:function` of a text that a function returns. `python -m tests.guards.messages` generates this page.
A message states what failed, why, and how to fix it, quotes arguments in backticks, and uses the terms of the
[glossary](glossary.md).
"""


class Message(NamedTuple):
    """A text that users can see.

    Attributes:
        origin: The exception, the level of the log line, or the function that has the text.
        text: The text, with placeholders as ``{expression}``.
    """

    origin: str
    text: str


def messages_in(source: str) -> list[Message]:
    """Returns the messages of a module, in order."""
    return list(_walk(ast.parse(source), "module", is_argument=False))


def page() -> str:
    """Returns the page for the sources of this checkout."""
    found = [
        (path.relative_to(_ROOT), message)
        for path in sorted(_ROOT.rglob("*.py"), key=lambda path: (path.parent, path.name))
        if not str(path.relative_to(_ROOT)).startswith(_MIRROR)
        for message in messages_in(path.read_text())
    ]
    sections = [_INTRODUCTION]
    for package, entries in itertools.groupby(found, lambda entry: entry[0].parent.as_posix()):
        title = "The package itself" if package == "." else f"`{package}/`"
        rows = [f"{path.stem}:{message.origin}\n{_indented(message.text)}" for path, message in entries]
        sections.append(f"## {title}\n\n```text\n" + "\n".join(rows) + "\n```\n")
    return "\n".join(sections)


def _indented(text: str) -> str:
    wrap = partial(textwrap.wrap, width=_WIDTH, break_long_words=False, break_on_hyphens=False)
    return textwrap.indent("\n".join(itertools.chain.from_iterable(map(wrap, text.strip("\n").splitlines()))), "    ")


def _walk(node: ast.AST, origin: str, *, is_argument: bool) -> Iterator[Message]:
    """Yields the messages below a node.

    Args:
        node: The node.
        origin: Origin of the texts in the node.
        is_argument: Whether the node is an argument of an exception or of a call that logs or prints.
    """
    text = _text(node)
    if text is not None:
        if (is_argument and re.search(r"[a-z]", text)) or (_WORDS.search(text) and not _CODE.search(text)):
            yield Message(origin, text)
        return
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        origin = node.name
    if isinstance(node, ast.Call):
        name = _last_name(node.func)
        if name in _NOT_SHOWN:
            return
        is_sink = name in _LEVELS or _EXCEPTION.fullmatch(name) is not None
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        yield from _walk(node.func, origin, is_argument=False)
        template = _text(arguments[0]) if arguments and is_sink else None
        if template is not None and name in _LEVELS and "%" in template:
            yield Message(name, _filled(template, arguments[1:]))
            return
        for argument in arguments:
            yield from _walk(argument, name if is_sink else origin, is_argument=is_sink)
        return
    for field, child in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for each in child if isinstance(child, list) else [child]:
                if isinstance(each, ast.AST) and not _is_docstring(each):
                    yield from _walk(each, origin, is_argument=False)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _text(node: ast.AST) -> str | None:
    """Returns the text of an expression with a literal in it; None if it has none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) or _placeholder(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        if left is not None or right is not None:
            return (left or _placeholder(node.left)) + (right or _placeholder(node.right))
    return None


def _placeholder(node: ast.AST) -> str:
    text = ast.unparse(node.value if isinstance(node, ast.FormattedValue) else node)
    return "{" + re.sub(r"for \((.*?)\) in", r"for \1 in", text) + "}"  # Python 3.10 writes the parentheses


def _filled(template: str, arguments: list[ast.expr]) -> str:
    """Returns a ``%`` template of a log line with the arguments as placeholders."""
    values = (each.value if isinstance(each, ast.Starred) else each for each in arguments)
    parts = itertools.chain.from_iterable(each.elts if isinstance(each, ast.Tuple) else [each] for each in values)
    rest = map(_placeholder, parts)
    return re.sub(r"%[.\d]*[dfrs]\b", lambda found: next(rest, found[0]), template)


def _last_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


if __name__ == "__main__":
    PAGE.write_text(page())
