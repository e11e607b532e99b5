"""Controls of an evaluation: known images in an OOD set's source, shifted images, permuted tau."""

import itertools
import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

import kedge
from kedge import AMP, MSP, Detection, calibration, metrics
from kedge.detectors import Cost
from kedge.errors import InputError, NotReadyError
from kedge.evaluation import Evaluation, EvaluationResult, best_beyond_noise, evaluate
from kedge.evaluation.paired import redraw
from kedge.metrics import DETECTION_METRICS as METRICS
from kedge.metrics import Estimate, detection_metrics
from kedge.seeds import seeded
from test_evaluation import DIRECT, FAR, INSIDE, NEAR, calibrated, greys
from test_metrics import ORACLES

KNOWN = greys(25, 112, 3, "near, known", labels=True)
DARK, BRIGHT = greys(17, 88, 4, "dark"), greys(16, 112, 5, "bright")
DIM = kedge.ImageSet(torch.cat([DARK.images, BRIGHT.images]), torch.arange(33) % 3, "dim")
GLARE = kedge.ImageSet(torch.full((8, 3, 2, 2), 255, dtype=torch.uint8), torch.zeros(8, dtype=torch.int64), "glare")


# Known images in the source of an OOD set.


def test_known_images_are_in_distribution_against_their_own_ood_set_alone():
    detectors, options = {"up": calibrated(), "down": calibrated(-1.0)}, {"resamples": 30, "seed": 5}
    without = evaluate(detectors, INSIDE, [NEAR, FAR], **options)
    table = evaluate(detectors, INSIDE, [NEAR, FAR], known_in={"near": KNOWN}, **options)
    for name, detector in detectors.items():
        result, before = table.results[name], without.results[name]
        inside, known, near = (detector.score(s) for s in (INSIDE, KNOWN, NEAR))
        both = torch.cat([inside, known])
        right = (detector(INSIDE).label == INSIDE.labels).int()
        right = torch.cat([right, torch.full((len(known),), -1)])  # the known images are not labelled
        assert result.metrics["near"] == detection_metrics(both, near, right, **options) != before.metrics["near"]
        assert result.metrics["near"]["oscr"].value == metrics.oscr(inside, near, right[: len(inside)])
        assert table.right(name, "near").equal(right)
        assert all(result.metrics["near"][metric].value == function(both, near) for metric, function in DIRECT.items())
        assert table.inside(name, "near").equal(both)
        assert table.inside(name, "far").equal(inside)
        assert result.metrics["far"] == before.metrics["far"]
        assert result.classifier == before.classifier
        assert result.flagged.items() >= before.flagged.items()
        assert result.mean("auroc") == pytest.approx(sum(m["auroc"].value for m in result.metrics.values()) / 2)


def test_known_and_shifted_sets_are_no_ood_sets():
    table = evaluate({"up": calibrated()}, INSIDE, [NEAR, FAR], shifted=[DIM, GLARE], known_in={"far": KNOWN})
    assert table.ood_names == ("near", "far") == tuple(table.results["up"].metrics)
    assert table.shifted_names == ("dim", "glare") == tuple(table.results["up"].shifted)
    assert table.known_in == {"far": "near, known"}
    every = {"inside", "near", "far", "dim", "glare", "near, known"}
    assert set(table.sets) == set(table.results["up"].detections) == set(table.results["up"].flagged) == every
    assert next(iter(table.sets)) == "inside"


# Shifted images.


def area_under_risk(scores, right):
    """The mean error rate over the shares kept; images of equal score enter in equal parts."""
    order = sorted(set(scores))
    risks, kept, wrong = [], 0, 0.0
    for score in order:
        group = [r for s, r in zip(scores, right, strict=True) if s == score]
        for n in range(1, len(group) + 1):
            risks.append((wrong + n * group.count(False) / len(group)) / (kept + n))
        kept, wrong = kept + len(group), wrong + group.count(False)
    return sum(risks) / len(risks)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_shifted_images_are_measured_as_a_loop_would(sign):
    detector = calibrated(sign)
    result = evaluate({"it": detector}, INSIDE, [FAR], shifted=[DIM]).results["it"].shifted["dim"]
    scores, right, accepted = [], [], []
    for image, label in zip(DIM.images, DIM.labels.tolist(), strict=True):
        means = [float(channel.float().mean()) for channel in image]
        scores.append(float(detector.score(image[None])))
        right.append(means.index(max(means)) == label)
        if scores[-1] <= detector.calibration.threshold:
            accepted.append(right[-1])
    assert 0 < len(accepted) < len(right)
    expected = sum(right) / 33, sum(accepted) / len(accepted), area_under_risk(scores, right)
    assert (result.accuracy, result.accepted_accuracy, result.aurc) == pytest.approx(expected)


def test_where_nothing_is_accepted_there_is_no_accuracy_of_accepted_images():
    table = evaluate({"up": calibrated()}, INSIDE, [NEAR], shifted=[DIM, GLARE], known_in={"near": KNOWN})
    result = table.results["up"]
    assert result.flagged["glare"] == 1
    assert result.shifted["glare"].accepted_accuracy is None
    assert result.shifted["glare"].accuracy == 1  # of equal channels the first is taken, and it is the label
    data = table.as_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["results"]["up"]["shifted"] == {name: vars(result.shifted[name]) for name in ("dim", "glare")}
    assert data["sets"]["near, known"] == {"images": 25, "sha256": KNOWN.checksum}


# What is refused.


def renamed(images, name) -> kedge.ImageSet:
    return kedge.ImageSet(images.images, images.labels, name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"shifted": [DIM, kedge.ImageSet(DIM.images, name="bare")]},
            "shifted must hold ImageSets with labels; got 'bare'",
        ),
        ({"shifted": [[DIM[0], DIM[1]]]}, "shifted must hold ImageSets .*got list"),
        ({"known_in": {"nowhere": KNOWN}}, "known_in must name OOD sets, some of near, far; got nowhere"),
        ({"known_in": {"inside": KNOWN}}, "known_in must name OOD sets, some of near, far; got inside"),
        ({"shifted": [DIM], "known_in": {"dim": KNOWN}}, "known_in must name OOD sets, some of near, far; got dim"),
        ({"shifted": [DIM, DIM]}, r"different names, got \['inside', 'near', 'far', 'dim', 'dim'\]"),
        ({"shifted": [renamed(DIM, "near")]}, "different names"),
        ({"known_in": {"near": renamed(KNOWN, "inside")}}, "different names"),
        ({"known_in": {"near": KNOWN, "far": KNOWN}}, "different names"),
        ({"shifted": [DIM], "known_in": {"near": renamed(KNOWN, "dim")}}, "different names"),
    ],
)
def test_sets_of_equal_names_or_unknown_roles_are_an_error(options, message):
    with pytest.raises(InputError, match=message):
        evaluate({"up": calibrated()}, INSIDE, [NEAR, FAR], **options)


def noise(n, seed, name) -> kedge.ImageSet:
    generator = torch.Generator().manual_seed(100 + seed)
    pixels = torch.randint(0, 256, (n, 3, 4, 4), dtype=torch.uint8, generator=generator)
    return kedge.ImageSet(pixels, torch.arange(n) % 3, name=name)


TRAIN, HELD_OUT, TEST = noise(40, 0, "train"), noise(60, 1, "held out"), noise(50, 2, "test")
OTHER, MORE = noise(30, 3, "other"), noise(20, 4, "more")
TURNED, OWN = noise(24, 5, "turned"), noise(21, 6, "other, known")


def amp(**options) -> AMP:
    """AMP on a network whose anchors disagree, and more about some images than about others."""
    with seeded(1):
        net = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.Tanh(), nn.Linear(16, 3))
        net[3].weight.data *= 4
    return AMP(kedge.anchor(net, init="fresh", seed=1), **{"k": 4} | options).fit(TRAIN).calibrate(HELD_OUT)


@pytest.mark.parametrize("role", ["shifted", "known_in"])
@pytest.mark.parametrize("what", ["anchor", "calibration image"])
def test_images_that_the_detector_was_built_with_are_refused_in_every_role(role, what):
    detector = amp()
    anchor = (detector.net.anchors[:1] * 255).round().to(torch.uint8)
    leak = anchor if what == "anchor" else HELD_OUT.images[7:8]
    leaky = kedge.ImageSet(torch.cat([TURNED.images, leak]), torch.zeros(25, dtype=torch.int64), "leaky")
    message = rf"1 of the images in 'leaky' are among the {what}s of 'AMP' \(the first is number 24"

    def run(images):
        return evaluate(
            {"AMP": detector}, TEST, [OTHER], **{role: [images] if role == "shifted" else {"other": images}}
        )

    with pytest.raises(InputError, match=message):
        run(leaky)
    run(leaky.subset(range(24)))


# Other values of tau.


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"rescale": "plain"}, {"rescale": "none"}, {"tau": "mean", "score": "energy"}, {"score": "msp"}),
        *({"score": lambda logits: -logits[:, 0]}, {"shared_tau": True}, {"variant": "authors", "pool": 20}),
    ],
)
def test_a_detector_s_own_tau_gives_back_its_own_detection(options):
    detector = amp(**options)
    outputs = detector(noise(300, 7, "more than a batch"))
    again = detector.with_tau(outputs, outputs.tau)
    for field in ("label", "logits", "probability", "tau", "score", "p_value", "is_ood"):
        assert torch.equal(getattr(again, field), getattr(outputs, field)), field


def test_tau_that_cannot_be_exchanged_is_an_error():
    detector = amp()
    outputs = detector(TEST)
    for tau, shape in ((outputs.tau[1:], r"\(49,\)"), (outputs.tau[:, None], r"\(50, 1\)")):
        with pytest.raises(InputError, match=rf"tau must be \(50,\), got {shape}"):
            detector.with_tau(outputs, tau)
    for score in ("tau", "mutual_information"):
        other = amp(score=score)
        with pytest.raises(InputError, match=f"score='{score}' is taken of per-anchor logits"):
            other.with_tau(other(TEST), outputs.tau)
    with pytest.raises(NotReadyError, match=r"call calibrate\(held_out\) first"):
        detector.fit(TRAIN).with_tau(outputs, outputs.tau)


# Permuted tau.


def controlled(detectors, **options) -> Evaluation:
    sets = {"shifted": [TURNED], "known_in": {"other": OWN}}
    return evaluate(detectors, TEST, [OTHER, MORE], controls=True, **sets | options)


def together(result, field) -> torch.Tensor:
    return torch.cat([getattr(d, field) for d in result.detections.values()])


def test_only_scores_that_use_the_tau_of_the_image_have_a_control():
    detectors = {
        "AMP": amp(),
        "tau alone": amp(score="tau"),
        "information": amp(score="mutual_information"),
        "energy": amp(score="energy"),
        "one tau": amp(shared_tau=True),
        "no tau": amp(rescale="none"),
        "divided by tau": amp(rescale="plain"),
        "own": amp(score=lambda logits: -logits[:, 0]),
        "MSP": MSP(amp().net).fit(TRAIN).calibrate(HELD_OUT),
    }
    rows = list(controlled(detectors).results)
    controls = [f"{name}, tau permuted" for name in ("AMP", "energy", "divided by tau", "own")]
    assert [name for name in rows if name in detectors] == list(detectors)
    assert [name for name in rows if name not in detectors] == controls
    assert list(evaluate(detectors, TEST, [OTHER]).results) == list(detectors)
    with pytest.raises(InputError, match="no detector may be called 'amp, tau permuted'; rename it"):
        controlled({"amp": amp(), "amp, tau permuted": amp()})


def test_tau_is_permuted_over_all_images_of_all_sets_and_all_else_stays():
    table = controlled({"AMP": amp()})
    own, permuted = table.results["AMP"], table.results["AMP, tau permuted"]
    assert list(permuted.detections) == list(table.sets)
    before, after = (together(r, "tau") for r in (own, permuted))
    assert len(before.unique()) == len(before) == 50 + 30 + 20 + 24 + 21
    assert Counter(after.tolist()) == Counter(before.tolist())
    assert not torch.equal(before, after)
    for name, source in itertools.product(table.sets, repeat=2):
        taken = set(permuted.detections[name].tau.tolist())
        assert taken & set(own.detections[source].tau.tolist()), (name, source)
    for field in ("label", "logits", "probability"):
        assert torch.equal(together(own, field), together(permuted, field))
    assert (permuted.accuracy, permuted.cost) == (own.accuracy, own.cost)
    assert permuted.shifted["turned"].accuracy == own.shifted["turned"].accuracy
    assert not torch.equal(together(own, "score"), together(permuted, "score"))


def test_the_control_is_measured_like_every_row_and_comes_from_the_seed_alone():
    permuted, same, other = (controlled({"AMP": amp()}, seed=s).results["AMP, tau permuted"] for s in (3, 3, 4))
    assert torch.equal(together(permuted, "score"), together(same, "score"))
    assert not torch.equal(together(permuted, "tau"), together(other, "tau"))
    outputs = permuted.detections
    test, turned = outputs["test"].score, outputs["turned"]
    for ood, inside in {"other": torch.cat([test, outputs["other, known"].score]), "more": test}.items():
        for metric in METRICS:
            assert permuted.metrics[ood][metric].value == getattr(metrics, metric)(inside, outputs[ood].score)
    risk = area_under_risk(turned.score.tolist(), (turned.label == TURNED.labels).tolist())
    assert permuted.shifted["turned"].aurc == pytest.approx(risk)
    assert permuted.flagged["more"] == pytest.approx(sum(outputs["more"].is_ood.tolist()) / 20)


@pytest.mark.parametrize("rule", ["exp", "plain"])
def test_permuted_scores_are_those_of_the_formula(rule):
    """The paper's: H / (1 + exp(tau)) or H / tau, then mean minus logsumexp over the classes."""
    detector = amp(rescale=rule)
    calibrated = detector.calibration
    for outputs in controlled({"AMP": detector}).results["AMP, tau permuted"].detections.values():
        for i in range(len(outputs)):
            tau, score = float(outputs.tau[i]), float(outputs.score[i])
            logits = [float(h) / (1 + math.exp(tau) if rule == "exp" else tau) for h in outputs.logits[i]]
            expected = sum(logits) / 3 - math.log(sum(math.exp(h) for h in logits))
            assert score == pytest.approx(expected, rel=1e-5, abs=1e-5)
            at_least = sum(float(s) >= score for s in calibrated.scores)
            assert float(outputs.p_value[i]) == pytest.approx((1 + at_least) / 61)
            assert bool(outputs.is_ood[i]) == (score > calibrated.threshold)


# Leads beyond noise where known images count.


def drawn_rows(sizes, resamples, seed):
    """Which images stand in each resample: those of every set, drawn with replacement."""
    rng = np.random.default_rng(seed)
    return [[rng.integers(n, size=n) for n in sizes] for _ in range(resamples)]


def test_a_resample_joins_the_sets_that_are_in_distribution_together():
    rng = np.random.default_rng(1)
    sizes, pairs = (12, 7, 9, 6, 5), [((0, 4), 1), ((0,), 3), ((2, 0), 1)]
    scores = [[rng.integers(0, 9, n).tolist() for n in sizes] for _ in range(2)]
    drawn = redraw([[np.array(s) for s in sets] for sets in scores], resamples=5, seed=4, pairs=pairs)
    assert drawn.shape == (5, 2, 3, len(METRICS))
    for r, rows in enumerate(drawn_rows(sizes, 5, 4)):
        for d, (j, (insides, outside)) in itertools.product(range(2), enumerate(pairs)):
            inside = [scores[d][place][i] for place in insides for i in rows[place]]
            outer = [scores[d][outside][i] for i in rows[outside]]
            for m, metric in enumerate(METRICS):
                assert drawn[r, d, j, m] == pytest.approx(ORACLES[metric](inside, outer), abs=1e-12)


def evaluated(scores, *, known_in, shifted=()) -> Evaluation:
    """An evaluation of given scores: by detector, then by set, the first of which is in distribution."""
    first = next(iter(scores.values()))
    sets = {name: noise(len(values), 20 + i, name) for i, (name, values) in enumerate(first.items())}
    table = Evaluation({}, sets, next(iter(sets)), 0, tuple(shifted), known_in)
    for label, by_set in scores.items():
        detections, values = {}, {}
        for name, each in by_set.items():
            score, cut, logits = torch.tensor(each, dtype=torch.float64), torch.arange(39.0), torch.zeros(len(each), 3)
            p_value, is_ood = calibration.p_values(cut, score), calibration.is_ood(cut, score, 0.05)
            detections[name] = Detection(logits.argmax(1), logits, logits.softmax(1), None, score, p_value, is_ood)
        for ood in table.ood_names:
            inside = [*by_set[table.id_name], *by_set.get(known_in.get(ood), ())]
            values[ood] = {metric: Estimate(ORACLES[metric](inside, by_set[ood])) for metric in METRICS}
        table.results[label] = EvaluationResult(values, {}, {}, 1.0, Cost(forward=1), False, detections)
    return table


def random_scores(detectors, sizes, shifts, seed=0):
    """Scores that share most of their noise, to one decimal so that some tie."""
    rng = np.random.default_rng(seed)
    shared = {name: rng.normal(shifts[name], 1, n) for name, n in sizes.items()}
    return {
        label: {n: (v + rng.normal(0, spread, len(v))).round(1).tolist() for n, v in shared.items()}
        for label, spread in detectors.items()
    }


def test_the_best_are_those_of_a_loop_over_resamples():
    sizes = {"inside": 26, "near": 22, "far": 21, "other light": 20, "of near": 23}
    shifts = {"inside": 0, "near": 1, "far": 3, "other light": 1, "of near": -1}
    scores = random_scores({"sharp": 0.1, "dull": 2.0, "blind": 4.0}, sizes, shifts, seed=3)
    table = evaluated(scores, known_in={"near": "of near"}, shifted=("other light",))
    best = best_beyond_noise(table, resamples=25, seed=6)
    keys = list(itertools.product(scores, ("near", "far"), METRICS))
    drawn = {key: [] for key in keys}
    for rows in drawn_rows(sizes.values(), 25, 6):
        for label, ood, metric in keys:
            redrawn = {name: [scores[label][name][i] for i in row] for name, row in zip(sizes, rows, strict=True)}
            known = redrawn["of near"] if ood == "near" else []
            drawn[label, ood, metric].append(ORACLES[metric](redrawn["inside"] + known, redrawn[ood]))

    def leader(metric, *oods):
        sign = metrics.METRICS[metric].sign
        value = {d: sign * sum(table.results[d].metrics[ood][metric].value for ood in oods) for d in scores}
        redrawn = {d: sign * np.sum([drawn[d, ood, metric] for ood in oods], axis=0) for d in scores}
        first = max(scores, key=value.get)
        leads = [redrawn[first] - redrawn[d] for d in scores if d != first]
        return first if all(np.quantile(lead, 0.025) > 0 for lead in leads) else None

    expected = {(ood, metric): leader(metric, ood) for metric in METRICS for ood in ("near", "far")}
    assert best.by_set == expected
    assert {m: best.overall[m] for m in METRICS} == {m: leader(m, "near", "far") for m in METRICS}
    assert set(expected.values()) == {"sharp", None}  # some leads are beyond noise, some within
