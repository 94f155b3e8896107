"""A notebook, executed by nbclient: `fit` in cells that define the model."""

import os

import nbformat
from nbclient import NotebookClient

CELLS = (
    """
import lightning.pytorch as pl
from tests.clients.programs.common import STRATEGY, Classifier, show, sums, trainer
""",
    """
class DefinedHere(Classifier):
    def on_train_epoch_end(self):
        self.last_epoch = self.current_epoch
""",
    """
pl.seed_everything(1, verbose=False)
fitting, model = trainer(max_epochs=2), DefinedHere()
fitting.fit(model)
""",
    """
show(weights=sums(model), val_loss=fitting.callback_metrics["val_loss"].item())
""",
)

if __name__ == "__main__":
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in CELLS])
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
        os.environ.setdefault(name, os.path.abspath(name.lower()))
    executed = NotebookClient(notebook, timeout=250, kernel_name="python3").execute()
    for cell in executed.cells:
        for output in cell.outputs:
            print(output.get("text", ""), end="")
