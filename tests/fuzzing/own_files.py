"""Files that kedge writes and reads again: detectors and training checkpoints."""

import contextlib
import json
import math

import torch
from torch import nn

import kedge
from fuzzing.damage import altered, any_of, damaged
from fuzzing.engine import Cases, target
from fuzzing.images import SIDE
from helpers import StopError, images, labelled, network, small_amp, stop_at
from kedge import calibration
from kedge.io import artifact
from kedge.io.facts import facts
from kedge.models.ensemble import Ensemble
from kedge.training import Recipe, train


def altered_tensors(rng, tensors) -> dict:
    """Tensors of which one has other values, another type or shape, is missing, or stands under another name."""
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    name = any_of(rng, sorted(tensors))
    value = tensors[name]
    changes = {
        "type": lambda: value.to(any_of(rng, (torch.float64, torch.float16, torch.int8, torch.bool, torch.int64))),
        "flat": lambda: value.reshape(-1),
        "wide": lambda: value[None],
        "none": lambda: value.reshape(-1)[:0],
        "fewer": lambda: value[:-1] if value.ndim and len(value) else torch.zeros(3),
        "more": lambda: torch.cat([value, value]) if value.ndim else torch.zeros(3),
        "fill": lambda: torch.full_like(value, any_of(rng, (0, 1, -1))),
        "large": lambda: value * any_of(rng, (-1, 100)),
        "extreme": lambda: value.double().fill_(any_of(rng, (math.nan, math.inf, 1e30, -1e30))).to(value.dtype),
        "one": lambda: _with_one(rng, value),
        "zero": lambda: torch.zeros(any_of(rng, ((0,), (1,), (2, 3), (1, 1, 1, 1)))),
    }
    change = any_of(rng, [*changes, "missing", "moved", "swapped", "new"])
    if change in changes:
        tensors[name] = changes[change]()
    elif change == "missing":
        del tensors[name]
    elif change == "moved":
        tensors[name + any_of(rng, ("x", ".weight", ""))] = tensors.pop(name)
    elif change == "swapped":
        other = any_of(rng, sorted(tensors))
        tensors[name], tensors[other] = tensors[other], value
    else:
        tensors[any_of(rng, ("x", "net.x", "detector.x", "calibration.x", "optimizer.x.y", ""))] = value
    return tensors


def _with_one(rng, value):
    changed = value.clone()
    if changed.numel() and changed.is_floating_point():
        changed.view(-1)[int(rng.integers(changed.numel()))] = any_of(rng, (math.nan, math.inf, -math.inf, 1e30))
    return changed


def relabelled(rng, data) -> bytes:
    """A safetensors file whose table of types, shapes and places is altered."""
    size = int.from_bytes(data[:8], "little")
    table = altered(rng, json.loads(data[8 : 8 + size]))
    text = json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def damaged_own(rng, path, data, content) -> None:
    """Write a kedge file that is damaged, or, more often, altered and signed again."""
    header, tensors = content
    kind = rng.integers(8)
    if kind == 0:
        path.write_bytes(damaged(rng, data, head=2000))
    elif kind == 1:
        path.write_bytes(relabelled(rng, data))
    else:
        header = altered(rng, header) if kind < 6 else header
        if "graph.document" in tensors and kind % 2:
            document = json.dumps(altered(rng, json.loads(tensors["graph.document"].numpy().tobytes()))).encode()
            tensors = tensors | {"graph.document": torch.frombuffer(bytearray(document), dtype=torch.uint8)}
        else:
            tensors = altered_tensors(rng, tensors) if kind >= 6 else tensors
        if isinstance(header, dict):
            artifact.write(path, header, tensors)
        else:
            path.write_bytes(data[: len(data) // 2])


@target("kedge")
def kedge_cases(home) -> Cases:
    data, held_out = labelled(60, 3, side=SIDE), images(50, side=SIDE, seed=1)
    net = network(classes=3)
    detectors = [kind(net) for kind in (kedge.MSP, kedge.KNN, kedge.Mahalanobis, kedge.ViM, kedge.ReAct, kedge.ODIN)]
    detectors.append(kedge.MSP(Ensemble([net, network(classes=3, seed=1)])))
    foreign = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(400, 3))
    detectors += [kedge.KNN(kedge.Classifier(foreign, mean=0.4, std=0.3)), kedge.Energy(kedge.anchor(foreign))]
    detectors = [detector.fit(data).calibrate(held_out, delta=0.1) for detector in detectors] + [small_amp(side=SIDE)]
    files = []
    for number, detector in enumerate(detectors):
        detector.save(home / f"{number}.kedge")
        files.append(((home / f"{number}.kedge").read_bytes(), artifact.read(home / f"{number}.kedge")))

    def case(rng, folder):
        path = folder / "detector.kedge"
        damaged_own(rng, path, *any_of(rng, files))
        if rng.random() < 0.2:
            facts(path)
        detector = kedge.load(path)
        calibrated = detector.calibration
        if calibrated is None:
            return True
        expected = calibration.threshold(
            calibrated.scores, calibrated.alpha, calibrated.delta, halved=detector.learns_held_out
        )
        assert calibrated.threshold == expected, "the threshold is not that of the calibration scores"
        assert 0 < calibrated.alpha < 1
        assert 0 < calibrated.temperature < math.inf
        detection = detector(held_out[:4])
        assert bool(torch.isfinite(detection.score).all())
        assert bool(((detection.p_value > 0) & (detection.p_value <= 1)).all())
        assert bool((detection.probability >= 0).all())
        assert torch.allclose(detection.probability.sum(dim=1), torch.ones(4), atol=1e-4)
        assert torch.equal(detection.is_ood, detection.score.double() > calibrated.threshold)
        json.dumps(detection.to_rows(detector.classes), allow_nan=False)
        return True

    yield case


@target("checkpoint")
def checkpoint_cases(home) -> Cases:
    data = labelled(32, 2, channels=1)
    recipe = Recipe(epochs=3, batch=16, lr=0.05, crop=0, flip=False, ema=0.9)

    def run(folder, progress=None):
        return train(network(classes=2, channels=1), data, recipe, directory=folder, progress=progress)

    with contextlib.suppress(StopError):
        run(home, stop_at(5))  # after the checkpoint of the second of three epochs
    checkpoint, lines = (home / "last.ckpt").read_bytes(), (home / "history.jsonl").read_bytes()
    content = artifact.read(home / "last.ckpt")

    def case(rng, folder):
        (folder / "last.ckpt").write_bytes(checkpoint)
        (folder / "history.jsonl").write_bytes(lines)
        if rng.random() < 0.15:
            rows = [json.loads(line) for line in lines.splitlines()]
            changed = altered(rng, rows)
            text = "".join(f"{json.dumps(row)}\n" for row in changed) if isinstance(changed, list) else "x"
            (folder / "history.jsonl").write_bytes(any_of(rng, (damaged(rng, lines), text.encode())))
        else:
            damaged_own(rng, folder / "last.ckpt", checkpoint, content)
        steps = []

        def count(progress):
            steps.append(progress.step)
            assert len(steps) <= 6, f"more steps than the recipe has: {steps}"

        trained = run(folder, count)
        assert all(bool(torch.isfinite(p).all()) for p in trained.parameters())
        return True

    yield case
