"""Loggers: the files of the TensorBoard logger and the CSV logger after `fit`."""

import csv

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.clients.programs.common import Classifier, is_first, show, sums, trainer

if __name__ == "__main__":
    pl.seed_everything(1, verbose=False)
    tables, tensorboard = CSVLogger("csv"), TensorBoardLogger("board")
    fitting, model = trainer(max_epochs=2, logger=[tables, tensorboard], log_every_n_steps=1), Classifier()
    fitting.fit(model)
    if is_first():
        with open(f"{tables.log_dir}/metrics.csv") as file:
            rows = [{key: float(value or 0) for key, value in row.items()} for row in csv.DictReader(file)]
        events = EventAccumulator(tensorboard.log_dir).Reload()
        scalars = {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
        show(weights=sums(model), csv=rows, scalars=scalars)
