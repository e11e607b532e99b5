"""Controls of an evaluation: known images in an OOD set's source, shifted images, permuted temperatures."""

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


def test_known_images_are_in_distribution_against_their_own_ood_set():
    detectors = {"up": calibrated(), "down": calibrated(-1.0)}
    table = evaluate(detectors, INSIDE, [NEAR, FAR], known_in={"near": KNOWN})
    for name, detector in detectors.items():
        inside, known, near, far = (detector.score(s) for s in (INSIDE, KNOWN, NEAR, FAR))
        for metric, function in DIRECT.items():
            found = {ood: table.results[name].metrics[ood][metric].value for ood in ("near", "far")}
            assert found == {"near": function(torch.cat([inside, known]), near), "far": function(inside, far)}
        assert table.inside(name, "near").tolist() == inside.tolist() + known.tolist()
        assert table.inside(name, "far").tolist() == inside.tolist()


def test_known_images_leave_all_else_as_it_was():
    without = evaluate({"up": calibrated()}, INSIDE, [NEAR, FAR]).results["up"]
    result = evaluate({"up": calibrated()}, INSIDE, [NEAR, FAR], known_in={"near": KNOWN}).results["up"]
    assert result.metrics["near"]["auroc"] != without.metrics["near"]["auroc"]
    assert list(result.metrics) == ["near", "far"]
    assert result.metrics["far"] == without.metrics["far"]
    assert (result.accuracy, result.ece, result.aurc) == (without.accuracy, without.ece, without.aurc)
    assert result.flagged.items() >= without.flagged.items()
    assert result.mean("auroc") == pytest.approx(sum(m["auroc"].value for m in result.metrics.values()) / 2)


def test_their_intervals_redraw_the_known_images_too():
    table = evaluate({"up": calibrated()}, INSIDE, [NEAR], known_in={"near": KNOWN}, resamples=30, seed=5)
    inside, known, near = (calibrated().score(s) for s in (INSIDE, KNOWN, NEAR))
    assert table.results["up"].metrics["near"] == detection_metrics(
        torch.cat([inside, known]), near, resamples=30, seed=5
    )


def test_known_and_shifted_sets_are_no_ood_sets():
    table = evaluate({"up": calibrated()}, INSIDE, [NEAR, FAR], shifted=[DIM, GLARE], known_in={"far": KNOWN})
    assert table.ood_names == ("near", "far") == tuple(table.results["up"].metrics)
    assert table.shifted_names == ("dim", "glare") == tuple(table.results["up"].shifted)
    assert table.known_in == {"far": "near, known"}
    every = {"inside", "near", "far", "dim", "glare", "near, known"}
    assert set(table.sets) == set(table.results["up"].detections) == set(table.results["up"].flagged) == every
    assert next(iter(table.sets)) == "inside"


def test_pairs_are_places_among_the_sets():
    sets = dict.fromkeys(("inside", "a", "shifted", "b", "of b", "c", "of c"), INSIDE)
    table = Evaluation({}, sets, "inside", 0, ("shifted",), {"c": "of c", "b": "of b"})
    assert table.ood_names == ("a", "b", "c")
    assert table.pairs() == [((0,), 1), ((0, 4), 3), ((0, 6), 5)]


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
    found = evaluate({"it": detector}, INSIDE, [FAR], shifted=[DIM]).results["it"].shifted["dim"]
    scores, right, accepted = [], [], []
    for image, label in zip(DIM.images, DIM.labels.tolist(), strict=True):
        means = [float(channel.float().mean()) for channel in image]
        scores.append(float(detector.score(image[None])))
        right.append(means.index(max(means)) == label)
        if scores[-1] <= detector.calibration.threshold:
            accepted.append(right[-1])
    assert 0 < len(accepted) < len(right)
    assert found.accuracy == pytest.approx(sum(right) / 33)
    assert found.accepted_accuracy == pytest.approx(sum(accepted) / len(accepted))
    assert found.aurc == pytest.approx(area_under_risk(scores, right))


def test_where_nothing_is_accepted_there_is_no_accuracy_of_what_is():
    result = evaluate({"up": calibrated()}, INSIDE, [FAR], shifted=[GLARE]).results["up"]
    assert result.flagged["glare"] == 1
    assert result.shifted["glare"].accepted_accuracy is None
    assert result.shifted["glare"].accuracy == 1  # of equal channels the first is taken, and it is the label


def test_as_dict_is_plain_data_with_shifted_images():
    table = evaluate({"up": calibrated()}, INSIDE, [NEAR], shifted=[DIM, GLARE], known_in={"near": KNOWN})
    plain = table.as_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    told = plain["results"]["up"]["shifted"]
    assert told["glare"]["accepted_accuracy"] is None
    assert told["dim"] == vars(table.results["up"].shifted["dim"])
    assert plain["sets"]["near, known"] == {"images": 25, "sha256": KNOWN.checksum}


# What is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shifted": [DIM, kedge.ImageSet(DIM.images, name="bare")]}, "shifted .* with labels.*got 'bare' without"),
        ({"shifted": [[DIM[0], DIM[1]]]}, "shifted must be a list of ImageSets .*got list"),
        ({"known_in": {"nowhere": KNOWN}}, "known_in must name OOD sets, some of near, far; got nowhere"),
        ({"known_in": {"inside": KNOWN}}, "known_in must name OOD sets, some of near, far; got inside"),
        ({"shifted": [DIM], "known_in": {"dim": KNOWN}}, "known_in must name OOD sets, some of near, far; got dim"),
        ({"shifted": [DIM, DIM]}, r"different names, got \['inside', 'near', 'far', 'dim', 'dim'\]"),
        ({"shifted": [kedge.ImageSet(DIM.images, DIM.labels, "near")]}, "the sets must have different names"),
        ({"known_in": {"near": kedge.ImageSet(KNOWN.images, name="inside")}}, "the sets must have different names"),
        ({"known_in": {"near": KNOWN, "far": KNOWN}}, "the sets must have different names"),
        (
            {"shifted": [DIM], "known_in": {"near": kedge.ImageSet(KNOWN.images, name="dim")}},
            "the sets must have different names",
        ),
    ],
)
def test_sets_that_cannot_be_told_apart_or_have_no_place_are_an_error(options, message):
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
def test_images_that_the_detector_was_made_with_are_refused_in_every_role(role, what):
    detector = amp()
    anchor = (detector.net.anchors[:1] * 255).round().to(torch.uint8)
    leak = anchor if what == "anchor" else HELD_OUT.images[7:8]
    leaky = kedge.ImageSet(torch.cat([TURNED.images, leak]), torch.zeros(25, dtype=torch.int64), "leaky")
    options = {"shifted": [leaky]} if role == "shifted" else {"known_in": {"other": leaky}}
    with pytest.raises(
        InputError, match=rf"1 of the images in 'leaky' are among the {what}s of 'AMP' \(the first is number 24"
    ):
        evaluate({"AMP": detector}, TEST, [OTHER], **options)
    clean = leaky.subset(range(24))
    evaluate({"AMP": detector}, TEST, [OTHER], **{role: [clean] if role == "shifted" else {"other": clean}})


# Other temperatures.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rescale": "plain"},
        {"rescale": "none"},
        {"tau": "mean", "score": "energy"},
        {"score": "msp"},
        {"score": lambda logits: -logits[:, 0]},
        {"shared_tau": True},
        {"variant": "authors", "pool": 20},
    ],
)
def test_a_detector_s_own_temperatures_give_back_its_own_detection(options):
    detector = amp(**options)
    said = detector(noise(300, 7, "more than a batch"))
    again = detector.with_tau(said, said.tau)
    for field in ("label", "logits", "probability", "tau", "score", "p_value", "is_ood"):
        assert torch.equal(getattr(again, field), getattr(said, field)), field


def test_a_higher_temperature_puts_an_image_further_out():
    detector = amp()
    said = detector(TEST)
    low, high = (detector.with_tau(said, said.tau + step) for step in (-1.0, 1.0))
    assert (low.score < said.score).all()
    assert (said.score < high.score).all()
    assert torch.equal(low.label, high.label)
    assert not torch.equal(low.is_ood, high.is_ood)  # the threshold stays where it is


def test_what_has_no_temperature_to_exchange_is_an_error():
    detector = amp()
    said = detector(TEST)
    with pytest.raises(InputError, match=r"tau must be \(50,\), got \(49,\)"):
        detector.with_tau(said, said.tau[1:])
    with pytest.raises(InputError, match=r"tau must be \(50,\), got \(50, 1\)"):
        detector.with_tau(said, said.tau[:, None])
    for score in ("tau", "mutual_information"):
        other = amp(score=score)
        with pytest.raises(InputError, match=f"score='{score}' is taken of the hypotheses"):
            other.with_tau(other(TEST), said.tau)
    with pytest.raises(NotReadyError, match=r"call calibrate\(held_out\) first"):
        detector.fit(TRAIN).with_tau(said, said.tau)


# Permuted temperatures.


def controlled(detectors, **options) -> Evaluation:
    sets = {"shifted": [TURNED], "known_in": {"other": OWN}}
    return evaluate(detectors, TEST, [OTHER, MORE], controls=True, **sets | options)


def together(result, field) -> torch.Tensor:
    return torch.cat([getattr(d, field) for d in result.detections.values()])


def test_a_control_never_takes_the_place_of_a_detector():
    with pytest.raises(InputError, match="no detector may be called 'amp, tau permuted'; rename it"):
        controlled({"amp": amp(), "amp, tau permuted": amp()})


def test_only_scores_that_rest_on_the_image_s_own_temperature_have_a_control():
    detectors = {
        "AMP": amp(),
        "tau alone": amp(score="tau"),
        "information": amp(score="mutual_information"),
        "energy": amp(score="energy"),
        "one tau": amp(shared_tau=True),
        "no tau": amp(rescale="none"),
        "plain": amp(rescale="plain"),
        "mine": amp(score=lambda logits: -logits[:, 0]),
        "MSP": MSP(amp().net).fit(TRAIN).calibrate(HELD_OUT),
    }
    rows = list(controlled(detectors).results)
    controls = [f"{name}, tau permuted" for name in ("AMP", "energy", "plain", "mine")]
    assert [name for name in rows if name in detectors] == list(detectors)
    assert [name for name in rows if name not in detectors] == controls
    assert list(evaluate(detectors, TEST, [OTHER]).results) == list(detectors)  # nothing that was not asked for


def test_temperatures_are_exchanged_over_all_images_of_all_sets():
    table = controlled({"AMP": amp()})
    own, permuted = table.results["AMP"], table.results["AMP, tau permuted"]
    assert list(permuted.detections) == list(table.sets)
    before, after = (together(r, "tau") for r in (own, permuted))
    assert len(before.unique()) == len(before) == 50 + 30 + 20 + 24 + 21
    assert Counter(after.tolist()) == Counter(before.tolist())
    assert not torch.equal(before, after)
    for name in table.sets:
        taken = set(permuted.detections[name].tau.tolist())
        for source in table.sets:
            assert taken & set(own.detections[source].tau.tolist()), (name, source)


def test_what_does_not_rest_on_the_temperature_stays():
    table = controlled({"AMP": amp()})
    own, permuted = table.results["AMP"], table.results["AMP, tau permuted"]
    for field in ("label", "logits", "probability"):
        assert torch.equal(together(own, field), together(permuted, field))
    assert (permuted.accuracy, permuted.ece) == (own.accuracy, own.ece)
    assert permuted.shifted["turned"].accuracy == own.shifted["turned"].accuracy
    assert permuted.cost == own.cost
    assert not torch.equal(together(own, "score"), together(permuted, "score"))


@pytest.mark.parametrize("rule", ["exp", "plain"])
def test_permuted_scores_are_those_of_the_formula(rule):
    """The paper's: H / (1 + exp(tau)) or H / tau, then mean minus logsumexp over the classes."""
    detector = amp(rescale=rule)
    permuted = controlled({"AMP": detector}).results["AMP, tau permuted"]
    known = detector.calibration
    for said in permuted.detections.values():
        for i in range(len(said)):
            tau = float(said.tau[i])
            logits = [float(h) / (1 + math.exp(tau) if rule == "exp" else tau) for h in said.logits[i]]
            expected = sum(logits) / 3 - math.log(sum(math.exp(h) for h in logits))
            assert float(said.score[i]) == pytest.approx(expected, rel=1e-5, abs=1e-5)
            at_least = sum(float(s) >= float(said.score[i]) for s in known.scores)
            assert float(said.p_value[i]) == pytest.approx((1 + at_least) / 61)
            assert bool(said.is_ood[i]) == (float(said.score[i]) > known.threshold)


def test_the_control_is_measured_as_every_row_is():
    table = controlled({"AMP": amp()})
    permuted = table.results["AMP, tau permuted"]
    said = permuted.detections
    insides = {"other": torch.cat([said["test"].score, said["other, known"].score]), "more": said["test"].score}
    for ood, inside in insides.items():
        for metric in METRICS:
            assert permuted.metrics[ood][metric].value == getattr(metrics, metric)(inside, said[ood].score)
    right = said["turned"].label == TURNED.labels
    assert permuted.shifted["turned"].aurc == pytest.approx(
        area_under_risk(said["turned"].score.tolist(), right.tolist())
    )
    assert permuted.flagged["more"] == pytest.approx(sum(said["more"].is_ood.tolist()) / 20)


def test_the_permutation_comes_from_the_seed_alone():
    first, same, other = (controlled({"AMP": amp()}, seed=seed).results["AMP, tau permuted"] for seed in (3, 3, 4))
    assert torch.equal(together(first, "score"), together(same, "score"))
    assert not torch.equal(together(first, "tau"), together(other, "tau"))


def test_equal_temperatures_make_the_control_the_detector_itself(monkeypatch):
    monkeypatch.setattr("kedge.scores.tau", lambda hypotheses, reduce: torch.full(hypotheses.shape[1:2], 0.7))
    table = controlled({"AMP": amp()})
    own, permuted = table.results["AMP"], table.results["AMP, tau permuted"]
    assert len(together(own, "tau").unique()) == 1
    assert len(together(own, "score").unique()) > 100
    assert torch.equal(together(own, "score"), together(permuted, "score"))
    assert permuted.metrics == own.metrics
    assert permuted.shifted == own.shifted
    assert permuted.flagged == own.flagged


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


def hand_made(scores, *, known_in, shifted=()) -> Evaluation:
    """An evaluation of given scores: by detector, then by set, the first of which is in distribution."""
    names = list(next(iter(scores.values())))
    sets = {n: noise(len(next(iter(scores.values()))[n]), 20 + i, n) for i, n in enumerate(names)}
    table = Evaluation({}, sets, names[0], 0, tuple(shifted), known_in)
    for label, by_set in scores.items():
        said = {}
        for name, values in by_set.items():
            score, cut = torch.tensor(values, dtype=torch.float64), torch.arange(39.0)
            logits = torch.zeros(len(score), 3)
            said[name] = Detection(
                logits.argmax(dim=1),
                logits,
                logits.softmax(dim=1),
                None,
                score,
                calibration.p_values(cut, score),
                calibration.is_ood(cut, score, 0.05),
            )
        values = {
            ood: {
                metric: Estimate(
                    ORACLES[metric](
                        [*by_set[names[0]], *(by_set[known_in[ood]] if ood in known_in else ())], by_set[ood]
                    )
                )
                for metric in METRICS
            }
            for ood in table.ood_names
        }
        table.results[label] = EvaluationResult(values, {}, {}, 1.0, Cost(forward=1), False, said)
    return table


def random_scores(detectors, sizes, shifts, seed=0):
    """Scores that share most of their noise, to one decimal so that some tie."""
    rng = np.random.default_rng(seed)
    shared = {name: rng.normal(shifts[name], 1, n) for name, n in sizes.items()}
    return {
        label: {n: (v + rng.normal(0, spread, len(v))).round(1).tolist() for n, v in shared.items()}
        for label, spread in detectors.items()
    }


def test_who_is_best_is_what_the_loop_over_resamples_says():
    sizes = {"inside": 26, "near": 22, "far": 21, "other light": 20, "of near": 23}
    shifts = {"inside": 0, "near": 1, "far": 3, "other light": 1, "of near": -1}
    scores = random_scores({"sharp": 0.1, "dull": 2.0, "blind": 4.0}, sizes, shifts, seed=3)
    table = hand_made(scores, known_in={"near": "of near"}, shifted=("other light",))
    best = best_beyond_noise(table, resamples=25, seed=6)
    drawn = {key: [] for key in itertools.product(scores, ("near", "far"), METRICS)}
    for rows in drawn_rows(sizes.values(), 25, 6):
        redrawn = {
            label: {name: [by_set[name][i] for i in row] for name, row in zip(sizes, rows, strict=True)}
            for label, by_set in scores.items()
        }
        for label, ood, metric in drawn:
            known = redrawn[label]["of near"] if ood == "near" else []
            value = ORACLES[metric]([*redrawn[label]["inside"], *known], redrawn[label][ood])
            drawn[label, ood, metric].append(value)

    def leader(value_of, drawn_of, metric):
        sign = -1 if metric.startswith("fpr") else 1
        first = max(scores, key=lambda label: sign * value_of(label))
        leads = [
            [sign * (a - b) for a, b in zip(drawn_of(first), drawn_of(label), strict=True)]
            for label in scores
            if label != first
        ]
        return first if all(np.quantile(lead, 0.025) > 0 for lead in leads) else None

    found, overall = {}, {}
    for metric in METRICS:
        for ood in ("near", "far"):
            found[ood, metric] = leader(
                lambda label, ood=ood, metric=metric: table.results[label].metrics[ood][metric].value,
                lambda label, ood=ood, metric=metric: drawn[label, ood, metric],
                metric,
            )
        overall[metric] = leader(
            lambda label, metric=metric: sum(table.results[label].metrics[o][metric].value for o in ("near", "far")),
            lambda label, metric=metric: np.add(drawn[label, "near", metric], drawn[label, "far", metric]),
            metric,
        )
    assert best.by_set == found
    assert {metric: best.overall[metric] for metric in METRICS} == overall
    assert set(found.values()) == {"sharp", None}  # some leads are beyond noise, some within


def test_a_detector_that_flags_the_known_images_loses_where_they_count():
    sizes = {"inside": 40, "near": 30, "far": 30, "of near": 40}
    shifts = {"inside": 0, "near": 2, "far": 2, "of near": 0}
    scores = random_scores({"good": 0.0}, sizes, shifts)
    scores["bad"] = scores["good"] | {"of near": [score + 5 for score in scores["good"]["of near"]]}
    best = best_beyond_noise(hand_made(scores, known_in={"near": "of near"}), resamples=60)
    assert best.by_set["near", "auroc"] == "good"
    assert best.by_set["far", "auroc"] is None  # the same scores
