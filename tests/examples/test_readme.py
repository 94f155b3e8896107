"""``examples/README.md`` links to each example."""

import re

from tests.support.examples import EXAMPLES


def test_each_file_has_a_place_in_the_table_and_each_link_leads_to_one() -> None:
    linked = set(re.findall(r"\]\(([\w./]+)\)", (EXAMPLES / "README.md").read_text()))
    assert [link for link in linked if not (EXAMPLES / link).exists()] == []
    files = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*") if path.suffix in (".py", ".sh", ".ipynb")}
    assert files - linked == set()
