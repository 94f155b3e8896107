"""Adapts the pages of the repository to the documentation site.

In the repository, links point to files, so that they work in every viewer of the sources. For the site, this module

- adds the pages of :data:`PAGES`, whose sources are outside of ``docs/``;
- copies the plots of the benchmarks;
- replaces links to other files, for example to a test, with their text;
- warns about links to files that do not exist, which fails a strict build.

The build also fails if a page would load a resource from another host.
"""

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
#: Paths in the repository → paths on the site.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "README.md": "README.md",
    "examples/README.md": "examples.md",
    "examples/hosts/README.md": "hosts_example.md",
}
PICTURES = "benchmarks/results"
#: Section of the navigation whose pages are last among the results of a search.
LAST_IN_SEARCH = "For developers"

_log = logging.getLogger("mkdocs.hooks.site")
_FENCE = re.compile(r"^ *(```|~~~)")
_LABEL = r"(?:[^\[\]]|!?\[[^\[\]]*\](?:\([^()]*\))?)*"
_LINK = re.compile(rf"(?P<text>(?P<bang>!?)\[(?P<label>{_LABEL})\])\((?P<target>[^()\s]+)\)")
_LOADS = re.compile(
    r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?(?:https?:)?//"""
    r"""|<link[^>]*rel=["']?(?:stylesheet|preconnect|preload)[^>]*href=["']?(?:https?:)?//"""
)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages and images from outside of ``docs/``."""
    for source, page in PAGES.items():
        if files.get_file_from_path(page) is None and (ROOT / source).exists():
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for picture in sorted((ROOT / PICTURES).glob("*.png")):
        files.append(File.generated(config, f"{PICTURES}/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Replaces the links of a page with links of the site, and ranks the page among search results."""
    if any(section.title == LAST_IN_SEARCH for section in page.ancestors):
        page.meta.setdefault("search", {"boost": 0.1})
    source_path = repository_path(page.file.src_uri)
    lines, in_code = [], False
    for line in markdown.splitlines():
        if _FENCE.match(line):
            in_code = not in_code
        lines.append(line if in_code else _LINK.sub(lambda link: _on_site(link, source_path, page, files), line))
    return "\n".join(lines)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Raises an error if a page loads a resource from another host."""
    found = _LOADS.search(output)
    if found is not None:
        raise PluginError(f"{page.file.src_uri} would load from another host: {output[found.start() :][:200]}")
    return output


def repository_path(page: str) -> str:
    """Returns the path of a page's source, relative to the root of the repository."""
    for source, on_site in PAGES.items():
        if page == on_site and source != "README.md":
            return source
    return f"docs/{page}"


def _on_site(link: re.Match[str], source_path: str, page: Any, files: Files) -> str:
    if "[" in link["label"]:  # an image inside a link
        text = f"{link['bang']}[{_LINK.sub(lambda inner: _on_site(inner, source_path, page, files), link['label'])}]"
    else:
        text = link["text"]
    path, _, anchor = link["target"].partition("#")
    if not path or ":" in path:
        return f"{text}({link['target']})"
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source_path), path))
    if not (ROOT / target).exists():
        _log.warning("%s links to %s, but %s does not exist", source_path, link["target"], target)
        return text
    on_site = PAGES.get(target, target.removeprefix("docs/"))
    file = files.get_file_from_path(on_site)
    if file is None or file.inclusion.is_excluded():
        return link["label"]
    relative = posixpath.relpath(on_site, posixpath.dirname(page.file.src_uri) or ".")
    return f"{text}({relative}{'#' + anchor if anchor else ''})"
