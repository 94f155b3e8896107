"""Writes a copy of this repository whose tests use ``pytorch_lightning`` instead of ``lightning``.

    python -m tests.support.mirrored_repository DIRECTORY

``hatch_build.py`` replaces the names in tests, benchmarks, examples, and the code of the documentation, as in the
package. Modules of this package are replaced with their mirrors for ``pytorch_lightning``.
"""

import re
import subprocess
import sys
from pathlib import Path

import hatch_build

REPOSITORY = Path(__file__).parents[2]
#: Further replacements in tests, in addition to the names of modules.
_MIRRORED = {
    r"^import lightning$": "import pytorch_lightning as lightning",
    r'RequirementCache\("lightning\b': 'RequirementCache("pytorch-lightning',
}
_REWRITTEN = ("tests", "benchmarks", "examples", "docs", "README.md")
#: Tests of the sources, and of discovery, which `tests/test_pytorch_lightning.py` tests with both names.
_OF_SOURCES = (
    "test_imports",
    "test_pytorch_lightning",
    "test_versions_table",
    "test_discovery",
    "test_doctor",
    "test_docs",
    "test_docs_blocks",
    "test_tiers",
    "test_malicious_releases",
    "test_messages",
)


def write(target: Path) -> None:
    """Writes all files under version control, and the package for both names."""
    hatch_build.write(REPOSITORY, target)
    modules = hatch_build.modules_of(REPOSITORY)
    names = hatch_build.modules_with_lightning(modules)
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        source, copy = REPOSITORY / name, target / name
        if source.stem in _OF_SOURCES or not source.exists():
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        content = source.read_bytes()
        if name.startswith(_REWRITTEN) and source.suffix in (".py", ".md", ".yaml", ".ipynb"):
            text = hatch_build.rewritten(content.decode(), names, set(modules))
            for pattern, replacement in _MIRRORED.items():
                text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
            content = text.encode()
        copy.write_bytes(content)
        copy.chmod(source.stat().st_mode)  # some files are executable


if __name__ == "__main__":
    write(Path(sys.argv[1]))
