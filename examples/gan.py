"""Trains a generative adversarial network (GAN) to draw a requested digit, and measures the quality of its images.

    python examples/gan.py                             # two CPU processes
    python examples/gan.py --plot drawn.png            # also saves a picture of generated digits

A generator draws images, and a discriminator distinguishes drawn images from real ones. Each network has its own
optimizer, hence manual optimization. The backward pass of one network does not use the parameters of the other. DDP
needs ``find_unused_parameters=True`` for this, and the default strategy's name selects it.

Two measures rate the drawn images. The first is the accuracy of a classifier that was trained on real digits. The
second is the Fréchet distance to real images: the distance between two normal distributions with the means and
covariances of the pixels. It is large if all drawn images look alike.
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
        """Returns one image for each label, drawn from new noise."""
        noise = torch.randn(len(labels), NOISE_SIZE, device=labels.device)
        wanted = functional.one_hot(labels, NUM_CLASSES).float()
        return self.net(torch.cat([noise, wanted], dim=1)[:, :, None, None])  # type: ignore[no-any-return]


class Discriminator(nn.Module):
    """Classifies whether an image is a real image of its label.

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
        """Returns one logit for each image: positive if the image seems real."""
        planes = functional.one_hot(labels, NUM_CLASSES).float()[:, :, None, None].expand(-1, -1, 8, 8)
        return self.net(torch.cat([images, planes], dim=1)).flatten()  # type: ignore[no-any-return]


class DigitsGAN(pl.LightningModule):
    """Trains a generator and a discriminator against each other.

    Args:
        width: Channels of the widest layer of each network.
        lr: Learning rate of both optimizers.
    """

    def __init__(self, width: int = 64, lr: float = 2e-3) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.lr = lr
        self.generator, self.discriminator = Generator(width), Discriminator(width)

    def on_fit_start(self) -> None:
        """Seeds each rank differently: ranks have the same initial weights, but must draw different images."""
        torch.manual_seed(self.global_rank)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Runs a step of the discriminator, then a step of the generator."""
        images, labels = batch
        of_generator, of_discriminator = self.optimizers()  # type: ignore[misc]

        with of_discriminator.toggle_model():
            real = self.discriminator(images, labels)
            drawn = self.discriminator(self.generator(labels), labels)
            # 0.9 instead of 1.0: if the discriminator is too confident, the gradients of the generator vanish.
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
        """Returns an Adam optimizer for each network."""
        return [
            torch.optim.Adam(net.parameters(), self.lr, (0.5, 0.99)) for net in (self.generator, self.discriminator)
        ]

    @torch.inference_mode()
    def draw(self, num_per_class: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Returns images of all digits in turn, which depend only on the weights and the seed, and their labels."""
        was_training = self.training
        self.eval()
        labels = torch.arange(NUM_CLASSES).repeat(num_per_class)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            images = self.generator(labels)
        self.train(was_training)
        return images, labels


def binary_loss(logits: Tensor, target: float) -> Tensor:
    """Returns the binary cross entropy of the logits with the same target for each."""
    return functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))


def frechet_distance(images: Tensor, others: Tensor) -> float:
    """Returns the Fréchet distance of two sets of images: 0 if their means and covariances are equal."""
    first, second = images.flatten(1).double(), others.flatten(1).double()
    covariances = torch.cov(first.T), torch.cov(second.T)
    product = torch.linalg.eigvals(covariances[0] @ covariances[1]).real.clamp(min=0)
    between_means = (first.mean(dim=0) - second.mean(dim=0)).square().sum()
    return float(between_means + covariances[0].trace() + covariances[1].trace() - 2 * product.sqrt().sum())


class Evaluator:
    """Compares drawn images with real images.

    Args:
        data: The real images.
    """

    def __init__(self, data: DigitsData) -> None:
        images, labels = data.train_set.tensors
        self.real = images
        self.classifier = SVC().fit(images.flatten(1).numpy(), labels.numpy())

    def measure(self, images: Tensor, labels: Tensor) -> list[str]:
        """Returns a column of the table: the classifier's accuracy, and the distance to real images."""
        accuracy = self.classifier.score(images.flatten(1).numpy(), labels.numpy())
        return [f"{accuracy:.4f}", f"{frechet_distance(images, self.real):.2f}"]


def plot(images: Tensor, path: Path) -> None:
    """Saves a picture with the first ten images of each digit, one digit per column."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    framed = functional.pad(images[: 10 * NUM_CLASSES, 0], (1, 1, 1, 1)).view(10, NUM_CLASSES, 10, 10)
    sheet = framed.permute(0, 2, 1, 3).reshape(100, 100)
    pyplot.imsave(path, sheet.repeat_interleave(6, dim=0).repeat_interleave(6, dim=1), cmap="gray_r")


def main() -> None:
    """Trains, measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="ddp_ext_find_unused_parameters_true")
    parser.add_argument("--devices", type=int, default=2, help="processes")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--width", type=int, default=64, help="channels of the widest layers")
    parser.add_argument("--plot", type=Path, help="path of a picture of the drawn digits")
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
        trained, evaluator = model.cpu().draw(NUM_DRAWN_PER_CLASS), Evaluator(data)
        columns: dict[str, Any] = {"before": untrained, "after": trained, "real": data.held_out_set.tensors}
        measured = [evaluator.measure(*images) for images in columns.values()]
        table = Table("images", *columns, title=f"Drawn digits, after {trainer.global_step // 2} steps of each network")
        for name, *row in zip(["classified as requested", "Fréchet distance to real ones"], *measured, strict=True):
            table.add_row(name, *row)
        Console().print(table)
        if arguments.plot is not None:
            plot(trained[0], arguments.plot)
            Console().print(f"Picture: {arguments.plot}")


if __name__ == "__main__":
    main()
