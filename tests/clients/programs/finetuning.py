"""finetuning-scheduler: unfreezes one layer after the other, and restores the best checkpoint before each layer."""

import lightning.pytorch as pl
from finetuning_scheduler import FinetuningScheduler, FTSCheckpoint, FTSEarlyStopping

from tests.clients.programs.common import STRATEGY, Classifier, show, sums, trainer

if __name__ == "__main__":
    pl.seed_everything(1, verbose=False)
    scheduler = FinetuningScheduler(allow_untested=STRATEGY.endswith("_ext"))  # it knows only names of Lightning
    stopping = FTSEarlyStopping(monitor="val_loss", patience=1, min_delta=1e-2)
    fitting = trainer(
        max_epochs=40,
        enable_checkpointing=True,
        callbacks=[scheduler, stopping, FTSCheckpoint(monitor="val_loss")],
    )
    model = Classifier()
    fitting.fit(model)
    show(epochs=fitting.current_epoch, depth=scheduler.curr_depth, weights=sums(model))
