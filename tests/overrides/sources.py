"""Reads the source of Lightning's methods, from the installed package, a wheel, or a directory, without an import."""

import ast
import hashlib
import importlib
import io
import re
import tokenize
import zipfile
from functools import cache
from pathlib import Path

import lightning.pytorch as pl

#: Modules of the separately released packages, by their names in `lightning`.
_OTHER_NAMES = {f"{part}_lightning": f"lightning.{part}" for part in ("pytorch",)}
_OTHER_NAMES |= {f"lightning_{part}": f"lightning.{part}" for part in ("fabric",)}

_PYTORCH = pl.__name__


class Release:
    """A release of Lightning.

    Args:
        version: Version of the release.
        root: A wheel, or the directory that contains the package.
    """

    def __init__(self, version: str, root: Path) -> None:
        self.version = version
        self._root = root
        self._archive = zipfile.ZipFile(root) if root.suffix == ".whl" else None
        self._files = {} if self._archive is None else {name: name for name in self._archive.namelist()}

    def has_package(self, name: str) -> bool:
        """Returns whether it contains the package of a module: a wheel of ``pytorch-lightning`` has no Fabric."""
        package = ".".join(name.split(".")[:2])
        return self._module(package) is not None

    @cache  # noqa: B019 - a few releases per process
    def _module(self, name: str) -> tuple[str, ast.Module] | None:
        for candidate in _candidates(name):
            path = candidate.replace(".", "/")
            for file in (f"{path}.py", f"{path}/__init__.py"):
                text = self._read(file)
                if text is not None:
                    text = renamed(text)
                    return text, ast.parse(text)
        return None

    def _read(self, file: str) -> str | None:
        if self._archive is not None:
            return self._archive.read(file).decode() if file in self._files else None
        path = self._root / file
        return path.read_text() if path.exists() else None

    def source_of(self, name: str) -> str | None:
        """Returns the source of a function, by its qualified name, or None if the release does not define it.

        Args:
            name: As ``lightning.pytorch.strategies.ddp:DDPStrategy.setup``. Getter and setter of a property count as
                one.
        """
        module, _, path = name.partition(":")
        found = self._module(module)
        if found is None:
            return None
        text, tree = found
        *classes, function = path.split(".")
        body = tree.body
        for each in classes:
            inner = [node for node in _flat(body) if isinstance(node, ast.ClassDef) and node.name == each]
            if not inner:
                return None
            body = inner[-1].body
        nodes = [
            node
            for node in _flat(body)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function
        ]
        lines = text.splitlines(keepends=True)
        parts = []
        for node in nodes:
            begin = min(each.lineno for each in [node, *node.decorator_list])
            assert node.end_lineno is not None
            parts.append("".join(lines[begin - 1 : node.end_lineno]))
        return "".join(parts) or None


def _candidates(name: str) -> list[str]:
    return [
        name,
        *(name.replace(other, own_name) for own_name, other in _OTHER_NAMES.items() if name.startswith(other)),
    ]


def renamed(name: str) -> str:
    """Returns a text with module names as in the package `lightning`."""
    for own_name, other in _OTHER_NAMES.items():
        name = re.sub(rf"\b{own_name}\b", other, name)
    return name


def _flat(body: list[ast.stmt]) -> list[ast.stmt]:
    """Returns the statements of a body, of the conditions, and of the handlers in it."""
    found: list[ast.stmt] = []
    for node in body:
        found.append(node)
        if isinstance(node, ast.If):
            found += _flat(node.body) + _flat(node.orelse)
        elif isinstance(node, ast.Try):
            handlers = [statement for handler in node.handlers for statement in handler.body]
            found += _flat(node.body) + _flat(handlers) + _flat(node.orelse) + _flat(node.finalbody)
        elif isinstance(node, ast.With):
            found += _flat(node.body)
    return found


def lines_of(source: str) -> list[str]:
    """Returns one line per statement of functions, indented by its depth, without comments, docstrings and line breaks.

    The result depends on tokens only, not on the version of Python that reads them.
    """
    indentation = len(source) - len(source.lstrip(" "))
    text = "".join(line[indentation:] if line.strip() else line for line in source.splitlines(keepends=True))
    rows = text.splitlines()
    found: list[str] = []
    depth = 0
    pieces: list[str] = []
    at: tuple[int, int] | None = None
    kinds: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.INDENT:
            depth += 1
        elif token.type == tokenize.DEDENT:
            depth -= 1
        elif token.type == tokenize.NEWLINE:
            if kinds != [tokenize.STRING]:
                found.append("    " * depth + _tidy(" ".join(pieces)))
            pieces, at, kinds = [], None, []
        elif token.type in (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER):
            continue
        else:
            if at is None or at[0] != token.start[0]:
                pieces.append("")
            else:
                pieces[-1] += rows[at[0] - 1][at[1] : token.start[1]]
            pieces[-1] += _between(rows, token.start, token.end)
            at = token.end
            kinds.append(token.type)
    return found


def _between(rows: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    if start[0] == end[0]:
        return rows[start[0] - 1][start[1] : end[1]]
    inner = [rows[start[0] - 1][start[1] :], *rows[start[0] : end[0] - 1], rows[end[0] - 1][: end[1]]]
    return " ".join(line.strip() for line in inner)


def _tidy(line: str) -> str:
    line = re.sub(r"([(\[{])\s+", r"\1", line)
    return re.sub(r",?\s+([)\]}])", r"\1", line)


def body_of(source: str) -> list[str]:
    """Returns what :func:`lines_of` does, without decorators and the header of the first function.

    Getter and setter of a property are two functions.
    """
    lines = [line for line in lines_of(source) if not line.startswith("@")]
    starts = [number for number, line in enumerate(lines) if line.startswith(("def ", "async def "))]
    found: list[str] = []
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(lines)], strict=True)):
        inline = re.search(r":\s*(\.\.\.|pass)$", lines[start])
        if number == 0:
            found += [inline[1]] if inline else []
            found += [line.removeprefix("    ") for line in lines[start + 1 : end]]
        else:
            found += lines[start:end]
    return found


def hash_of(source: str | None) -> str:
    """Returns a hash of a function's code; "-" if there is none."""
    if source is None:
        return "-"
    return hashlib.sha256("\n".join(lines_of(source)).encode()).hexdigest()[:12]


@cache
def installed() -> Release:
    """Returns the installed release, by the name under which the tests import it."""
    module = importlib.import_module(_PYTORCH)
    assert module.__file__ is not None
    return Release(module.__version__, Path(module.__file__).parents[_PYTORCH.count(".") + 1])
