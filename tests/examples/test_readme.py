"""``examples/README.md`` links to each example."""

import re

from tests.support.examples import EXAMPLES


def test_the_table_lists_each_file_and_each_linked_file_exists() -> None:
    linked = set(re.findall(r"\]\(([\w./]+)\)", (EXAMPLES / "README.md").read_text()))
    assert [link for link in linked if not (EXAMPLES / link).exists()] == []
    files = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*") if path.suffix in (".py", ".sh", ".ipynb")}
    assert files - linked == set()
