"""Trains a small transformer to generate text like the docstrings of Python's standard library, byte by byte.

    python examples/transformer.py                     # two CPU processes, three epochs
    python examples/transformer.py --plot bits.png     # also saves a plot of the bits per byte

It prints the bits per byte that the model needs for the text in each epoch, and the bits per byte of two simpler
models. It also prints a sample of generated text.
"""

import argparse
import ast
import bz2
import math
import sysconfig
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

NUM_BYTES = 256


def documentation() -> list[bytes]:
    """Returns the docstrings of the standard library's modules, in the order of the module names."""
    texts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                texts += [text.encode() + b"\n\n"] if text else []
    return texts


class Documentation(pl.LightningDataModule):
    """Windows of text from docstrings. Every tenth docstring is held out.

    Args:
        context: Number of bytes per window, without the last byte, which is only predicted.
        batch_size: Windows per process and step.
        fraction: Fraction of the text to use.
    """

    def __init__(self, context: int, batch_size: int, fraction: float = 1.0) -> None:
        super().__init__()
        self.context, self.batch_size = context, batch_size
        texts = documentation()
        texts = texts[:: max(1, round(1 / fraction))]
        self.held_out = b"".join(texts[::10])
        self.trained = b"".join(text for index, text in enumerate(texts) if index % 10 != 0)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Returns a loader of shuffled windows."""
        return DataLoader(self._windows(self.trained), self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Returns a loader of held-out windows."""
        return DataLoader(self._windows(self.held_out), self.batch_size)

    def _windows(self, text: bytes) -> TensorDataset:
        values = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        return TensorDataset(values.unfold(0, self.context + 1, self.context))


class Transformer(pl.LightningModule):
    """Predicts each byte from the bytes before it.

    Args:
        context: Number of previous bytes that a prediction uses.
        width: Size of the vectors that represent bytes.
        num_layers: Number of encoder layers.
        lr: Maximum learning rate; the learning rate first rises to it and then falls towards zero.
    """

    def __init__(self, context: int, width: int, num_layers: int, lr: float = 3e-3) -> None:
        super().__init__()
        self.context, self.lr = context, lr
        self.bytes = nn.Embedding(NUM_BYTES, width)
        self.positions = nn.Parameter(torch.randn(context, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, width // 16, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.to_logits = nn.Linear(width, NUM_BYTES)
        # True at the positions that a byte must not use: the later ones.
        self.register_buffer("mask", torch.ones(context, context, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        """Returns, for each byte, the logits of the next byte."""
        length = values.shape[1]
        vectors = self.bytes(values) + self.positions[:length]
        return self.to_logits(self.layers(vectors, self.mask[:length, :length], is_causal=True))  # type: ignore[no-any-return]

    def bits(self, windows: Tensor) -> Tensor:
        """Returns the bits per byte of a batch of windows."""
        logits = self(windows[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()) / math.log(2)

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        """Returns the bits per byte of one batch, and logs them."""
        bits = self.bits(batch[0])
        self.log("bits", bits, prog_bar=True, on_step=True, on_epoch=True, sync_dist=True)
        return bits

    def validation_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        """Logs the bits per byte of held-out text."""
        self.log("held_out_bits", self.bits(batch[0]), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[dict[str, object]]]:
        """Returns AdamW, and a schedule that raises and then lowers the learning rate."""
        optimizer = torch.optim.AdamW(self.parameters(), self.lr)
        num_steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, num_steps, pct_start=0.1)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    @torch.inference_mode()
    def write(self, beginning: bytes, num_bytes: int, temperature: float = 0.7) -> str:
        """Returns a text that continues the given beginning."""
        self.eval()
        values = torch.tensor([list(beginning)])
        for _ in range(num_bytes):
            logits = self(values[:, -self.context :])[0, -1]
            following = torch.multinomial(torch.softmax(logits / temperature, dim=0), 1)
            values = torch.cat([values, following[None]], dim=1)
        return bytes(values[0].tolist()).decode(errors="replace")


class History(Callback):
    """Records the bits per byte of each epoch, and the training bytes per second over all processes."""

    def __init__(self) -> None:
        self.bits: list[float] = []
        self.held_out_bits: list[float] = []
        self.bytes_per_second: list[float] = []
        self._num_bytes = 0
        self._started = 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the clock."""
        self._num_bytes, self._started = 0, time.perf_counter()

    def on_train_batch_end(  # type: ignore[no-untyped-def]
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        """Counts the bytes of the batch."""
        self._num_bytes += batch[0][:, 1:].numel() * trainer.world_size

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops the clock."""
        self.bytes_per_second.append(self._num_bytes / (time.perf_counter() - self._started))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Records the metrics of the epoch."""
        self.bits.append(trainer.callback_metrics["bits_epoch"].item())
        self.held_out_bits.append(trainer.callback_metrics["held_out_bits"].item())


def bits_by_frequency(text: bytes, known: bytes) -> float:
    """Returns the bits per byte of a text in a code that depends only on the byte frequencies of a known text."""
    counts = torch.bincount(torch.tensor(list(known)), minlength=NUM_BYTES) + 1.0
    return float(-(counts / counts.sum()).log2()[list(text)].mean())


def plot(history: History, path: Path) -> None:
    """Saves a plot of the bits per byte of each epoch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    epochs = range(1, len(history.bits) + 1)
    axes.plot(epochs, history.bits, marker="o", label="training")
    axes.plot(epochs, history.held_out_bits, marker="o", label="held-out text")
    axes.set(xlabel="epoch", ylabel="bits per byte", xticks=epochs)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    """Trains, generates text, and prints tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="ddp_ext", help="any name that Trainer(strategy=...) accepts")
    parser.add_argument("--devices", type=int, default=2, help="processes")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="windows per process and step")
    parser.add_argument("--context", type=int, default=128, help="number of previous bytes that a prediction uses")
    parser.add_argument("--width", type=int, default=96, help="size of the vectors, a multiple of 16")
    parser.add_argument("--layers", type=int, default=2, help="number of encoder layers")
    parser.add_argument("--fraction", type=float, default=1.0, help="fraction of the text to use")
    parser.add_argument("--plot", type=Path, help="path of a plot of the bits per byte")
    arguments = parser.parse_args()

    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data are in memory
    pl.seed_everything(1, verbose=False)
    data = Documentation(arguments.context, arguments.batch_size, arguments.fraction)
    model = Transformer(arguments.context, arguments.width, arguments.layers)
    history = History()
    trainer = pl.Trainer(
        strategy=arguments.strategy,
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        max_epochs=arguments.epochs,
        callbacks=[history],
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)

    if trainer.is_global_zero:
        table = Table("epoch", "bits per byte", "held-out bits per byte", "bytes per second", title="Docstrings")
        columns = history.bits, history.held_out_bits, history.bytes_per_second
        for epoch, (bits, held_out, speed) in enumerate(zip(*columns, strict=True), start=1):
            table.add_row(str(epoch), f"{bits:.3f}", f"{held_out:.3f}", f"{speed:,.0f}")
        table.add_section()
        table.add_row("byte frequencies", "", f"{bits_by_frequency(data.held_out, data.trained):.3f}", "")
        table.add_row("bzip2", "", f"{8 * len(bz2.compress(data.held_out)) / len(data.held_out):.3f}", "")
        console = Console()
        console.print(table)
        console.rule("Generated text")
        console.print(model.cpu().write(b"Return the ", 400), markup=False, highlight=False)
        console.rule()
        if arguments.plot is not None:
            plot(history, arguments.plot)
            console.print(f"Picture: {arguments.plot}")


if __name__ == "__main__":
    main()
