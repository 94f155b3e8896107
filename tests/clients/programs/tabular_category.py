"""pytorch-tabular: a category embedding model, whose Trainer the library creates from its `TrainerConfig`."""

import numpy as np
import pandas as pd
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig

from tests.clients.programs.common import DEVICES, STRATEGY, show, sums

if __name__ == "__main__":
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(128, 4)), columns=list("abcd"))
    table["kind"] = rng.choice(["x", "y", "z"], size=128)
    table["label"] = (table["a"] + table["b"] > 0).astype(int)
    model = TabularModel(
        data_config=DataConfig(target=["label"], continuous_cols=list("abcd"), categorical_cols=["kind"]),
        model_config=CategoryEmbeddingModelConfig(task="classification", layers="16-8", seed=1),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(
            accelerator="cpu",
            devices=DEVICES,
            batch_size=16,
            max_epochs=2,
            checkpoints=None,
            early_stopping=None,
            load_best=False,
            progress_bar="none",
            seed=1,
            trainer_kwargs={"strategy": STRATEGY},
        ),
        verbose=False,
    )
    model.fit(train=table, validation=table, seed=1)
    predicted = model.predict(table)
    columns = [name for name in predicted.columns if "probability" in name]
    show(weights=sums(model.model), predictions=predicted[columns].to_numpy(float).flatten().tolist())
