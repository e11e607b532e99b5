"""A student says in one pass what its teacher says in K: its start, its loss, its files and its command."""

import copy
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import kedge
from helpers import wide_weight
from kedge import scores
from kedge.anchoring.mean_anchor import under_mean_anchor
from kedge.cli import app
from kedge.data import sources
from kedge.data.digits import digits
from kedge.data.leakage import fingerprints
from kedge.detectors import for_inference
from kedge.errors import ArchitectureError, InputError, NotReadyError
from kedge.experimental import Distillation, chosen_recipe, set_apart, untrained
from kedge.experimental.distillation_loss import mixed
from kedge.experimental.student import TemperatureHead, temperature_head
from kedge.models import build
from kedge.seeds import seeded
from kedge.training import Recipe, recipe
from kedge.training.losses import Step

SHORT = Recipe(epochs=1, batch=16, lr=1e-3, optimizer="adam", weight_decay=0.0, crop=0, flip=False)


def images(n=48, seed=0, side=8, name="toy") -> kedge.ImageSet:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (n, 1, side, side), dtype=torch.uint8, generator=generator)
    return kedge.ImageSet(pixels, torch.arange(n) % 3, name, ("ant", "bee", "cow"))


def network(classes=3) -> nn.Module:
    """As sure of itself as a trained one, and as its batch norms would find it."""
    with seeded(0):
        net = build("compact", width=4, classes=classes, channels=1).eval()
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_var.uniform_(0.05, 0.2)
        net.fc.weight.data.mul_(5)
    return net


def anchored(net: nn.Module | None = None) -> kedge.Anchored:
    return kedge.anchor(network() if net is None else net, init="fresh", mean=0.5, std=0.25).eval()


def teacher(net: nn.Module | None = None, **options) -> kedge.AMP:
    """On held-out images that are the last sixteen of the training images."""
    found = kedge.AMP(anchored(net), **options).fit(images())
    return found.calibrate(images().subset(range(32, 48)), alpha=0.1)


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


# --- the start ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_the_start_is_the_network_under_the_mean_anchor(bias):
    with seeded(1):
        first = nn.Conv2d(1, 6, 3, stride=2, padding=1, bias=bias, padding_mode="reflect")
        net = nn.Sequential(first, nn.ReLU(), nn.Flatten(), nn.Linear(96, 3)).double()
    net = anchored(net)
    anchors = torch.rand(5, 1, 8, 8, dtype=torch.double)
    net.set_anchors(anchors)
    x = torch.rand(7, 1, 8, 8, dtype=torch.double)
    plain = kedge.Student.prepare(net)(x)

    mean = net.normalise(anchors.mean(dim=0, keepdim=True))
    pairs = torch.cat([mean.expand(7, -1, -1, -1), net.normalise(x) - mean], dim=1)  # [c, x - c], as the paper has it
    widened = nn.Conv2d(2, 6, 3, stride=2, padding=1, bias=bias, padding_mode="reflect").double()
    widened.weight, widened.bias = nn.Parameter(wide_weight(net)), net.anchored_layer.layer_x.bias
    torch.testing.assert_close(plain, net.network[1:](widened(pairs)), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(plain, net(x), atol=1e-3)  # the mean over anchors is something else behind a ReLU


def test_where_all_is_linear_the_start_is_the_mean_over_anchors():
    net = anchored(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 3)))
    net.set_anchors(torch.rand(4, 1, 8, 8))
    x = torch.rand(5, 1, 8, 8)
    torch.testing.assert_close(under_mean_anchor(net)(x), net(x), rtol=1e-5, atol=1e-5)


def test_the_start_takes_whatever_precedes_the_first_layer():
    class Doubled(nn.Module):
        def forward(self, x):
            return 2 * x - 1

    net = anchored(nn.Sequential(Doubled(), nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 3)))
    net.set_anchors(torch.rand(3, 1, 8, 8))
    x = torch.rand(5, 1, 8, 8)
    torch.testing.assert_close(under_mean_anchor(net)(x), net(x), rtol=1e-5, atol=1e-5)


def test_a_copy_keeps_what_the_network_knows_and_leaves_the_original():
    net = anchored()
    net.set_anchors(torch.rand(3, 1, 8, 8))
    net.record, net.outliers = {"seed": 7}, torch.zeros(2, 16, dtype=torch.uint8)
    before = copy.deepcopy(net)
    plain = under_mean_anchor(net)
    assert (plain.record, len(plain.outliers), float(plain.mean), float(plain.std)) == ({"seed": 7}, 2, 0.5, 0.25)
    assert type(plain) is kedge.Classifier
    plain.network.prep[0].anchor_maps.data.add_(1)
    assert same(net, before)
    with pytest.raises(NotReadyError, match="no anchors to take the mean of"):
        under_mean_anchor(anchored())


def test_before_training_the_temperatures_are_the_teacher_s_on_average():
    with seeded(1):  # without batch statistics, which a step without a rate would change too
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    amp = teacher(net)
    student = kedge.distill(amp, images(), recipe=Recipe(epochs=1, batch=16, lr=1e-30, crop=0, flip=False))
    part = images().subset(range(32))  # all of them: the set is smaller than what is looked at
    aims, begun = amp(part).temperature.log(), student(part).temperature.log()
    assert begun.mean().item() == pytest.approx(aims.mean().item(), abs=1e-3)
    torch.testing.assert_close(student(part).logits, under_mean_anchor(amp.net)(part.images), rtol=1e-4, atol=1e-4)


def test_a_temperature_is_how_far_sigmoids_spread_when_logits_spread_a_little():
    head = TemperatureHead(nn.Linear(4, 3).double(), hidden=2, seed=0)
    features = torch.randn(6, 4, dtype=torch.double)
    spread = 1e-4
    head.start_at(math.log(spread))
    logits = head(features).logits.detach()
    noise = torch.randn(20_000, 1, 1, dtype=torch.double)
    tau = scores.tau(logits + spread * noise / noise.std())
    torch.testing.assert_close(head(features).extra[0].exp(), tau, rtol=1e-3, atol=0)


def test_learning_the_temperature_does_not_move_the_logits():
    head = TemperatureHead(nn.Linear(4, 3), hidden=2, seed=0)
    head(torch.randn(6, 4)).extra[0].square().sum().backward()
    assert head.classes.weight.grad is None
    assert head.log_spread[-1].bias.grad is not None


# --- the loss -------------------------------------------------------------------------------------------------------


def test_the_distance_by_hand():
    loss = Distillation(teacher())
    logits, aims = torch.tensor([[1.0, 2.0, 6.0], [0.0, 1.0, -1.0]]), torch.tensor([[2.0, 2.0, 5.0], [3.0, 0.0, 0.0]])
    taus, log_aims = torch.tensor([0.1, -2.0]), torch.tensor([0.5, -1.0])
    off = size = 0.0
    for row, aim in zip(logits.tolist(), aims.tolist(), strict=True):
        off += sum((a - b) ** 2 for a, b in zip(row, aim, strict=True))
        size += sum(v**2 for v in aim)
    expected = off / size + ((0.1 - 0.5) ** 2 + (-2 + 1) ** 2) / 2
    assert loss.distance(logits, taus, (aims, log_aims)).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"variant": "recommended"}, {"variant": "authors"}])
def test_targets_are_what_the_teacher_says_under_all_its_anchors(options):
    amp = teacher(**options)
    x = images(9, seed=3).images.float() / 255
    logits, log_tau = Distillation(amp).targets(x)
    hypotheses = amp.net.per_anchor_logits(x, tta=6 if options == {"variant": "recommended"} else 1)
    assert logits.allclose(hypotheses.mean(dim=0), atol=1e-6)
    deviations = hypotheses.detach().sigmoid().double().numpy().std(axis=0, ddof=1)
    tau = deviations.sum(axis=1) if amp.tau == "sum" else deviations.mean(axis=1)
    np.testing.assert_allclose(log_tau, np.log(tau), rtol=1e-4)


def test_a_step_costs_what_its_images_and_their_mixes_cost():
    amp = teacher()
    net = kedge.Student.prepare(amp.net).eval()  # without batch statistics a loss is the sum over its images
    x = images(8, seed=4).images.float() / 255
    step = Step(net, net, x, torch.arange(8) % 3, None, None, None, {}, 0.0, 0, 8, 0.0)
    loss = Distillation(amp, mix=0.5)
    with seeded(5):
        made = loss.loss(step)
    with seeded(5):
        every = torch.cat([x, mixed(x, 4)])
    output = net(every, raw=True)
    assert made.value.item() == pytest.approx(
        loss.distance(output.logits, output.extra[0], loss.targets(every)).item(), rel=1e-5
    )
    assert made.logits.allclose(net(x), atol=1e-6)
    made.value.backward()
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize("other", [None, "compact"])
def test_batch_norms_keep_the_teacher_s_statistics_and_a_fresh_network_finds_its_own(other):
    amp = teacher()
    student = kedge.distill(amp, images(), network=other, recipe=SHORT)
    ours, theirs = ([m for m in net.modules() if isinstance(m, nn.BatchNorm2d)] for net in (student.net, amp.net))
    if other is None:
        assert all(a.running_mean.equal(b.running_mean) for a, b in zip(ours, theirs, strict=True))
        assert all(a.running_var.equal(b.running_var) for a, b in zip(ours, theirs, strict=True))
        assert not any(a.bias.equal(b.bias) for a, b in zip(ours, theirs, strict=True))
    else:
        assert not any(bool((a.running_mean == 0).all()) for a in ours)


def test_mixes_lie_between_two_images():
    x = torch.eye(6).double()
    with seeded(0):
        mixes = mixed(x, 6)
    assert mixes.sum(dim=1).allclose(torch.ones(6).double())
    assert all(int((row > 0).sum()) <= 2 for row in mixes)
    assert len({tuple((row > 0).tolist()) for row in mixes}) > 3
    assert mixed(x, 0).shape == (0, 6)


def test_a_teacher_is_known_by_its_weights_its_anchors_and_its_options():
    amp = teacher()
    marks = {Distillation(each).config()["teacher"] for each in (amp, teacher())}
    assert len(marks) == 1
    other = copy.deepcopy(amp)
    other.net.anchored_layer.layer_x.weight.data[0, 0] += 1e-3
    moved = kedge.AMP(copy.deepcopy(amp.net), seed=9).fit(images())
    marks |= {Distillation(each).config()["teacher"] for each in (other, moved, teacher(score="energy"))}
    assert len(marks) == 4


# --- the student ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", scores.SCORES)
@pytest.mark.parametrize("rescale", ["exp", "plain", "none"])
def test_the_score_is_that_of_logits_and_temperature(score, rescale):
    net = kedge.Student.prepare(teacher().net)
    nn.init.normal_(temperature_head(net).log_spread[-1].weight)
    student = kedge.Student(net, score=score, rescale=rescale).fit(images())
    x = images(6, seed=2)
    with torch.no_grad():
        output = net(x.images.float() / 255, raw=True)
    tau = output.extra[0].exp()
    assert tau.std() > 1e-3
    divisor = {"exp": 1 + tau.exp(), "plain": tau, "none": torch.ones(6)}[rescale]
    expected = scores.SCORES[score](output.logits / divisor[:, None])
    assert student.score(x).allclose(expected, rtol=1e-4, atol=1e-5)
    assert student.cost == kedge.detectors.Cost(forward=1)
    assert student.rescores == (rescale != "none")


@pytest.mark.parametrize("options", [{}, {"score": "energy", "rescale": "plain", "variant": "recommended"}])
def test_a_student_takes_over_its_teacher_s_score_classes_and_promise(options):
    student = kedge.distill(teacher(**options), images(), recipe=SHORT)
    assert (student.score_by, student.rescale) == (options.get("score", "amp"), options.get("rescale"))
    assert student.classes == ("ant", "bee", "cow")
    assert student.calibration.alpha == 0.1
    taught = student.net.record["teacher"]
    assert (taught["method"], taught["anchors"]) == ("amp", 5)


def test_a_saved_student_says_the_same(tmp_path):
    student = kedge.distill(teacher(), images(), recipe=SHORT, half=True)
    student.save(tmp_path / "student.kedge")
    again = kedge.load(tmp_path / "student.kedge")
    x = images(9, seed=2)
    assert isinstance(again, kedge.Student)
    for ours, theirs in zip(vars(student(x)).values(), vars(again(x)).values(), strict=True):
        assert ours.equal(theirs)
    assert all(p.equal(p.half().float()) for p in again.net.parameters())
    fast = for_inference(again)
    assert fast is not again
    torch.testing.assert_close(fast(x).temperature, again(x).tau, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(fast.score(x), again.score(x), rtol=1e-3, atol=1e-4)


def test_a_score_and_a_network_of_the_user_s_own(tmp_path):
    def mine():
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.ReLU(), nn.Linear(8, 3))

    def spread(logits):
        return -logits.std(dim=1)

    with seeded(2):
        net = mine()
    student = kedge.distill(teacher(net, score=spread), images(), recipe=SHORT)
    student.save(tmp_path / "student.kedge")
    again = kedge.load(tmp_path / "student.kedge", model=mine(), score=spread)
    assert again.score(images(5, seed=2)).equal(student.score(images(5, seed=2)))
    with pytest.raises(InputError, match="score function of its own"):
        kedge.load(tmp_path / "student.kedge", model=mine())


@pytest.mark.parametrize("kind", ["by name", "a network"])
def test_another_network_than_the_teacher_s(kind, tmp_path):
    with seeded(3):
        other = build("wrn", depth=10, width=1, classes=3, channels=1) if kind == "a network" else "compact"
    student = kedge.distill(teacher(), images(), network=other, recipe=SHORT, held_out=images(20, seed=8))
    spec = student.net.network.spec
    assert (spec.name, spec.arguments["width"]) == (("wrn", 1) if kind == "a network" else ("compact", 32))
    student.save(tmp_path / "student.kedge")
    assert kedge.load(tmp_path / "student.kedge").score(images(4)).equal(student.score(images(4)))


def test_it_learns_what_its_teacher_says():
    """On digits at half their size: nearer to the teacher than it began, on images that neither has seen."""
    every = digits()
    small = kedge.ImageSet(every.images[:, :, ::2, ::2].contiguous(), every.labels, "digits")
    used, rest = small.split(0.5)
    train, held = used.split(0.8)
    test = rest.subset(range(500))
    with seeded(0):
        net = kedge.anchor(build("compact", width=4, channels=1), init="fresh")
    kedge.train(net, train, recipe("demo", epochs=5, crop=1))
    amp = kedge.AMP(net).fit(train).calibrate(held)
    student = kedge.distill(amp, used, recipe=recipe("distill", epochs=2, batch=64, lr=1e-3, crop=1, flip=False))
    begun = untrained(Distillation(amp), train).calibrate(held)
    aims, before, after = (each(test) for each in (amp, begun, student))

    def off(said):
        logits = (said.logits - aims.logits).square().mean()
        return float(logits), float((said.tau / aims.tau).log().square().mean())

    (logits, tau), (logits_begun, tau_begun) = off(after), off(before)
    assert logits < 0.8 * logits_begun
    assert tau < tau_begun
    assert (after.label == aims.label).double().mean() > (before.label == aims.label).double().mean()


# --- the training ---------------------------------------------------------------------------------------------------


def test_a_run_stopped_in_mid_epoch_goes_on_as_if_it_never_had(tmp_path):
    how = Recipe(epochs=2, batch=8, lr=1e-3, optimizer="adam", crop=2)

    class StopError(Exception):
        pass

    def run(directory, amp=None, progress=None, **options):
        options |= {"directory": tmp_path / directory, "checkpoint_seconds": 0.0, "progress": progress}
        return kedge.distill(amp or teacher(), images(), recipe=how, **options)

    straight = run("straight")
    for at in (2, 5):

        def stop(progress, at=at):
            if progress.step == at:
                raise StopError

        with pytest.raises(StopError):
            run(f"stopped {at}", progress=stop)
        assert same(run(f"stopped {at}").net, straight.net)
    with pytest.raises(InputError, match=r"loss\.mix was 0\.5 and is 0\.25"):
        run("straight", mix=0.25)
    with pytest.raises(InputError, match=r"loss\.teacher was"):
        run("straight", amp=teacher(seed=5))


def test_adam_s_steps_are_torch_s():
    with seeded(0):
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    ours, theirs = kedge.Classifier(copy.deepcopy(net), mean=0.5, std=0.25), copy.deepcopy(net)
    data = images(16)
    how = Recipe(epochs=4, batch=16, lr=0.01, optimizer="adam", weight_decay=0.1, crop=0, flip=False)
    kedge.train(ours, data, how)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        x = (data.images.float() / 255 - 0.5) / 0.25
        nn.functional.cross_entropy(theirs(x), data.labels).backward()
        optimizer.step()
    assert ours.network[1].weight.allclose(theirs[1].weight, atol=1e-5)


def test_the_recipe_by_default_crops_and_flips_as_the_teacher_s_training_did():
    amp = teacher()
    assert chosen_recipe(amp, None, fresh=False) == recipe("distill")
    amp.net.record = {"recipe": {"crop": 1, "flip": False, "pad": "reflect", "epochs": 99}}
    assert chosen_recipe(amp, None, fresh=False) == recipe("distill", crop=1, flip=False, pad="reflect")
    assert chosen_recipe(amp, None, fresh=True) == recipe("fast", crop=1, flip=False, pad="reflect")
    assert chosen_recipe(amp, "demo", fresh=True) == recipe("demo")


# --- what it learns from --------------------------------------------------------------------------------------------


def prints(part) -> list[bytes]:
    return [] if part is None else [bytes(row) for row in fingerprints(part.images)]


@pytest.mark.parametrize("given", [{}, {"held_out"}, {"validation"}, {"held_out", "validation"}])
def test_no_image_is_trained_on_judged_on_and_calibrated_on_at_once(given):
    data, amp = images(400), kedge.AMP(anchored()).fit(images())
    amp.calibrate(data.subset(range(300, 400)))
    named = {"held_out": data.subset(range(290, 320)), "validation": data.subset(range(20))}
    named = {key: part for key, part in named.items() if key in given}
    parts = set_apart(amp, data, **named)
    groups = [set(prints(part)) for part in (parts.train, parts.validation, parts.held_out)]
    assert all(groups)
    assert len(set.union(*groups)) == sum(map(len, groups))
    teacher_s = set(prints(data.subset(range(300, 400))))
    assert not groups[0] & teacher_s
    assert all(getattr(parts, key) is part for key, part in named.items())
    if not given:
        assert groups[1] | groups[2] == teacher_s
        assert 10 < len(groups[1]) < 30  # a fifth, more or less
        shuffled = set_apart(amp, data.subset(torch.randperm(400, generator=torch.Generator().manual_seed(1))))
        assert set(prints(shuffled.validation)) == groups[1]  # whatever the order
    if given == {"held_out"}:
        assert groups[1] == teacher_s - groups[2]


def test_images_to_judge_on_must_not_be_those_to_calibrate_on():
    with pytest.raises(InputError, match=r"validation must have no image of held_out.*3 are in both"):
        kedge.distill(
            teacher(),
            images(),
            recipe=SHORT,
            held_out=images(20, seed=8),
            validation=images(20, seed=8).subset([1, 5, 7]),
        )


def test_a_student_is_judged_on_images_that_it_is_not_calibrated_on():
    amp, data = teacher(), images()
    parts = set_apart(amp, data)
    student = kedge.distill(amp, data, recipe=SHORT)
    assert student.net.record["data"]["sha256"] == parts.train.checksum
    assert student.calibration.scores.equal(student.score(parts.held_out).double().sort().values)
    judged, labels = parts.validation, student(parts.validation).label
    agreement = {"share": (labels == amp(judged).label).double().mean().item(), "images": len(judged)}
    assert student.net.record["teacher"]["agreement"] == pytest.approx(agreement)
    accuracy = (labels == judged.labels).double().mean().item()
    assert student.net.record["history"][-1]["validation_accuracy"] == pytest.approx(accuracy)
    for used in (parts.validation, parts.held_out):
        with pytest.raises(InputError, match="are among the calibration images of 'student'"):
            kedge.evaluate({"student": student}, replace(used, name="used"), [images(9, seed=9, name="other")])


def test_data_sets_and_loaders_of_the_user_s_own():
    pairs = [(image.float() / 255, int(label)) for image, label in images(32)]
    for data in (pairs, DataLoader(pairs, batch_size=16)):
        student = kedge.distill(teacher(), data, recipe=SHORT, held_out=DataLoader(images(20, seed=6), batch_size=9))
        assert len(student.calibration.scores) == 20
        assert student.net.record["teacher"]["agreement"] is None  # nothing is left to judge on
        with pytest.raises(InputError, match="held_out must be in-distribution images that neither was trained on"):
            kedge.distill(teacher(), data, recipe=SHORT)


def test_images_on_disk(tmp_path):
    for number, (image, label) in enumerate(images()):
        folder = tmp_path / ("ant", "bee", "cow")[label]
        folder.mkdir(exist_ok=True)
        Image.fromarray(image[0].numpy()).save(folder / f"{number:02}.png")
    on_disk = sources.folder(tmp_path)
    how = kedge.Preprocess((1, 8, 8))
    amp = kedge.AMP(anchored()).fit(on_disk, preprocess=how).calibrate(on_disk.subset(range(0, 48, 3)), alpha=0.1)
    student = kedge.distill(amp, on_disk, recipe=SHORT)
    judged = student.net.record["teacher"]["agreement"]["images"]
    assert (student.net.record["data"]["images"], len(student.calibration.scores) + judged) == (32, 16)
    assert student(tmp_path / "ant" / "00.png").label.shape == (1,)


def test_what_its_teacher_was_trained_on_is_no_test_set_for_a_student_either():
    amp = kedge.AMP(kedge.train(anchored(), images(32, seed=7), SHORT)).fit(images(32, seed=7))
    student = kedge.distill(amp, images(), recipe=SHORT, held_out=images(20, seed=8))
    with pytest.raises(InputError, match="'used' is what the network of 'student' was trained"):
        kedge.evaluate({"student": student}, images(32, seed=7, name="used"), [images(9, seed=9, name="other")])


def test_controls_permute_a_student_s_temperatures_too():
    student = kedge.distill(teacher(), images(), recipe=SHORT)
    nn.init.normal_(temperature_head(student.net).log_spread[-1].weight, std=0.3)
    sets = images(20, seed=8, name="test"), [images(20, seed=9, name="other")]
    found = kedge.evaluate({"student": student}, *sets, controls=True)
    assert set(found.results) == {"student", "student, tau permuted"}
    plain, permuted = found.results.values()
    assert not plain.detections["test"].score.equal(permuted.detections["test"].score)
    assert plain.detections["test"].logits.equal(permuted.detections["test"].logits)
    assert plain.cost.forward == 1


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: kedge.MSP(network()).fit(images()), "detector must be an AMP detector.*got MSP"),
        (lambda: "cifar10", "detector must be an AMP detector.*got str"),
        (lambda: teacher(score="tau"), "each image's own temperature.*got score='temperature'"),
        (lambda: kedge.AMP(anchored(), shared_tau=True).fit(images()), "got .*temperature='global'"),
    ],
)
def test_a_detector_that_cannot_teach_is_refused_with_the_reason(make, words):
    with pytest.raises(InputError, match=words):
        kedge.distill(make(), images(), recipe=SHORT)


def test_a_teacher_that_is_not_fitted():
    with pytest.raises(NotReadyError, match=r"call AMP\(net\)\.fit\(train_set\) first"):
        kedge.distill(kedge.AMP(anchored()), images(), recipe=SHORT)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mix": 1.5}, r"mix must lie in \[0, 1\]; got 1\.5"),
        ({"mix": math.nan}, "mix must lie in"),
        ({"recipe": "none"}, "recipe must be a Recipe or one of"),
        ({"network": 5}, r"network must be None, a name or a torch\.nn\.Module; got int"),
        ({"network": "compcat"}, "name must be one of"),
        ({"network": nn.Sequential(nn.Flatten(), nn.Linear(64, 4))}, "as many classes as its teacher, 3; got 4"),
    ],
)
def test_options_that_make_no_sense_are_named(options, words):
    with pytest.raises(InputError, match=words):
        kedge.distill(teacher(), images(), **{"recipe": SHORT} | options)


def test_sets_that_do_not_fit_are_named():
    with pytest.raises(InputError, match=r"train_set must have images \(1, 8, 8\).*got \(1, 6, 6\)"):
        kedge.distill(teacher(), images(side=6), recipe=SHORT)
    with pytest.raises(InputError, match="train_set must have images beside those"):
        kedge.distill(teacher(), images().subset(range(32, 48)), recipe=SHORT)
    with pytest.raises(InputError, match="held_out must be in-distribution images"):
        kedge.distill(teacher(), images().subset(range(32)), recipe=SHORT)
    with pytest.raises(InputError, match="labels"):
        kedge.distill(teacher(), kedge.ImageSet(images().images), recipe=SHORT)


def test_networks_that_are_no_student_are_refused():
    for net in (network(), anchored(), kedge.Student.prepare(network()).fc.classes):
        with pytest.raises(InputError, match=r"make and train one with kedge\.distill\(detector, train_set\)"):
            kedge.Student(net)
    with pytest.raises(InputError, match="hidden must be a whole number of at least 1; got 0"):
        kedge.Student.prepare(network(), hidden=0)
    with pytest.raises(InputError, match="must not have a temperature beside its head yet"):
        kedge.Student.prepare(kedge.Student.prepare(network()))
    with pytest.raises(InputError, match="head must name a linear layer"):
        kedge.Student.prepare(network(), head="stage1")
    one = kedge.anchor(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))
    one.set_anchors(torch.rand(3, 1, 8, 8))
    with pytest.raises(ArchitectureError, match="its first linear layer is its last"):
        kedge.Student.prepare(one)
    with pytest.raises(InputError, match="'distillation' trains plain networks"):
        kedge.train(anchored(), images(), SHORT, loss=Distillation(teacher()))
    with pytest.raises(InputError, match="plain network with a temperature beside its head"):
        kedge.train(network(), images(), SHORT, loss=Distillation(teacher()))
    with pytest.raises(InputError, match="score must be a function or one of"):
        kedge.Student(kedge.Student.prepare(network()), score="best")


# --- export ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A student, and the file that it was exported to."""
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    from kedge.export import export_onnx

    student = kedge.distill(teacher(variant="recommended"), images(), recipe=SHORT)
    nn.init.normal_(temperature_head(student.net).log_spread[-1].weight)
    student.calibrate(images(40, seed=8))
    path = tmp_path_factory.mktemp("exported") / "student.onnx"
    export_onnx(student, path)
    return student, path


def test_an_exported_student_says_the_same(exported):
    import onnxruntime

    student, path = exported
    session = onnxruntime.InferenceSession(path)
    names = [output.name for output in session.get_outputs()]
    assert names == ["label", "probability", "score", "temperature", "p_value", "is_ood"]
    for n in (1, 7):
        x = images(n, seed=2).images
        found, said = dict(zip(names, session.run(None, {"images": x.numpy()}), strict=True)), student(x)
        np.testing.assert_array_equal(found["label"], said.label)
        np.testing.assert_array_equal(found["is_ood"], said.is_ood)
        np.testing.assert_allclose(found["temperature"], said.tau, rtol=1e-4)
        np.testing.assert_allclose(found["score"], said.score, rtol=1e-4)
        np.testing.assert_allclose(found["probability"], said.probability.amax(dim=1), rtol=1e-4)


def test_eight_bits_leave_the_first_layer_with_its_shift_and_the_temperature_alone(exported, tmp_path):
    import onnx

    from kedge.export import quantise

    quantise(exported[1], tmp_path / "int8.onnx", images(), images(30, seed=8))
    kept = {tensor.name: tensor for tensor in onnx.load(tmp_path / "int8.onnx").graph.initializer}
    floats = [name for name, tensor in kept.items() if tensor.data_type == onnx.TensorProto.FLOAT]
    assert any(name.endswith("anchor_maps") for name in floats)
    assert any("log_spread" in name and name.endswith("weight") for name in floats)
    assert any(tensor.data_type == onnx.TensorProto.INT8 for tensor in kept.values())


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distilled")
    teacher().save(folder / "amp.kedge")
    kedge.MSP(network()).fit(images()).calibrate(images(20, seed=8)).save(folder / "msp.kedge")
    for name, part in (("all", images()), ("held", images(30, seed=8)), ("test", images(20, seed=9))):
        np.savez(folder / f"{name}.npz", x=part.images[:, 0].numpy(), y=part.labels.numpy())
    return folder


def run(*arguments):
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, [str(argument) for argument in arguments])


def test_the_command_writes_a_calibrated_student(home, tmp_path):
    out = tmp_path / "student.kedge"
    command = ("distill", home / "amp.kedge", "--train", f"npz:{home}/all.npz", "-o", out, "--epochs", 2, "--batch", 16)
    done = run(*command, "--half")
    assert done.exit_code == 0, done.output
    assert re.search(r"the teacher's label for [\d.]+% of \d+ images that it is not calibrated on", done.output)
    student = kedge.load(out)
    assert isinstance(student, kedge.Student)
    assert student.net.record["recipe"] == {
        **student.net.record["recipe"],
        "optimizer": "adam",
        "epochs": 2,
        "batch": 16,
    }
    assert len((tmp_path / "student.kedge.run" / "history.jsonl").read_text().splitlines()) == 2
    told = json.loads(run("info", out, "--json").output)
    assert (told["method"], told["anchors"]) == ("student", None)
    assert told["taught_by"] == "amp, 5 anchors"
    before = student.net.state_dict()
    assert run(*command, "--half").exit_code == 0  # the run is over, so there is nothing to do but calibrate
    assert all(value.equal(before[name]) for name, value in kedge.load(out).net.state_dict().items())
    found = json.loads(
        run("evaluate", home / "amp.kedge", out, "--test", f"npz:{home}/test.npz", "--ood", f"npz:{home}/held.npz",
            "--json").stdout
    )  # fmt: skip
    passes = {name: result["passes_per_image"]["forward"] for name, result in found["results"].items()}
    assert passes == {"amp": 5, "student": 1}


def test_the_command_takes_a_network_and_calibration_images(home, tmp_path):
    done = run(
        "distill", home / "amp.kedge", "--train", f"npz:{home}/all.npz", "--calibrate", f"npz:{home}/held.npz",
        "--network", "compact", "--recipe", "demo", "--epochs", 1, "--batch", 16, "--lr", 0.01, "--mix", 0.25,
        "--directory", tmp_path / "run", "-o", tmp_path / "small.kedge",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    student = kedge.load(tmp_path / "small.kedge")
    assert len(student.calibration.scores) == 30
    assert student.net.network.spec.arguments["width"] != 4
    assert student.net.record["loss"]["mix"] == 0.25
    assert (tmp_path / "run" / "record.json").exists()


def test_the_command_refuses_before_it_trains(home, tmp_path):
    out = tmp_path / "none.kedge"
    for arguments, words in (
        ((home / "msp.kedge", "--train", f"npz:{home}/all.npz"), "detector must be an AMP detector"),
        ((home / "amp.kedge", "--train", f"npz:{home}/held.npz"), "held_out must be in-distribution images"),
        ((home / "amp.kedge", "--train", f"npz:{home}/all.npz", "--recipe", "none"), "recipe must be"),
    ):
        done = run("distill", *arguments, "-o", out)
        assert isinstance(done.exception, (InputError, NotReadyError))
        assert words in str(done.exception)
    assert not out.exists()
    assert not list(tmp_path.iterdir())
