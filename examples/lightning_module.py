"""A pretrained network, anchored and fine-tuned in a Lightning module: only `kedge.anchor` and the callback are new.

Needs ``pip install 'kedge[demo,lightning,pretrained]'``; run it with ``python examples/lightning_module.py``.
"""

from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import kedge
from kedge.adapters.lightning import AnchorCallback
from pretrained import images, report

SIZE = 48  # pixels; the network was trained at 224


class Classification(lightning.LightningModule):
    """Fine-tunes a network."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """Loss of one batch, whose images are each other's anchors in training mode."""
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW at a low rate."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(steps: int = 25, **options: Any) -> kedge.Detector:
    """Anchor the network and train with Lightning's Trainer, whose callback calibrates a detector at the end."""
    train_set, held_out = images(SIZE)
    # Or "timm:resnet50" with pretrained=True, or kedge.Classifier(my_network, mean=..., std=...).
    net = kedge.anchor(kedge.network("pretrained:lite0", classes=10, size=SIZE)).train()
    callback = AnchorCallback(train_set, held_out)
    trainer = lightning.Trainer(
        max_steps=steps, callbacks=[callback], logger=False, enable_checkpointing=False, **options
    )
    trainer.fit(Classification(net), DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True))
    assert callback.detector is not None
    report(callback.detector, held_out)
    return callback.detector


if __name__ == "__main__":
    main()
