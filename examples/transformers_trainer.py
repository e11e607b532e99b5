"""An anchored network in the Trainer of transformers. Needs ``pip install transformers accelerate``.

python examples/transformers_trainer.py
"""

import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments

import kedge
from kedge.data.digits import digits


def collate(items: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """Batch the items; the anchored network's argument is called x."""
    return {"x": torch.stack([image for image, _ in items]), "labels": torch.tensor([label for _, label in items])}


def loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    """Cross entropy; an anchored network returns logits as a tensor."""
    return torch.nn.functional.cross_entropy(logits, labels)


def main(steps: int = 300, **options: Any) -> kedge.Detector:
    """Anchor a ResNet from transformers, train it with the Trainer and calibrate a detector."""
    train_set, held_out = digits().split(0.9)
    config = ResNetConfig(
        num_channels=1, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=10
    )
    net = kedge.anchor(ResNetForImageClassification(config), mean=0.13, std=0.31)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=64, learning_rate=3e-3, save_strategy="no",
            report_to=[], **options,
        )  # fmt: skip
        Trainer(
            model=net, args=arguments, train_dataset=train_set, data_collator=collate, compute_loss_func=loss
        ).train()
    return kedge.AMP(net).fit(train_set).calibrate(held_out)


if __name__ == "__main__":
    print(main().calibration)
