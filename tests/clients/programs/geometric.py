"""PyTorch Geometric: a data module of the library, with batches of graphs."""

import lightning.pytorch as pl
import torch
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from torch_geometric.data.lightning import LightningDataset
from torch_geometric.nn import SAGEConv, global_mean_pool

from tests.clients.programs.common import show, sums, trainer


class Graphs(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = SAGEConv(8, 16)
        self.head = torch.nn.Linear(16, 3)

    def training_step(self, batch, batch_idx):
        nodes = self.convolution(batch.x, batch.edge_index).relu()
        loss = cross_entropy(self.head(global_mean_pool(nodes, batch.batch)), batch.y)
        self.log("loss", loss, on_epoch=True, batch_size=batch.num_graphs, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    generator = torch.Generator().manual_seed(0)
    graphs = [
        Data(
            x=torch.randn(5, 8, generator=generator),
            edge_index=torch.randint(0, 5, (2, 12), generator=generator),
            y=torch.tensor([number % 3]),
        )
        for number in range(64)
    ]
    pl.seed_everything(1, verbose=False)
    model = Graphs()
    fitting = trainer(max_epochs=2)
    fitting.fit(model, datamodule=LightningDataset(graphs, batch_size=8, num_workers=1, pin_memory=False))
    show(weights=sums(model), loss=fitting.callback_metrics["loss_epoch"].item())
