"""The heads of one task, anchored and not, with their references, and the scores of all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kedge import scores
from kedge.anchoring import Anchored
from kedge.data import Features
from kedge.detectors.registry import make
from kedge.models.classifier import Classifier
from kedge.studies.gaussian_process import MOST, GaussianProcess
from kedge.studies.laplace import LastLayerLaplace
from kedge.studies.task import Task
from kedge.training import AnchoredHead
from kedge.training.frozen import EPOCHS

WIDTH, WIDE = 128, 512  # units of every head, and of the wide ones
K = 50  # anchors, unless their number is varied
COUNTS = (2, 5, 10, 20, 50, 200)
MEMBERS = 3  # of the ensemble, the first of which is the unanchored baseline
MOST_TRAINED, MOST_SCORED = 5_000, 600  # features of a set
FEW_EPOCHS = 10  # for as many features
VARIED = ("tau", "mutual_information")  # readings that are taken with other numbers of anchors too
LOGIT_SCORES = ("msp", "max_logit", "energy", "kl_uniform", "gen")
OF_PROBABILITIES = ("msp", "kl_uniform", "gen")
MAIN = ("msp", "gen")  # logit scores of references and variants
READINGS = ("tau", "probability_deviation", "mutual_information", "relative_deviation")
UNANCHORED, ANCHORED, ENSEMBLE, LAPLACE, PROCESS = "unanchored", "anchored", "ensemble", "Laplace", "GP"
WIDE_UNANCHORED, WIDE_ANCHORED, OF_VIEWS = "unanchored, wide", "anchored, wide", "anchored, T of views"
AMP, RELATIVE = f"{ANCHORED}: AMP", f"{ANCHORED}: AMP, tau relative"
DEFAULT, THIRD = "MDS++ + GEN", "MDS++ + GEN + tau"
SUMS = {  # of scores that are standardised on held-out images
    DEFAULT: ("MDS++", f"{UNANCHORED}: gen"),
    "MDS++ + GEN of the ensemble": ("MDS++", f"{ENSEMBLE}: gen"),
    "MDS++ + GEN of the GP": ("MDS++", f"{PROCESS}: gen"),
    "MDS++ + GEN under anchors": ("MDS++", f"{ANCHORED}: gen"),
    THIRD: ("MDS++", f"{UNANCHORED}: gen", f"{ANCHORED}: tau"),
    "MDS++ + GEN + mutual information": ("MDS++", f"{UNANCHORED}: gen", f"{ANCHORED}: mutual_information"),
}


@dataclass(frozen=True)
class Heads:
    """The heads of one task and seed.

    Args:
        anchored: Anchored heads by kind, with their anchors; the first has the most of `COUNTS`.
        members: Unanchored heads, the ensemble.
        wide: An unanchored head of more units.
        laplace: A Gaussian posterior of the first member's last layer.
        process: A Gaussian process on the features.
    """

    anchored: dict[str, Anchored]
    members: tuple[Classifier, ...]
    wide: Classifier
    laplace: LastLayerLaplace
    process: GaussianProcess


@dataclass
class Scored:
    """Scores by row and set, predicted labels by kind of head and set, and readings by number of anchors and set."""

    rows: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    predicted: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    by_count: dict[str, dict[int, dict[str, Tensor]]] = field(default_factory=dict)

    def kind(self, label: str) -> str:
        """The kind of head whose predictions go with a row; the unanchored one's with a distance or a sum."""
        kind = label.partition(":")[0]
        return kind if kind in self.predicted else UNANCHORED


def trained_heads(task: Task, options: Mapping[str, Any]) -> Heads:
    """All heads of a task; ``options`` are those of the anchored ones."""
    train = some_of(task.train, MOST_TRAINED)
    assert train.labels is not None
    assert task.held_out.labels is not None
    few: dict[str, Any] = {"epochs": FEW_EPOCHS if len(train) == MOST_TRAINED else EPOCHS}
    head = partial(AnchoredHead, seed=task.seed, **few, **options)
    kinds = {ANCHORED: head(width=WIDTH).train(train), WIDE_ANCHORED: head(width=WIDE).train(train)}
    if task.augmented is not None:
        kinds[OF_VIEWS] = head(width=WIDTH).train(train, [task.augmented])
    anchored: dict[str, Anchored] = {}
    for kind, net in kinds.items():
        assert isinstance(net, Anchored)
        anchored[kind] = with_anchors(net, train, COUNTS[-1] if kind == ANCHORED else K, task.seed)
    baseline = partial(AnchoredHead, anchored=False, **few)
    members = [baseline(width=WIDTH, seed=MEMBERS * task.seed + number).train(train) for number in range(MEMBERS)]
    wide = baseline(width=WIDE, seed=MEMBERS * task.seed).train(train)
    hidden, logits = hidden_and_logits(members[0], train.features)
    held_out = (*hidden_and_logits(members[0], task.held_out.features), task.held_out.labels)
    few_of = some_of(train, MOST)
    assert few_of.labels is not None
    process = GaussianProcess.chosen(few_of.features, few_of.labels, (task.held_out.features, task.held_out.labels))
    return Heads(anchored, tuple(members), wide, LastLayerLaplace.fit(hidden, logits, held_out), process)


def with_anchors(head: Anchored, train: Features, count: int, seed: int) -> Anchored:
    """The head, with so many training features as anchors."""
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    head.set_anchors(train.features[order[:count]].float())
    return head


@torch.no_grad()
def score_all(heads: Heads, task: Task) -> Scored:
    """Scores of every row on every set."""
    done = Scored()
    sets = {"held out": task.held_out, **{name: some_of(each) for name, each in task.tested.items()}}
    distance = make("mds++", task.network).fit(some_of(task.train, MOST_TRAINED))
    for name, each in sets.items():
        x = each.features.float()
        per_anchor = {kind: per_anchor_logits(head, x) for kind, head in heads.anchored.items()}  # (K, N, C)
        for reading in VARIED:
            for count in COUNTS:
                values = getattr(scores, reading)(per_anchor[ANCHORED][:count])
                done.by_count.setdefault(reading, {}).setdefault(count, {})[name] = values
        members = torch.stack([member(x) for member in heads.members])  # (M, N, C)
        laplace, laplace_variance = heads.laplace(*hidden_and_logits(heads.members[0], x))
        process, process_variance = heads.process(x)
        logits = {
            UNANCHORED: members[0],
            WIDE_UNANCHORED: heads.wide(x),
            ENSEMBLE: members.softmax(dim=-1).mean(dim=0).log(),
            LAPLACE: laplace,
            PROCESS: process,
            **{kind: values[:K].mean(dim=0) for kind, values in per_anchor.items()},
        }
        wanted = {UNANCHORED: LOGIT_SCORES, ANCHORED: LOGIT_SCORES, ENSEMBLE: OF_PROBABILITIES}
        rows: dict[str, Tensor] = {}
        for kind, z in logits.items():
            rows |= {f"{kind}: {score}": scores.SCORES[score](z) for score in wanted.get(kind, MAIN)}
        for kind, values in per_anchor.items():
            rows |= {f"{kind}: {key}": value for key, value in disagreement(values[:K]).items()}
        rows |= {
            f"{ENSEMBLE}: mutual_information": scores.mutual_information(members),
            f"{LAPLACE}: variance": laplace_variance,
            f"{PROCESS}: variance": process_variance,
            "MDS++": distance.score(each).float(),
        }
        for label, values in rows.items():
            done.rows.setdefault(label, {})[name] = values
        for kind, z in logits.items():
            done.predicted.setdefault(kind, {})[name] = z.argmax(dim=1)
    for label, parts in SUMS.items():
        done.rows[label] = added_scores([done.rows[part] for part in parts])
    return done


def disagreement(per_anchor: Tensor) -> dict[str, Tensor]:
    """Every reading of per-anchor logits (K, B, C), and the scores of logits that are rescaled by them."""
    mean = per_anchor.mean(dim=0)
    found = {reading: getattr(scores, reading)(per_anchor) for reading in READINGS}
    for name, reading in {"AMP": "tau", "AMP, tau relative": "relative_deviation"}.items():
        found[name] = scores.kl_uniform(scores.rescale(mean, found[reading]))
    return found


def added_scores(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The sum of scores that are each standardised on held-out in-distribution images."""
    sums = {}
    for name in parts[0]:
        terms = [(part[name] - part["held out"].mean()) / part["held out"].std() for part in parts]
        sums[name] = torch.stack(terms).sum(dim=0)
    return sums


def per_anchor_logits(head: Anchored, x: Tensor) -> Tensor:
    """(K, N, C) of features (N, d)."""
    return torch.cat([head.per_anchor_logits(part) for part in x.split(256)], dim=1)


def some_of(features: Features, most: int = MOST_SCORED) -> Features:
    """The features, or so many of them drawn at random, the same every time."""
    if len(features) <= most:
        return features
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(0))
    return replace(features.subset(order[:most]), name=features.name)


@torch.no_grad()
def hidden_and_logits(head: Classifier, features: Tensor) -> tuple[Tensor, Tensor]:
    """What an unanchored head's last layer reads (N, d), and its logits (N, C)."""
    logits, read = head.features(features.float(), ["fc:in"])
    return read["fc:in"], logits
