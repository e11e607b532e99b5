"""A network of timm, trained, protected and saved; the file opens where timm is not installed.

Needs ``pip install 'kedge[demo,timm]'``; run it with ``python examples/timm_network.py``, or with a connection
``python examples/timm_network.py resnet50 --pretrained``.
"""

import sys

import kedge
from kedge.data.classes import of_classes
from kedge.data.digits import digits


def main(name: str = "test_resnet", pretrained: bool = False) -> kedge.Detector:
    """Train the network on the digits 0 to 7, and show it the others."""
    known, others = of_classes(digits(), range(8)), of_classes(digits(), (8, 9))
    train_set, rest = known[::2].split(0.7)
    held_out, test = rest.split(0.5)

    net = kedge.network(f"timm:{name}", pretrained=pretrained, classes=8, channels=1)
    net = kedge.train(net, train_set, "finetune" if pretrained else kedge.training.recipe("demo", epochs=3))
    print(net)
    detector = kedge.protect(net, train_set, held_out)
    detector.save("digits.kedge")

    opened = kedge.load("digits.kedge")  # the graph is in the file: neither timm nor its code is needed
    print(opened)
    for title, images in (("digits 0 to 7", test), ("digits 8 and 9", others[:300])):
        print(f"{title:15} {float(opened(images).is_ood.double().mean()):6.1%} flagged")
    return opened


if __name__ == "__main__":
    main(*(each for each in sys.argv[1:] if each != "--pretrained"), pretrained="--pretrained" in sys.argv)
