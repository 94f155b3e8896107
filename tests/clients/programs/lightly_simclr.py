"""lightly: SimCLR with its loss over the views of all ranks (`gather_distributed=True`)."""

import lightning.pytorch as pl
import torch
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.clients.programs.common import DEVICES, show, sums, trainer


class SimCLR(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.head = SimCLRProjectionHead(16, 16, 8)
        self.loss_of = NTXentLoss(gather_distributed=DEVICES > 1)

    def training_step(self, batch, batch_idx):
        first, second = (self.head(self.backbone(view)) for view in batch)
        loss = self.loss_of(first, second)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    images = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    pl.seed_everything(1, verbose=False)
    model, fitting = SimCLR(), trainer(max_epochs=2, sync_batchnorm=False)
    fitting.fit(model, DataLoader(TensorDataset(images, images.flip(-1)), batch_size=8))
    buffers = [float(buffer.double().sum()) for buffer in model.buffers()]
    show(weights=sums(model), buffers=buffers, loss=fitting.callback_metrics["loss_epoch"].item())
