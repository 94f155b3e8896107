"""MLflow: ``autolog``, which wraps ``Trainer.fit`` and adds a callback to the Trainer."""

import lightning.pytorch as pl
import mlflow

from tests.clients.programs.common import Classifier, show, trainer

if __name__ == "__main__":
    mlflow.set_tracking_uri("sqlite:///runs.db")
    mlflow.pytorch.autolog(log_models=False, checkpoint=False)
    pl.seed_everything(1, verbose=False)
    fitting = trainer(max_epochs=2)
    if fitting.is_global_zero:
        with mlflow.start_run() as run:
            fitting.fit(Classifier())
        client = mlflow.MlflowClient()
        logged = client.get_run(run.info.run_id)
        files = [file.path for file in client.list_artifacts(run.info.run_id)]
        show(metrics=logged.data.metrics, optimizer=logged.data.params["optimizer_name"], files=files)
    else:
        mlflow.pytorch.autolog(disable=True)
        fitting.fit(Classifier())
