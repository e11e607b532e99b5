"""A network of transformers, anchored and fine-tuned by its Trainer.

Needs ``pip install 'kedge[demo,pretrained,torchvision,transformers]'``; run it with
``python examples/transformers_trainer.py``.

``hf:NAME`` names a network on the Hugging Face hub, such as ``hf:microsoft/resnet-18``, or a folder that
`save_pretrained` wrote. It brings the normalisation, size and crop of its image processor along.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import kedge
from pretrained import images, report

SIZE = 32  # pixels


def write_network(folder: Path) -> None:
    """Save a small untrained ResNet and its image processor, in place of a network from the hub."""
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic")
    transformers.ResNetForImageClassification(config).save_pretrained(folder)
    statistics = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    processor = transformers.ConvNextImageProcessor(size={"shortest_edge": SIZE}, crop_pct=0.875, **statistics)
    processor.save_pretrained(folder)


def collate(items: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """Batch the items; the anchored network's argument is called x."""
    return {"x": torch.stack([image for image, _ in items]), "labels": torch.tensor([label for _, label in items])}


def loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    """Cross entropy; an anchored network returns logits as a tensor."""
    return torch.nn.functional.cross_entropy(logits, labels)


def main(steps: int = 100, network: str | None = None, **options: Any) -> kedge.Detector:
    """Anchor a pretrained network, train it with the Trainer and calibrate a detector."""
    train_set, held_out = images(SIZE)
    with tempfile.TemporaryDirectory() as folder:
        if network is None:
            write_network(Path(folder))
            network = f"hf:{folder}"
        net = kedge.anchor(kedge.network(network, pretrained=True, classes=10, size=SIZE)).train()
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=32, learning_rate=3e-3, save_strategy="no",
            report_to=[], **options,
        )  # fmt: skip
        transformers.Trainer(
            model=net, args=arguments, train_dataset=train_set, data_collator=collate, compute_loss_func=loss
        ).train()
    detector = kedge.AMP(net).fit(train_set).calibrate(held_out)
    report(detector, held_out)
    return detector


if __name__ == "__main__":
    main()
