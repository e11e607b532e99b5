"""Passes of an anchored head behind EfficientNet-Lite0, beside one plain pass, as ratios in one run.

    python benchmarks/heads.py --side 160 --batch 1 32 --anchors 5 50 200

Weights of the head are as drawn, which does not change the time. Runs alternate, and medians are compared.
"""

import argparse
import statistics
import time

import torch

import kedge
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
    """Print a line for each batch size and number of anchors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=160)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--anchors", type=int, nargs="+", default=[5, 50, 200])
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    plain = lite0()
    nets = {k: with_head(plain, k, options.side) for k in options.anchors}
    with torch.inference_mode():
        for batch in options.batch:
            images = torch.rand(batch, 3, options.side, options.side)
            for net in (plain, *nets.values()):
                net(images)  # the first call surveys the network and keeps the anchors' part
            seconds: dict[int, list[float]] = {k: [] for k in (0, *nets)}
            for _ in range(options.repeats):
                for k, run in {0: plain, **{k: net.per_anchor_logits for k, net in nets.items()}}.items():
                    started = time.perf_counter()
                    run(images)
                    seconds[k].append(time.perf_counter() - started)
            base = statistics.median(seconds[0])
            for k in nets:
                ratio = statistics.median(seconds[k]) / base
                print(f"batch {batch}, {k} anchors: {ratio:.3f} plain passes; by operations {nets[k].passes:.3f}")


if __name__ == "__main__":
    main()
