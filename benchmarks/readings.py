"""Other scores of per-anchor logits, judged as the study `insight` judges.

    python benchmarks/readings.py [--network anchored] [--k 10] [--scale small] [--networks runs/networks] [--json PATH]

Trains the network if it is not trained yet. Prints AUROC and FPR95 in percent, for each set that the study judges by,
of deviations over anchors alone, of AMP's score with each of them as tau, of sums with weights from calibration images,
and of AMP with anchors chosen in other ways; and first how much the network depends on its anchors. With --anchors only
that.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from common import save
from kedge import AMP, ImageSet, scores
from kedge.anchoring import Anchored
from kedge.anchoring.corruption import Corruption
from kedge.metrics import auroc, fpr95
from kedge.seeds import seeded
from kedge.studies import STUDIES
from kedge.studies.plan import SuiteData
from kedge.studies.run import SuiteRun
from kedge.studies.study import Setting

Reading = Callable[[Tensor], Tensor]  # (K, B, C) -> (B,)


def centred(logits: Tensor) -> Tensor:
    """Logits less their mean over classes."""
    return logits - logits.mean(dim=-1, keepdim=True)


def deviation(of: Callable[[Tensor], Tensor]) -> Reading:
    """The deviation over anchors of something per class, as a mean over classes."""
    return lambda logits: of(logits).std(dim=0).mean(dim=-1)


DEVIATIONS: dict[str, Reading] = {
    "sigmoid": deviation(torch.sigmoid),  # the paper's, as a mean
    "softmax": deviation(lambda h: h.softmax(dim=-1)),
    "log-softmax": deviation(lambda h: h.log_softmax(dim=-1)),
    "centred logits": deviation(centred),
    "relative to the deviation over classes": lambda h: (
        deviation(centred)(h) / h.mean(dim=0).std(dim=-1).clamp_min(scores.TAU_FLOOR)
    ),
    "energy": lambda h: h.logsumexp(dim=-1).std(dim=0),
    "mutual information": scores.mutual_information,
}


def no_tau(logits: Tensor) -> Tensor:
    """AMP's score of the mean logits."""
    return scores.kl_uniform(logits.mean(dim=0))


def with_tau(tau: Reading) -> Reading:
    """AMP's score with another tau."""
    return lambda h: scores.kl_uniform(scores.rescale(h.mean(dim=0), tau(h)))


def combined(tau: Reading, known: Tensor) -> Reading:
    """The sum of AMP's score and a deviation, each in units of its own deviation over calibration images."""
    units = [float(part(known).std().clamp_min(scores.TAU_FLOOR)) for part in (no_tau, tau)]
    return lambda h: no_tau(h) / units[0] + tau(h) / units[1]


def per_anchor_logits(net: Anchored, images: ImageSet) -> Tensor:
    """The logits of a set under each anchor, (K, N, C)."""
    with torch.no_grad():
        return torch.cat([net.per_anchor_logits(batch) for batch in images.images.split(250)], dim=1)


def anchor_sets(data: SuiteData, k: int) -> dict[str, Tensor]:
    """Anchors chosen by other rules than at random."""
    train = data.train
    assert isinstance(train, ImageSet)
    some, labels = train.images[:5000].float() / 255, train.labels[:5000]
    prototypes = torch.stack([some[labels == number].mean(dim=0) for number in labels.unique()])
    flat, chosen = some.flatten(1), [0]
    nearest = torch.full((len(some),), float("inf"))
    while len(chosen) < k:  # each the image that is farthest from those before it
        nearest = nearest.minimum((flat - flat[chosen[-1]]).norm(dim=1))
        chosen.append(int(nearest.argmax()))
    with seeded(0):
        corrupted = Corruption()(some[:k])
    return {"class means": prototypes, "far apart": some[chosen], "corrupted": corrupted, "grey": _grey(some, k)}


def _grey(images: Tensor, k: int) -> Tensor:
    """Flat images of several brightnesses: anchors that show nothing."""
    levels = torch.linspace(0.2, 0.8, k).view(-1, *(1,) * (images.ndim - 1))
    return levels.expand(k, *images.shape[1:])


def how_much(net: Anchored, logits: Tensor) -> str:
    """How far the halves of the first layer differ, and the logits of known images over anchors and classes."""
    pair = net.anchored_layer
    of_anchor, of_image = pair.layer_c.weight.detach(), pair.layer_x.weight.detach()
    apart = float((of_anchor - of_image).norm() / of_image.norm())
    over_anchors = float(deviation(centred)(logits).mean())
    over_classes = float(logits.mean(dim=0).std(dim=-1).mean())
    return (
        f"the first layer's halves differ by {apart:.1%} of their size; logits deviate by {over_anchors:.3f} over "
        f"anchors and by {over_classes:.2f} over classes"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="anchored", help="an anchored network of the study insight")
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", default="small", choices=("small", "smoke"))
    parser.add_argument("--networks", type=Path, default=Path("runs/networks"))
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--anchors", action="store_true", help="print only how much it depends on its anchors")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    (suite,) = STUDIES["insight"](Setting(options.scale, (options.seed,), options.data_dir)).suites
    run = SuiteRun(suite, "runs/insight-readings", networks=options.networks)
    data = run.data(options.seed)
    net = run.detector(f"{options.network}: AMP", options.seed).net
    assert isinstance(net, Anchored)
    fitted = AMP(net, k=options.k, seed=options.seed).fit(data.train)
    sets = (data.test, *data.ood)
    readings: dict[str, Reading] = {"score without tau": no_tau}
    readings |= {f"deviation of {name}, alone": tau for name, tau in DEVIATIONS.items()}
    readings |= {f"tau: {name}": with_tau(tau) for name, tau in DEVIATIONS.items()}
    known = per_anchor_logits(net, data.held_out)
    print(how_much(net, known))
    if options.anchors:
        return
    readings |= {f"score + deviation of {name}": combined(tau, known) for name, tau in DEVIATIONS.items()}
    seen = [per_anchor_logits(net, images) for images in sets]
    rows = {name: [reading(h) for h in seen] for name, reading in readings.items()}
    chosen = {"random": fitted.net.anchors, **anchor_sets(data, options.k)}
    for name, anchors in chosen.items():
        assert anchors is not None
        net.set_anchors(anchors)
        amp = with_tau(DEVIATIONS["sigmoid"])
        rows[f"anchors: {name}"] = [amp(per_anchor_logits(net, images)) for images in sets]
    table = {
        name: {
            ood.name: (100 * auroc(inside.numpy(), theirs.numpy()), 100 * fpr95(inside.numpy(), theirs.numpy()))
            for ood, theirs in zip(data.ood, others, strict=True)
        }
        for name, (inside, *others) in rows.items()
    }
    print(f"{options.network}, K = {options.k}, seed {options.seed}: AUROC / FPR95")
    for name, found in table.items():
        print(f"{name:45}", *(f"{ood}: {a:5.1f} / {f:5.1f}  " for ood, (a, f) in found.items()))
    save(options.json, {"table": table})


if __name__ == "__main__":
    main()
