"""Passes of an anchored head behind EfficientNet-Lite0, beside one plain pass, in processor time of one thread.

    python benchmarks/heads.py --side 160 --batch 1 16 --anchors 5 50 200 --out docs/results/heads-cost.json

Weights of the head are as drawn, which does not change the time. Each run is divided by the mean of the plain runs just
before and after it, so that other work on the machine counts little; the median of these ratios and their quartiles.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path

import torch

import kedge
from common import processor_seconds, save
from kedge.models.classifier import Classifier, checksum
from kedge.studies.photo_tasks import lite0
from kedge.training import AnchoredHead

HEAD, INPUTS, CLASSES = "_fc", 1280, 37


def with_head(net: Classifier, k: int, side: int) -> kedge.Anchored:
    """The network with an anchored head of the default width and k anchors, which are random images."""
    head = AnchoredHead().build(INPUTS, CLASSES)
    head.record["features"] = {"network": checksum(net), "head": HEAD}
    whole = AnchoredHead.join(head, net)
    assert isinstance(whole, kedge.Anchored)
    whole.set_anchors(torch.rand(k, 3, side, side))
    whole.fix_weights()  # as the copy that scores files and answers requests has them
    return whole


def main() -> None:
    """Print a line for each batch size and number of anchors, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=160)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--anchors", type=int, nargs="+", default=[5, 50, 200])
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain = lite0()
    nets = {k: with_head(plain, k, options.side) for k in options.anchors}
    rows = []
    with torch.inference_mode():
        for batch in options.batch:
            images = torch.rand(batch, 3, options.side, options.side)
            for net in (plain, *nets.values()):
                net(images)  # the first call surveys the network and keeps the anchors' part
            ratios: dict[int, list[float]] = {k: [] for k in nets}
            before = processor_seconds(partial(plain, images))
            for _ in range(options.repeats):
                for k, net in nets.items():
                    spent = processor_seconds(partial(net.per_anchor_logits, images))
                    after = processor_seconds(partial(plain, images))
                    ratios[k].append(2 * spent / (before + after))
                    before = after
            for k, net in nets.items():
                low, ratio, high = statistics.quantiles(ratios[k], n=4)
                rows.append({"batch": batch, "anchors": k, "ratio": ratio, "low": low, "high": high})
                rows[-1]["by operations"] = net.passes
                text = f"batch {batch}, {k} anchors: {ratio:.3f} plain passes ({low:.3f} to {high:.3f})"
                print(f"{text}; by operations {net.passes:.3f}", flush=True)
    command = f"python benchmarks/heads.py --side {options.side} --repeats {options.repeats}"
    save(options.out, {"command": command, "rows": rows})


if __name__ == "__main__":
    main()
