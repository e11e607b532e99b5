"""Make docs/verdicts.jpg: photographs with the verdicts of a detector.

    kedge train folder:PETS --network pretrained:lite0 --pretrained --freeze --size 160 --out runs/pets
    pip install scikit-image
    python docs/verdicts.py runs/pets/detector.kedge

The first command runs in examples/. PETS has a folder for each of the 37 breeds of the Oxford-IIIT Pet data set, here
reduced copies with 64 images each. The photographs come with scikit-image, in the public domain or under CC0.
"""

import sys
from pathlib import Path

import skimage
from PIL import Image

import kedge

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
    figure = detector.plot([Image.open(folder / name).convert("RGB") for name in PHOTOGRAPHS])
    figure.savefig(Path(__file__).with_name("verdicts.jpg"), dpi=110, pil_kwargs={"quality": 85})


if __name__ == "__main__":
    main()
