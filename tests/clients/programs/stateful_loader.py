"""torchdata: a ``StatefulDataLoader`` that resumes in the middle of an epoch."""

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.clients.programs.common import Classifier, show, sums, trainer
from tests.support.models import dataset


class RecordsBatches(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def train_dataloader(self):
        data, world_size = dataset(), self.trainer.world_size
        sampler = DistributedSampler(data, world_size, self.trainer.global_rank, shuffle=False)
        return StatefulDataLoader(data, 4, sampler=sampler, num_workers=1)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.seen.append(round(loss.item(), 5))
        return loss


def fit(path: str | None, **kwargs) -> tuple[bool, RecordsBatches]:
    pl.seed_everything(1, verbose=False)
    fitting, model = trainer(max_epochs=2, use_distributed_sampler=False, **kwargs), RecordsBatches()
    fitting.fit(model, ckpt_path=path)
    return fitting.is_global_zero, model


if __name__ == "__main__":
    saving = ModelCheckpoint("saved", every_n_train_steps=3, save_top_k=-1)
    is_first, whole = fit(None, enable_checkpointing=True, callbacks=[saving])
    _, resumed = fit("saved/epoch=0-step=3.ckpt")
    show(
        weights=sums(whole),
        goes_on=bool(resumed.seen) and whole.seen[-len(resumed.seen) :] == resumed.seen,
        is_same=sums(whole) == sums(resumed),
    )
