"""transformers and datasets: a small BERT with its own output class, on an Arrow table."""

import datasets
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

from tests.clients.programs.common import show, sums, trainer


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.bert = BertForSequenceClassification(BertConfig(vocab_size=100, num_labels=2, **sizes, **no_dropout))

    def training_step(self, batch, batch_idx):
        return self.bert(input_ids=batch["tokens"], labels=batch["label"]).loss

    def predict_step(self, batch, batch_idx):
        return self.bert(input_ids=batch["tokens"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    tokens = torch.randint(0, 100, (32, 12), generator=torch.Generator().manual_seed(0))
    table = datasets.Dataset.from_dict({"tokens": tokens.tolist(), "label": (tokens.sum(1) % 2).tolist()})
    pl.seed_everything(1, verbose=False)
    model, fitting = Classifier(), trainer(max_epochs=2)
    fitting.fit(model, DataLoader(table.with_format("torch"), 4))
    weights = sums(model)
    outputs = fitting.predict(model, DataLoader(table.with_format("torch"), 4))
    show(weights=weights, output=type(outputs[0]).__name__)
