"""A student predicts in one pass what its teacher computes in K: its start, loss, split, files and command."""

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

import kedge
from helpers import StopError, labelled, same_weights, stop_at, wide_weight
from helpers import run_cli as run
from kedge import scores
from kedge.anchoring.mean_anchor import under_mean_anchor
from kedge.data import sources
from kedge.data.digits import digits
from kedge.data.leakage import fingerprints
from kedge.detectors import for_inference
from kedge.errors import ArchitectureError, InputError, NotReadyError
from kedge.experimental import Distillation, distillation_recipe, split_for, untrained_student
from kedge.experimental.distillation import mixed
from kedge.experimental.student import TemperatureHead, temperature_head
from kedge.models import build
from kedge.seeds import seeded
from kedge.training import Recipe, recipe
from kedge.training.losses import Step

SHORT = Recipe(epochs=1, batch=16, lr=1e-3, optimizer="adam", weight_decay=0.0, crop=0, flip=False)


def images(n=48, **options) -> kedge.ImageSet:
    return labelled(n, **{"classes": 3, "channels": 1} | options)


def network(classes=3) -> nn.Module:
    """With logits and batch norms like those of a trained network."""
    with seeded(0):
        net = build("compact", width=4, classes=classes, channels=1).eval()
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_var.uniform_(0.05, 0.2)
        net.fc.weight.data.mul_(5)
    return net


def anchored(net: nn.Module | None = None) -> kedge.Anchored:
    return kedge.anchor(network() if net is None else net, init="fresh", mean=0.5, std=0.25).eval()


def generator(seed) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def teacher(net: nn.Module | None = None, **options) -> kedge.AMP:
    """Calibrated on the last sixteen of the training images."""
    return kedge.AMP(anchored(net), **options).fit(images()).calibrate(images().subset(range(32, 48)), alpha=0.1)


@pytest.fixture(scope="module")
def taught() -> tuple[kedge.AMP, kedge.Student]:
    """A teacher and its student, for tests that change neither."""
    amp = teacher()
    return amp, kedge.distill(amp, images(), recipe=SHORT, half=True)


# --- the start ------------------------------------------------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x - 1


def test_the_start_is_the_network_under_the_mean_anchor():
    for bias in (True, False):
        with seeded(1):
            first = nn.Conv2d(1, 6, 3, stride=2, padding=1, bias=bias, padding_mode="reflect")
            net = anchored(nn.Sequential(first, nn.ReLU(), nn.Flatten(), nn.Linear(96, 3)).double())
        anchors, x = torch.rand(5, 1, 8, 8, dtype=torch.double), torch.rand(7, 1, 8, 8, dtype=torch.double)
        net.set_anchors(anchors)
        start = kedge.Student.prepare(net)(x)
        mean = net.normalise(anchors.mean(dim=0, keepdim=True))
        pairs = torch.cat([mean.expand(7, -1, -1, -1), net.normalise(x) - mean], dim=1)  # [c, x - c]
        widened = nn.Conv2d(2, 6, 3, stride=2, padding=1, bias=bias, padding_mode="reflect").double()
        widened.weight, widened.bias = nn.Parameter(wide_weight(net)), net.anchored_layer.layer_x.bias
        torch.testing.assert_close(start, net.network[1:](widened(pairs)), rtol=1e-12, atol=1e-12)
        assert not torch.allclose(start, net(x), atol=1e-3)  # the mean over anchors is something else behind a ReLU
    for net in (
        nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 3)),
        nn.Sequential(Doubled(), nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 3)),
    ):  # in a linear network it is the mean over anchors
        net, x = anchored(net), torch.rand(5, 1, 8, 8)
        net.set_anchors(torch.rand(4, 1, 8, 8))
        torch.testing.assert_close(under_mean_anchor(net)(x), net(x), rtol=1e-5, atol=1e-5)


def test_the_copy_keeps_record_and_statistics_and_leaves_the_original():
    net = anchored()
    net.set_anchors(torch.rand(3, 1, 8, 8))
    net.record, net.outliers = {"seed": 7}, torch.zeros(2, 16, dtype=torch.uint8)
    before, start = copy.deepcopy(net), under_mean_anchor(net)
    assert (start.record, len(start.outliers), float(start.mean), float(start.std)) == ({"seed": 7}, 2, 0.5, 0.25)
    assert type(start) is kedge.Classifier
    start.network.prep[0].anchor_maps.data.add_(1)
    assert same_weights(net, before)
    with pytest.raises(NotReadyError, match="no anchors to take the mean of"):
        under_mean_anchor(anchored())


def test_before_training_the_mean_log_tau_is_the_teacher_s():
    with seeded(1):  # without batch statistics, which a step without a rate would change too
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    amp = teacher(net)
    student = kedge.distill(amp, images(), recipe=Recipe(epochs=1, batch=16, lr=1e-30, crop=0, flip=False))
    part = images().subset(range(32))  # all of them: fewer than the images used to estimate it
    assert student(part).tau.log().mean().item() == pytest.approx(amp(part).tau.log().mean().item(), abs=1e-3)
    torch.testing.assert_close(student(part).logits, under_mean_anchor(amp.net)(part.images), rtol=1e-4, atol=1e-4)


def test_tau_is_the_spread_of_sigmoids_for_a_small_spread_of_logits_and_does_not_move_them():
    head, spread = TemperatureHead(nn.Linear(4, 3).double(), hidden=2, seed=0), 1e-4
    features, noise = torch.randn(6, 4, dtype=torch.double), torch.randn(20_000, 1, 1, dtype=torch.double)
    head.start_at(math.log(spread))
    output = head(features)
    tau = scores.tau(output.logits.detach() + spread * noise / noise.std())
    torch.testing.assert_close(output.extra[0].exp(), tau, rtol=1e-3, atol=0)
    output.extra[0].square().sum().backward()
    assert head.classes.weight.grad is None
    assert head.log_spread[-1].bias.grad is not None


# --- the loss -------------------------------------------------------------------------------------------------------


def test_the_loss_of_a_step_is_the_distance_on_its_images_and_their_mixes(taught):
    loss = Distillation(taught[0], mix=0.5)
    logits, aims = torch.tensor([[1.0, 2.0, 6.0], [0.0, 1.0, -1.0]]), torch.tensor([[2.0, 2.0, 5.0], [3.0, 0.0, 0.0]])
    off, size = 1 + 0 + 1 + 9 + 1 + 1, 4 + 4 + 25 + 9  # by hand
    expected = off / size + ((0.1 - 0.5) ** 2 + (-2 + 1) ** 2) / 2
    distance = loss.distance(logits, torch.tensor([0.1, -2.0]), (aims, torch.tensor([0.5, -1.0])))
    assert distance.item() == pytest.approx(expected, rel=1e-6)
    net = kedge.Student.prepare(taught[0].net).eval()  # without batch statistics a loss is the sum over its images
    x = images(8, seed=4).images.float() / 255
    step = Step(net, net, x, torch.arange(8) % 3, None, None, None, {}, 0.0, 0, 8, 0.0, generator=generator(5))
    result = loss.loss(step)
    every = torch.cat([x, mixed(x, 4, generator(5))])
    output = net(every, raw=True)
    expected = loss.distance(output.logits, output.extra[0], loss.targets(every)).item()
    assert result.value.item() == pytest.approx(expected, rel=1e-5)
    assert result.logits.allclose(net(x), atol=1e-6)
    result.value.backward()
    assert all(p.grad is not None for p in net.parameters())
    x = torch.eye(6).double()  # mixes lie between two images
    mixes = mixed(x, 6, generator(0))
    assert mixes.equal(mixed(x, 6, generator(0)))
    assert mixes.sum(dim=1).allclose(torch.ones(6).double())
    assert all(int((row > 0).sum()) <= 2 for row in mixes)
    assert len({tuple((row > 0).tolist()) for row in mixes}) > 3
    assert mixed(x, 0, generator(0)).shape == (0, 6)


@pytest.mark.parametrize("options", [{}, {"variant": "recommended"}, {"variant": "authors"}])
def test_targets_are_the_teacher_s_outputs_with_all_its_anchors(options):
    amp = teacher(**options)
    x = images(9, seed=3).images.float() / 255
    logits, log_tau = Distillation(amp).targets(x)
    logits_k = amp.net.per_anchor_logits(x, tta=6 if options == {"variant": "recommended"} else 1)
    assert logits.allclose(logits_k.mean(dim=0), atol=1e-6)
    deviations = logits_k.detach().sigmoid().double().numpy().std(axis=0, ddof=1)
    tau = deviations.sum(axis=1) if amp.tau == "sum" else deviations.mean(axis=1)
    np.testing.assert_allclose(log_tau, np.log(tau), rtol=1e-4)


def test_a_teacher_is_identified_by_its_weights_anchors_and_options(taught):
    amp, other = taught[0], teacher()
    next(other.net.parameters()).data[0, 0] += 1e-3
    moved = kedge.AMP(copy.deepcopy(amp.net), seed=9).fit(images())
    teachers = (amp, teacher(), other, moved, teacher(score="energy"))
    same, *others = (Distillation(each).config()["teacher"] for each in teachers)
    assert others[0] == same
    assert len(set(others)) == 4


# --- the student ----------------------------------------------------------------------------------------------------


def test_the_score_is_that_of_logits_divided_by_tau(taught):
    net, x = kedge.Student.prepare(taught[0].net), images(6, seed=2)
    nn.init.normal_(temperature_head(net).log_spread[-1].weight)
    with torch.no_grad():
        output = net(x.images.float() / 255, raw=True)
    tau = output.extra[0].exp()
    assert tau.std() > 1e-3
    for rescale, divisor in {"exp": 1 + tau.exp(), "plain": tau, "none": torch.ones(6)}.items():
        for score in scores.SCORES:
            student = kedge.Student(net, score=score, rescale=rescale).fit(images())
            expected = scores.SCORES[score](output.logits / divisor[:, None])
            assert student.score(x).allclose(expected, rtol=1e-4, atol=1e-5)
            assert (student.cost, student.rescores) == (kedge.detectors.Cost(forward=1), rescale != "none")


def test_a_student_has_its_teacher_s_score_classes_guarantee_and_statistics_and_is_saved(taught, tmp_path):
    amp, student = taught
    other = kedge.distill(teacher(score="energy", rescale="plain", variant="recommended"), images(), recipe=SHORT)
    assert [(s.score_by, s.rescale) for s in (student, other)] == [("kl_uniform", None), ("energy", "plain")]
    assert (student.classes, student.calibration.alpha) == (("ant", "bee", "cow"), 0.1)
    record = student.net.record["teacher"]
    assert (record["method"], record["anchors"]) == ("amp", 5)
    ours, theirs = ([m for m in net.modules() if isinstance(m, nn.BatchNorm2d)] for net in (student.net, amp.net))
    for a, b in zip(ours, theirs, strict=True):
        assert a.running_mean.equal(b.running_mean)
        assert a.running_var.equal(b.running_var)
        assert not a.bias.equal(b.bias)
    x = images(9, seed=2)
    student.save(tmp_path / "student.kedge")
    again = kedge.load(tmp_path / "student.kedge")
    for one, two in zip(vars(student(x)).values(), vars(again(x)).values(), strict=True):
        assert one.equal(two) if isinstance(one, torch.Tensor) else one == two
    assert all(p.equal(p.half().float()) for p in again.net.parameters())
    fast = for_inference(again)
    assert fast is not again
    torch.testing.assert_close(fast(x).tau, again(x).tau, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(fast.score(x), again.score(x), rtol=1e-3, atol=1e-4)


def test_a_score_and_a_network_of_the_user_s_own(taught, tmp_path):
    def own():
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.ReLU(), nn.Linear(8, 3))

    def deviation(logits):
        return -logits.std(dim=1)

    with seeded(2):
        amp = teacher(own(), score=deviation)
    path, student, x = tmp_path / "student.kedge", kedge.distill(amp, images(), recipe=SHORT), images(5, seed=2)
    with pytest.warns(kedge.errors.KedgeWarning, match="no graph"):
        student.save(path)
    assert kedge.load(path, model=own(), score=deviation).score(x).equal(student.score(x))
    with pytest.raises(InputError, match="score function of its own"):
        kedge.load(path, model=own())
    with seeded(3):
        wide = build("wrn", depth=10, width=1, classes=3, channels=1)
    for network, name, width in (("compact", "compact", 32), (wide, "wrn", 1)):  # other networks than the teacher's
        student = kedge.distill(taught[0], images(), network=network, recipe=SHORT, held_out=images(20, seed=8))
        assert (student.net.network.spec.name, student.net.network.spec.arguments["width"]) == (name, width)
        norms = [m for m in student.net.modules() if isinstance(m, nn.BatchNorm2d)]
        assert not any(bool((norm.running_mean == 0).all()) for norm in norms)  # statistics of its own
        student.save(path)
        assert kedge.load(path).score(x).equal(student.score(x))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_a_student_moves_towards_its_teacher(seed):
    """On digits at half their size: nearer to the teacher than it began, on images neither has seen.

    The logits of the mean anchor are near from the start: at the default rate they come nearer, at ten times that rate
    the whole loss does, of which tau is nearly all.
    """
    every = digits()
    small = kedge.ImageSet(every.images[:, :, ::2, ::2].contiguous(), every.labels, "digits")
    used, rest = small.split(0.5)
    train, held = used.split(0.8)
    test = rest.subset(range(500))
    with seeded(seed):
        net = kedge.anchor(build("compact", width=4, channels=1), init="fresh")
    amp = kedge.AMP(kedge.train(net, train, recipe("demo", epochs=5, crop=1), seed=seed)).fit(train).calibrate(held)
    loss, how = Distillation(amp), recipe("distill", batch=64, crop=1, flip=False)
    slow, fast = (kedge.distill(amp, used, recipe=replace(how, lr=lr)) for lr in (how.lr, 10 * how.lr))
    initial = untrained_student(loss, train).calibrate(held)
    aims, before, near, nearer = (each(test) for each in (amp, initial, slow, fast))

    def distance(outputs):
        return float(loss.distance(outputs.logits, outputs.tau.log(), (aims.logits, aims.tau.log())))

    assert distance(nearer) < 0.85 * distance(before)
    errors = [float((outputs.logits - aims.logits).square().mean()) for outputs in (near, before)]
    assert errors[0] < 0.8 * errors[1]


# --- the training ---------------------------------------------------------------------------------------------------


def test_a_run_stopped_in_mid_epoch_resumes_exactly(tmp_path):
    how = Recipe(epochs=2, batch=8, lr=1e-3, optimizer="adam", crop=2)

    def run(directory, amp=None, progress=None, **options):
        options |= {"directory": tmp_path / directory, "checkpoint_seconds": 0.0, "progress": progress}
        return kedge.distill(amp or teacher(), images(), recipe=how, **options)

    straight = run("straight")
    for at in (2, 5):
        with pytest.raises(StopError):
            run(f"stopped {at}", progress=stop_at(at))
        assert same_weights(run(f"stopped {at}").net, straight.net)
    with pytest.raises(InputError, match=r"loss\.mix was 0\.5 and is 0\.25"):
        run("straight", mix=0.25)
    with pytest.raises(InputError, match=r"loss\.teacher was"):
        run("straight", amp=teacher(seed=5))


def test_the_recipe_by_default_crops_and_flips_as_the_teacher_s_training_did():
    amp = teacher()
    assert distillation_recipe(amp, None, fresh=False) == recipe("distill")
    amp.net.record = {"recipe": {"crop": 1, "flip": False, "pad": "reflect", "epochs": 99}}
    assert distillation_recipe(amp, None, fresh=False) == recipe("distill", crop=1, flip=False, pad="reflect")
    assert distillation_recipe(amp, None, fresh=True) == recipe("fast", crop=1, flip=False, pad="reflect")
    assert distillation_recipe(amp, "demo", fresh=True) == recipe("demo")


# --- what it learns from --------------------------------------------------------------------------------------------


def prints(part) -> list[bytes]:
    return [] if part is None else [bytes(row) for row in fingerprints(part.images)]


@pytest.mark.parametrize("given", [{}, {"held_out"}, {"validation"}, {"held_out", "validation"}])
def test_no_image_is_used_for_two_of_training_validation_and_calibration(given):
    data, amp = images(400), kedge.AMP(anchored()).fit(images())
    amp.calibrate(data.subset(range(300, 400)))
    named = {"held_out": data.subset(range(290, 320)), "validation": data.subset(range(20))}
    named = {key: part for key, part in named.items() if key in given}
    parts = split_for(amp, data, **named)
    groups = [set(prints(part)) for part in (parts.train, parts.validation, parts.held_out)]
    assert all(groups)
    assert len(set.union(*groups)) == sum(map(len, groups))
    calibration = set(prints(data.subset(range(300, 400))))
    assert not groups[0] & calibration
    assert all(getattr(parts, key) is part for key, part in named.items())
    if not given:
        assert groups[1] | groups[2] == calibration
        assert 10 < len(groups[1]) < 30  # a fifth, more or less
        shuffled = split_for(amp, data.subset(torch.randperm(400, generator=generator(1))))
        assert set(prints(shuffled.validation)) == groups[1]  # whatever the order
    if given == {"held_out"}:
        assert groups[1] == calibration - groups[2]


def test_validation_images_are_recorded_and_no_image_that_was_used_is_a_test_image(taught):
    amp, student = taught
    parts, record = split_for(amp, images()), student.net.record
    assert record["data"]["sha256"] == parts.train.checksum
    assert student.calibration.scores.equal(student.score(parts.held_out).double().sort().values)
    labels = student(parts.validation).label
    share = (labels == amp(parts.validation).label).double().mean().item()
    assert record["teacher"]["agreement"] == pytest.approx({"share": share, "images": len(parts.validation)})
    other = [images(9, seed=9, name="other")]
    for used in (parts.validation, parts.held_out):
        with pytest.raises(InputError, match="are among the calibration images of 'student'"):
            kedge.evaluate({"student": student}, replace(used, name="used"), other)
    trained = kedge.AMP(kedge.train(anchored(), images(32, seed=7), SHORT)).fit(images(32, seed=7))
    student = kedge.distill(trained, images(), recipe=SHORT, held_out=images(20, seed=8))
    with pytest.raises(InputError, match="'used' is the training set of the network of 'student'"):
        kedge.evaluate({"student": student}, images(32, seed=7, name="used"), other)


def test_data_sets_loaders_and_images_on_disk(taught, tmp_path):
    pairs = [(image.float() / 255, int(label)) for image, label in images(32)]
    for data in (pairs, DataLoader(pairs, batch_size=16)):
        student = kedge.distill(taught[0], data, recipe=SHORT, held_out=DataLoader(images(20, seed=6), batch_size=9))
        assert len(student.calibration.scores) == 20
        assert student.net.record["teacher"]["agreement"] is None  # no images are left for validation
        with pytest.raises(InputError, match="held_out must be in-distribution images"):
            kedge.distill(taught[0], data, recipe=SHORT)
    for number, (image, label) in enumerate(images()):
        folder = tmp_path / ("ant", "bee", "cow")[label]
        folder.mkdir(exist_ok=True)
        Image.fromarray(image[0].numpy()).save(folder / f"{number:02}.png")
    on_disk, how = sources.folder(tmp_path), kedge.Preprocess((1, 8, 8))
    amp = kedge.AMP(anchored()).fit(on_disk, preprocess=how).calibrate(on_disk.subset(range(0, 48, 3)), alpha=0.1)
    student = kedge.distill(amp, on_disk, recipe=SHORT)
    count = student.net.record["teacher"]["agreement"]["images"]
    assert (student.net.record["data"]["images"], len(student.calibration.scores) + count) == (32, 16)
    assert student(tmp_path / "ant" / "00.png").label.shape == (1,)


def test_controls_permute_a_student_s_tau(taught):
    student = copy.deepcopy(taught[1])
    nn.init.normal_(temperature_head(student.net).log_spread[-1].weight, std=0.3)
    sets = images(20, seed=8, name="test"), [images(20, seed=9, name="other")]
    results = kedge.evaluate({"student": student}, *sets, controls=True).results
    assert set(results) == {"student", "student, tau permuted"}
    own, permuted = (result.detections["test"] for result in results.values())
    assert not own.score.equal(permuted.score)
    assert own.logits.equal(permuted.logits)


# --- errors ---------------------------------------------------------------------------------------------------------


def test_bad_arguments_are_named(taught):
    held = images(20, seed=8)
    for data, options, words in (
        (images(), {"mix": 1.5}, r"mix must lie in \[0, 1\]; got 1\.5"),
        (images(), {"recipe": "none"}, "recipe must be one of"),
        (images(), {"network": 5}, r"network must be None, a name or a torch\.nn\.Module; got int"),
        (images(), {"network": "compcat"}, "name must be one of"),
        (images(), {"network": nn.Sequential(nn.Flatten(), nn.Linear(64, 4))}, "classes as its teacher, 3; got 4"),
        (images(), {"held_out": held, "validation": held.subset([1, 5, 7])}, "no image of held_out.*3 are in both"),
        (images(side=6), {}, r"train_set must have images \(1, 8, 8\).*got \(1, 6, 6\)"),
        (images().subset(range(32, 48)), {}, "train_set must have images besides those"),
        (images().subset(range(32)), {}, "held_out must be in-distribution images"),
        (kedge.ImageSet(images().images), {}, "labels"),
    ):
        with pytest.raises(InputError, match=words):
            kedge.distill(taught[0], data, **{"recipe": SHORT} | options)


def test_networks_and_detectors_that_do_not_fit_are_refused_with_the_reason(taught):
    loss, one = Distillation(taught[0]), kedge.anchor(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))
    one.set_anchors(torch.rand(3, 1, 8, 8))
    make, head, needed = kedge.Student.prepare, kedge.Student.prepare(network()), "make and train one with kedge"
    for call, error, words in (
        (lambda: kedge.Student(network()), InputError, needed),
        (lambda: kedge.Student(anchored()), InputError, needed),
        (lambda: kedge.Student(head.fc.classes), InputError, needed),
        (lambda: kedge.Student(head, score="best"), InputError, "score must be"),
        (lambda: make(network(), hidden=0), InputError, "hidden must be"),
        (lambda: make(head), InputError, "must not have a temperature head"),
        (lambda: make(network(), head="stage1"), InputError, "head must name a linear layer"),
        (lambda: make(one), ArchitectureError, "its first linear layer is its last"),
        (lambda: kedge.train(anchored(), images(), SHORT, loss=loss), InputError, "trains unanchored networks"),
        (lambda: kedge.train(network(), images(), SHORT, loss=loss), InputError, "network with a temperature head"),
        (lambda: Distillation(kedge.MSP(network()).fit(images())), InputError, "must be an AMP detector.*got MSP"),
        (lambda: Distillation(teacher(score="tau")), InputError, "each image's own tau.*got score='tau'"),
        (lambda: Distillation(kedge.AMP(anchored(), shared_tau=True).fit(images())), InputError, "shared_tau=True"),
        (lambda: kedge.distill(kedge.AMP(anchored()), images()), NotReadyError, "fit"),
    ):
        with pytest.raises(error, match=words):
            call()


# --- export and the command -------------------------------------------------------------------------------------------


def test_an_exported_student_gives_the_same_outputs_and_quantization_leaves_first_layer_and_temperature(tmp_path):
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from kedge.export import export_onnx, quantise

    student = kedge.distill(teacher(variant="recommended"), images(), recipe=SHORT)
    nn.init.normal_(temperature_head(student.net).log_spread[-1].weight)
    export_onnx(student.calibrate(images(40, seed=8)), tmp_path / "student.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "student.onnx")
    names = [output.name for output in session.get_outputs()]
    assert names == ["label", "probability", "score", "tau", "p_value", "is_ood"]
    for n in (1, 7):
        x = images(n, seed=2).images
        outputs, expected = dict(zip(names, session.run(None, {"images": x.numpy()}), strict=True)), student(x)
        for name in ("label", "is_ood"):
            np.testing.assert_array_equal(outputs[name], getattr(expected, name))
        for name in ("tau", "score"):
            np.testing.assert_allclose(outputs[name], getattr(expected, name), rtol=1e-4)
        np.testing.assert_allclose(outputs["probability"], expected.probability.amax(dim=1), rtol=1e-4)
    quantise(tmp_path / "student.onnx", tmp_path / "int8.onnx", images(), images(30, seed=8))
    kept = {tensor.name: tensor for tensor in onnx.load(tmp_path / "int8.onnx").graph.initializer}
    floats = [name for name, tensor in kept.items() if tensor.data_type == onnx.TensorProto.FLOAT]
    assert any(name.endswith("anchor_maps") for name in floats)
    assert any("log_spread" in name and name.endswith("weight") for name in floats)
    assert any(tensor.data_type == onnx.TensorProto.INT8 for tensor in kept.values())


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distilled")
    teacher().save(folder / "amp.kedge")
    kedge.MSP(network()).fit(images()).calibrate(images(20, seed=8)).save(folder / "msp.kedge")
    for name, part in (("all", images()), ("held", images(30, seed=8)), ("test", images(20, seed=9))):
        np.savez(folder / f"{name}.npz", x=part.images[:, 0].numpy(), y=part.labels.numpy())
    return folder


def test_the_command_writes_a_calibrated_student(home, tmp_path):
    out = tmp_path / "student.kedge"
    train = ("--train", f"npz:{home}/all.npz")
    command = ("distill", home / "amp.kedge", *train, "-o", out, "--epochs", 2, "--batch", 16, "--half")
    done = run(*command)
    assert done.exit_code == 0, done.output
    assert re.search(r"agrees with the teacher on [\d.]+% of \d+ validation images", done.output)
    student = kedge.load(out)
    assert isinstance(student, kedge.Student)
    assert {"optimizer": "adam", "epochs": 2, "batch": 16}.items() <= student.net.record["recipe"].items()
    assert len((tmp_path / "student.kedge.run" / "history.jsonl").read_text().splitlines()) == 2
    info = json.loads(run("info", out, "--json").output)
    assert (info["method"], info["anchors"], info["taught_by"]) == ("student", None, "amp, 5 anchors")
    assert run(*command, "--overwrite").exit_code == 0  # the run is finished, so only the calibration is repeated
    assert same_weights(kedge.load(out).net, student.net)
    sets = ("--test", f"npz:{home}/test.npz", "--ood", f"npz:{home}/held.npz")
    results = json.loads(run("evaluate", home / "amp.kedge", out, *sets, "--json").stdout)["results"]
    passes = {name: result["passes_per_image"]["forward"] for name, result in results.items()}
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


def test_the_command_checks_its_arguments_before_training(home, tmp_path):
    for detector, train, options, words in (
        ("msp", "all", (), "DETECTOR must be an AMP detector"),
        ("amp", "held", (), "held_out must be in-distribution images"),
        ("amp", "all", ("--recipe", "none"), "recipe must be"),
    ):
        command = ("distill", home / f"{detector}.kedge", "--train", f"npz:{home}/{train}.npz", *options)
        done = run(*command, "-o", tmp_path / "none.kedge")
        assert isinstance(done.exception, InputError)
        assert words in str(done.exception)
    assert not list(tmp_path.iterdir())
