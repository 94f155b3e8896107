"""Trains a generative adversarial network (GAN) to draw the digit that it is asked for, and measures how well it does.

    python examples/gan.py                             # two CPU processes
    python examples/gan.py --plot drawn.png            # and a picture of what it draws

A generator draws, a discriminator tells drawn images from real ones, and each has an optimizer: manual optimization.
In the backward pass of one, the parameters of the other take no part. DDP must be told, hence the long name of the
strategy.

How good the drawings are says a classifier of real digits, which reads them, and the Fréchet distance to real images:
that between two normal distributions with the means and covariances of the pixels. It grows if all drawings are alike.
"""

import argparse
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from digits import DigitsData
from rich.console import Console
from rich.table import Table
from sklearn.svm import SVC
from torch import Tensor, nn
from torch.nn import functional

NUM_CLASSES = 10
NUM_DRAWN_PER_CLASS = 100
NOISE_SIZE = 16


class Generator(nn.Module):
    """Draws images of 8 x 8 pixels between 0 and 1.

    Args:
        width: Channels of the widest layer.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.ConvTranspose2d(NOISE_SIZE + NUM_CLASSES, width, 2),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, width // 2, 4, stride=2, padding=1),
            nn.BatchNorm2d(width // 2),
            nn.ReLU(),
            nn.ConvTranspose2d(width // 2, 1, 4, stride=2, padding=1),
            nn.Sigmoid(),
        )

    def forward(self, labels: Tensor) -> Tensor:
        """One image for each label, another one each time."""
        noise = torch.randn(len(labels), NOISE_SIZE, device=labels.device)
        wanted = functional.one_hot(labels, NUM_CLASSES).float()
        return self.net(torch.cat([noise, wanted], dim=1)[:, :, None, None])  # type: ignore[no-any-return]


class Discriminator(nn.Module):
    """Says, as a logit, whether an image is a real one of its label.

    Args:
        width: Channels of the widest layer.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1 + NUM_CLASSES, width // 2, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.2),
            nn.Conv2d(width // 2, width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.2),
            nn.Flatten(),
            nn.Linear(4 * width, 1),
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """One logit for each image."""
        planes = functional.one_hot(labels, NUM_CLASSES).float()[:, :, None, None].expand(-1, -1, 8, 8)
        return self.net(torch.cat([images, planes], dim=1)).flatten()  # type: ignore[no-any-return]


class DigitsGAN(pl.LightningModule):
    """Both networks, and how they learn from each other.

    Args:
        width: Channels of their widest layers.
        lr: Learning rate of both.
    """

    def __init__(self, width: int = 64, lr: float = 2e-3) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.lr = lr
        self.generator, self.discriminator = Generator(width), Discriminator(width)

    def on_fit_start(self) -> None:
        """Has the processes, which were seeded alike so that their networks are, draw different images from here on."""
        torch.manual_seed(self.global_rank)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """A step of the discriminator, then one of the generator."""
        images, labels = batch
        of_generator, of_discriminator = self.optimizers()  # type: ignore[misc]

        with of_discriminator.toggle_model():
            real = self.discriminator(images, labels)
            drawn = self.discriminator(self.generator(labels), labels)
            # 0.9 and not 1.0, so that the discriminator does not become too sure for the generator to learn from it.
            loss = binary_loss(real, 0.9) + binary_loss(drawn, 0.0)
            of_discriminator.zero_grad()
            self.manual_backward(loss)
            of_discriminator.step()
        self.log("discriminator", loss, prog_bar=True)

        with of_generator.toggle_model():
            loss = binary_loss(self.discriminator(self.generator(labels), labels), 1.0)
            of_generator.zero_grad()
            self.manual_backward(loss)
            of_generator.step()
        self.log("generator", loss, prog_bar=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """One Adam for each network."""
        return [
            torch.optim.Adam(net.parameters(), self.lr, (0.5, 0.99)) for net in (self.generator, self.discriminator)
        ]

    @torch.inference_mode()
    def draw(self, num_per_class: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Images of all digits by turns, the same for the same seed, and what they were meant to be."""
        was_training = self.training
        self.eval()
        labels = torch.arange(NUM_CLASSES).repeat(num_per_class)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            images = self.generator(labels)
        self.train(was_training)
        return images, labels


def binary_loss(logits: Tensor, target: float) -> Tensor:
    """Binary cross entropy with one target for all."""
    return functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))


def frechet_distance(images: Tensor, others: Tensor) -> float:
    """How far two sets of images are apart: 0 for normal distributions with the same mean and covariance."""
    first, second = images.flatten(1).double(), others.flatten(1).double()
    covariances = torch.cov(first.T), torch.cov(second.T)
    product = torch.linalg.eigvals(covariances[0] @ covariances[1]).real.clamp(min=0)
    between_means = (first.mean(dim=0) - second.mean(dim=0)).square().sum()
    return float(between_means + covariances[0].trace() + covariances[1].trace() - 2 * product.sqrt().sum())


class Judge:
    """Measures images against the real ones.

    Args:
        data: The real ones.
    """

    def __init__(self, data: DigitsData) -> None:
        images, labels = data.train_set.tensors
        self.real = images
        self.classifier = SVC().fit(images.flatten(1).numpy(), labels.numpy())

    def measure(self, images: Tensor, labels: Tensor) -> list[str]:
        """A column of the table: how many are read as what they were meant to be, the distance to real ones."""
        accuracy = self.classifier.score(images.flatten(1).numpy(), labels.numpy())
        return [f"{accuracy:.4f}", f"{frechet_distance(images, self.real):.2f}"]


def plot(images: Tensor, path: Path) -> None:
    """Draws a row for each of the first ten images of each digit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    framed = functional.pad(images[: 10 * NUM_CLASSES, 0], (1, 1, 1, 1)).view(10, NUM_CLASSES, 10, 10)
    sheet = framed.permute(0, 2, 1, 3).reshape(100, 100)
    pyplot.imsave(path, sheet.repeat_interleave(6, dim=0).repeat_interleave(6, dim=1), cmap="gray_r")


def main() -> None:
    """Trains, measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="ddp_ext_find_unused_parameters_true")
    parser.add_argument("--devices", type=int, default=2, help="processes")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--width", type=int, default=64, help="channels of the widest layers")
    parser.add_argument("--plot", type=Path, help="where a picture of the drawn digits goes")
    arguments = parser.parse_args()

    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data are in memory
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        strategy=arguments.strategy,
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        max_epochs=arguments.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    data, model = DigitsData(arguments.batch_size), DigitsGAN(arguments.width)
    untrained = model.draw(NUM_DRAWN_PER_CLASS)
    trainer.fit(model, data.train_dataloader())

    if trainer.is_global_zero:
        trained, judge = model.cpu().draw(NUM_DRAWN_PER_CLASS), Judge(data)
        columns: dict[str, Any] = {"before": untrained, "after": trained, "real": data.held_out_set.tensors}
        measured = [judge.measure(*images) for images in columns.values()]
        table = Table("images", *columns, title=f"Drawn digits, after {trainer.global_step // 2} steps of each network")
        for name, *row in zip(["read as what they should be", "Fréchet distance to real ones"], *measured, strict=True):
            table.add_row(name, *row)
        Console().print(table)
        if arguments.plot is not None:
            plot(trained[0], arguments.plot)
            Console().print(f"Pictures: {arguments.plot}")


if __name__ == "__main__":
    main()
