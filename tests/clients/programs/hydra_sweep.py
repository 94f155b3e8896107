"""Hydra: a sweep over two learning rates, in one process or in one process per rank."""

import hydra
import lightning.pytorch as pl
from omegaconf import DictConfig

from tests.clients.programs.common import Classifier, show, sums, trainer


@hydra.main(version_base=None)
def main(config: DictConfig) -> None:
    pl.seed_everything(1, verbose=False)
    fitting, model = trainer(max_epochs=1), Classifier(config.lr)
    fitting.fit(model)
    show(lr=config.lr, weights=sums(model))


if __name__ == "__main__":
    main()
