"""A pretrained network, anchored and fine-tuned in your own training loop: only `kedge.anchor` is new.

Needs ``pip install 'kedge[demo,pretrained]'``; run it with ``python examples/own_loop.py``.
"""

import torch
from torch.utils.data import DataLoader

import kedge
from pretrained import images, report

SIZE = 48  # pixels; the network was trained at 224


def main(steps: int = 25) -> kedge.Detector:
    """Anchor the network, fine-tune it on batches of images and calibrate a detector."""
    train_set, held_out = images(SIZE)
    # Or "timm:resnet50" with pretrained=True, or kedge.Classifier(my_network, mean=..., std=...).
    net = kedge.anchor(kedge.network("pretrained:lite0", classes=10, size=SIZE)).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loader = DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True)
    done = 0
    while done < steps:
        for x, y in loader:  # images in [0, 1] or uint8: the network normalises them itself
            loss = torch.nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            if done == steps:
                break
    detector = kedge.AMP(net).fit(train_set).calibrate(held_out)
    report(detector, held_out)
    return detector


if __name__ == "__main__":
    main()
