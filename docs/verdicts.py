"""Make docs/verdicts.jpg: photographs with the verdicts of a detector, and the breed of the nearest training image.

    kedge train folder:PETS --network pretrained:lite0 --pretrained --freeze --size 160 --out runs/pets
    pip install scikit-image
    python docs/verdicts.py runs/pets/detector.kedge PETS

The first command runs in examples/. PETS has a folder for each of the 37 breeds of the Oxford-IIIT Pet data set, here
reduced copies with 64 images each. The photographs come with scikit-image, in the public domain or under CC0. The
nearest training image is named and not shown: `detector.plot(images, train_set=...)` shows three.
"""

import sys
from pathlib import Path

import skimage
from PIL import Image

import kedge
from kedge.data import load_dataset
from kedge.detectors.neighbours import Neighbours

PHOTOGRAPHS = [
    "chelsea.png",
    "horse.png",
    "astronaut.png",
    "coffee.png",
    "rocket.jpg",
    "retina.jpg",
    "coins.png",
    "moon.png",
]


def main() -> None:
    """Write the picture next to this file."""
    detector = kedge.load(sys.argv[1])
    folder = Path(skimage.__file__).parent / "data"
    photographs = [Image.open(folder / name).convert("RGB") for name in PHOTOGRAPHS]
    figure = detector.plot(photographs)
    search = Neighbours(detector.net, load_dataset(f"folder:{sys.argv[2]}"), preprocess=detector.preprocess)
    assert search.images.labels is not None
    for panel, place in zip(figure.subfigs, search.nearest(photographs, 1)[:, 0].tolist(), strict=True):
        (axes,) = panel.axes
        nearest = search.images.classes[int(search.images.labels[place])]
        axes.set_title(f"{axes.get_title()}\nnearest: {nearest}", fontsize=8, color=axes.title.get_color())
    figure.savefig(Path(__file__).with_name("verdicts.jpg"), dpi=110, pil_kwargs={"quality": 85})


if __name__ == "__main__":
    main()
