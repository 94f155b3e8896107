"""pytorch-metric-learning: a loss over the embeddings of all ranks (`DistributedLossWrapper`)."""

import lightning.pytorch as pl
from pytorch_metric_learning.losses import NTXentLoss
from pytorch_metric_learning.miners import MultiSimilarityMiner
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper, DistributedMinerWrapper

from tests.clients.programs.common import DEVICES, Classifier, show, sums, trainer
from tests.support.models import loader


class Embeddings(Classifier):
    def __init__(self) -> None:
        super().__init__()
        is_distributed = DEVICES > 1
        self.loss_of = DistributedLossWrapper(NTXentLoss()) if is_distributed else NTXentLoss()
        self.mine = DistributedMinerWrapper(MultiSimilarityMiner()) if is_distributed else MultiSimilarityMiner()

    def train_dataloader(self):
        return loader(batch_size=16)

    def training_step(self, batch, batch_idx):
        embeddings = self.net(batch[0])
        loss = self.loss_of(embeddings, batch[1], self.mine(embeddings, batch[1]))
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss


if __name__ == "__main__":
    pl.seed_everything(1, verbose=False)
    model, fitting = Embeddings(), trainer(max_epochs=2)
    fitting.fit(model)
    show(weights=sums(model), loss=fitting.callback_metrics["loss_epoch"].item())
