"""An anchored network in a Lightning module: only `kedge.anchor` is new. Needs ``pip install lightning``.

python examples/lightning_module.py
"""

from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import kedge
from kedge.data.digits import digits


class Digits(lightning.LightningModule):
    """A classifier of digits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = kedge.anchor(kedge.models.build("compact", width=8, channels=1))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """Loss of one batch, whose images are each other's anchors in training mode."""
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main(steps: int = 300, **options: Any) -> kedge.Detector:
    """Train with Lightning's Trainer and calibrate a detector."""
    train_set, held_out = digits().split(0.9)
    module = Digits()
    trainer = lightning.Trainer(max_steps=steps, logger=False, enable_checkpointing=False, **options)
    trainer.fit(module, DataLoader(train_set, batch_size=64, shuffle=True, drop_last=True))
    return kedge.AMP(module.net).fit(train_set).calibrate(held_out)


if __name__ == "__main__":
    print(main().calibration)
