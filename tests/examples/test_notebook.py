"""``examples/notebook.ipynb``: cells train and predict in workers, which can import the classes of the notebook."""

import base64
from pathlib import Path

import pytest

from tests.support.examples import EXAMPLE_ENVIRONMENT, EXAMPLES, LIMIT_S, assert_shows_something, number, rows
from tests.support.ranks import run_script

nbformat = pytest.importorskip("nbformat", reason="notebooks need nbformat, nbclient and ipykernel")
NOTEBOOK = EXAMPLES / "notebook.ipynb"


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.processes
def test_the_notebook_trains_and_predicts(tmp_path: Path) -> None:
    executed = tmp_path / "executed.ipynb"
    program = "from nbclient.cli import main; main()"  # `jupyter execute`
    own = {name: str(tmp_path / name) for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")}
    result = run_script(
        *("-c", program, NOTEBOOK, f"--output={executed}", f"--timeout={LIMIT_S}", f"--startup_timeout={LIMIT_S}"),
        env={**EXAMPLE_ENVIRONMENT, **own, "OMP_NUM_THREADS": "1"},
        timeout_s=LIMIT_S,
    )
    assert result.returncode == 0, result.stdout
    outputs = [output for cell in nbformat.read(executed, as_version=4).cells for output in cell.get("outputs", [])]
    shown = [output["data"] for output in outputs if "data" in output]
    printed = "\n".join(data["text/plain"] for data in shown if "accuracy" in data.get("text/plain", ""))
    assert rows(printed)["processes"] == ["2"]
    assert rows(printed)["predictions"] == ["360"]
    assert number(printed, "accuracy on held-out images") > 0.93
    assert number(printed, "loss of the last epoch") < number(printed, "loss of the first epoch") / 4
    pictures = [base64.b64decode(data["image/png"]) for data in shown if "image/png" in data]
    assert len(pictures) == 2
    for picture in pictures:
        (tmp_path / "picture.png").write_bytes(picture)
        assert_shows_something(tmp_path / "picture.png")
