"""An anchored network in a your own training loop: only `kedge.anchor` is new.

python examples/own_loop.py
"""

import torch
from torch.utils.data import DataLoader

import kedge
from kedge.data.digits import digits


def main(steps: int = 300) -> kedge.Detector:
    """Train on batches of digits and calibrate a detector."""
    train_set, held_out = digits().split(0.9)
    net = kedge.anchor(kedge.models.build("compact", width=8, channels=1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(train_set, batch_size=64, shuffle=True, drop_last=True)
    done = 0
    while done < steps:
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            if done == steps:
                break
    return kedge.AMP(net).fit(train_set).calibrate(held_out)


if __name__ == "__main__":
    print(main().calibration)
