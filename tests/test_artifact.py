"""Saved detectors: what comes back is what was saved, or an error; never code, never something else."""

import contextlib
import copy
import functools
import hashlib
import json
import math
import operator
import os
import pickle
import random
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import kedge
from helpers import images, same_weights
from kedge.anchoring.corruption import Corruption
from kedge.detectors.registry import DETECTORS
from kedge.errors import FileFormatError, InputError, KedgeError, KedgeWarning
from kedge.io import artifact
from kedge.io.facts import facts
from kedge.models import build
from kedge.seeds import seeded

SMALL = {"compact": {"width": 4}, "wrn": {"depth": 10, "width": 1, "dropout": 0.3}, "wrn-16-2": {}}
RECORD = {"recipe": {"epochs": 3, "milestones": [1, 2]}, "seed": 7, "final_loss": 0.25, "versions": {"torch": "2"}}


def labelled(n=30, **shape) -> kedge.ImageSet:
    return kedge.ImageSet(images(n, **shape), torch.arange(n) % 3, classes=("ant", "bée", "\u732b"))


def network(name="compact", *, anchored=False, dtype=torch.float32, **options) -> kedge.Classifier:
    with seeded(0):
        net = build(name, classes=3, **SMALL.get(name, {})).to(dtype)
    statistics = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.25, 0.3]}
    net = kedge.anchor(net, init="fresh", **statistics, **options) if anchored else kedge.Classifier(net, **statistics)
    net.record = RECORD
    return net


def mlp(anchored=False, seed=0) -> nn.Module:
    """A network that kedge did not write, and which is small enough to damage byte by byte."""
    with seeded(seed):
        net = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 3))
    return kedge.anchor(net, init="fresh") if anchored else net


def tiny(path, anchored=True, **options) -> kedge.Detector:
    kind = kedge.AMP if anchored else kedge.Energy
    detector = kind(mlp(anchored), **options).fit(labelled(side=2)).calibrate(labelled(side=2, seed=1))
    detector.save(path)
    return detector


def assert_same(detector, again, x) -> None:
    """Compare the state of two detectors and their results."""
    assert type(again) is type(detector)
    assert again.config() == detector.config()
    for name in ("preprocess", "classes"):
        assert getattr(again, name) == getattr(detector, name)
    for name in ("record", "has_statistics", "per_image", "options", "layer", "batches_seen"):
        assert getattr(again.net, name, None) == getattr(detector.net, name, None)
    assert same_weights(detector.net, again.net)
    assert again.score(x).equal(detector.score(x))
    assert again.score(x).dtype == detector.score(x).dtype
    assert (again.calibration is None) == (detector.calibration is None)
    if detector.calibration is not None:
        for one, two in ((detector.calibration, again.calibration), (detector(x), again(x))):
            assert vars(one).keys() == vars(two).keys()
            for name, value in vars(one).items():
                other = getattr(two, name)
                assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other


def assert_comes_back(detector, path, x=None, **given) -> kedge.Detector:
    """Save a detector, load it, compare, and return what was loaded."""
    detector.save(path)
    again = kedge.load(path, **given)
    assert_same(detector, again, images(5, seed=2) if x is None else x)
    return again


# Round trips.


@pytest.mark.parametrize("name", list(SMALL))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("detector_name", ["amp", "energy"])
def test_a_built_in_network_rebuilds_itself(name, dtype, detector_name, tmp_path):
    net = network(name, anchored=detector_name == "amp", dtype=dtype)
    detector = DETECTORS[detector_name](net).fit(labelled()).calibrate(labelled(seed=1), alpha=0.1, delta=0.5)
    state = torch.get_rng_state()
    again = assert_comes_back(detector, tmp_path / "a")
    assert torch.get_rng_state().equal(state)  # though building a network draws its weights
    assert not again.net.training
    assert again.score(images()).dtype == dtype


def test_every_option_of_amp_and_of_anchoring_comes_back(tmp_path):
    for options in (
        {},
        {"variant": "authors", "k": 3},
        {"variant": "authors", "tau": "sum", "rescale": "plain"},
        {"score": "entropy", "rescale": "none"},
        {"score": "tau"},
        {"anchors": "balanced", "k": 7, "seed": 3},
        {"anchors": images(4, seed=9)},
    ):
        detector = kedge.AMP(network(anchored=True), **options).fit(labelled()).calibrate(labelled(seed=1))
        again = assert_comes_back(detector, tmp_path / "a")
        anchors = again.net.anchors
        assert again.fit(labelled(seed=5)).net.anchors.equal(anchors)  # fitted again, it keeps them
    for options in (
        {"corruption": Corruption(crop=False, gray=False), "every": 3},
        {"corruption": None, "mask": 0.25, "mask_target": "uniform", "seed": 11},
    ):
        net = network(anchored=True, **options).train()
        net(images(4))
        assert assert_comes_back(kedge.AMP(net).fit(labelled()), tmp_path / "a").net.batches_seen == 1


class _Blur:
    """A corruption that cannot be copied, as one with a generator of its own cannot."""

    def __init__(self):
        self.generator = torch.Generator()

    def __call__(self, x):
        return x


def test_a_corruption_of_the_user_s_own_is_left_out(tmp_path):
    for function in (torch.flip, lambda x: x, _Blur(), nn.Identity()):
        detector = kedge.AMP(network(anchored=True, corruption=function)).fit(labelled())
        detector.save(tmp_path / "a")
        again = kedge.load(tmp_path / "a")
        assert again.net.options.corruption is None  # it matters to training alone
        assert again.score(images()).equal(detector.score(images()))


def test_what_is_missing_a_threshold_that_flags_nothing_and_mixed_precision_come_back(tmp_path):
    again = assert_comes_back(kedge.Energy(build("compact", width=4, classes=3)).fit(images()), tmp_path / "a")
    assert (again.net.has_statistics, again.classes, again.net.record) == (False, (), {})
    rule = kedge.Preprocess((3, 8, 12), resize="lanczos", fit="stretch")
    with pytest.warns(KedgeWarning):
        detector = kedge.Energy(network()).fit(images(), preprocess=rule).calibrate(torch.rand(5, 3, 8, 12))
    again = assert_comes_back(detector, tmp_path / "a", torch.rand(5, 3, 8, 12))
    assert (again.calibration.threshold, again.preprocess) == (float("inf"), rule)
    net, fresh = (build("compact", width=4, classes=3) for _ in range(2))
    for each in (net, fresh):
        each.flatten.register_forward_hook(lambda module, args, output: output.double())
    net.fc.double()
    assert_comes_back(kedge.Energy(net).fit(images()), tmp_path / "a", model=fresh)


def test_saving_and_loading_again_gives_the_same_bytes(tmp_path):
    tiny(tmp_path / "a")
    kedge.load(tmp_path / "a", model=mlp()).save(tmp_path / "b")
    kedge.load(tmp_path / "b", model=mlp()).save(tmp_path / "c")
    assert artifact.read(tmp_path / "b")[0] == artifact.read(tmp_path / "a")[0]
    assert (tmp_path / "c").read_bytes() == (tmp_path / "b").read_bytes()


def test_any_reader_of_safetensors_can_read_the_header(tmp_path):
    detector = kedge.AMP(network(anchored=True)).fit(labelled()).calibrate(labelled(seed=1))
    detector.save(tmp_path / "a.kedge")
    with safe_open(tmp_path / "a.kedge", framework="pt") as opened:
        header = json.loads(opened.metadata()["kedge"])
        assert opened.get_tensor("calibration.scores").equal(detector.calibration.scores)
        assert opened.get_tensor("net.anchors").equal(detector.net.anchors)
    built = {"width": 4, "classes": 3, "channels": 3, "dropout": 0.0}
    assert (header["version"], header["detector"]["name"]) == (artifact.FORMAT_VERSION, "amp")
    assert header["network"] | {"spec": {"name": "compact", "arguments": built}, "record": RECORD} == header["network"]
    assert header["preprocess"] | {"shape": [3, 8, 8], "resize": "bicubic", "fit": "crop"} == header["preprocess"]
    assert header["classes"] == ["ant", "bée", "\u732b"]
    calibration = header["calibration"]
    assert (calibration["threshold"], calibration["images"]) == (detector.calibration.threshold, 30)


# Networks and scores that are not in the file.


@pytest.mark.parametrize("anchored", [True, False])
def test_a_foreign_network_is_given_again_as_it_was_or_wrapped(anchored, tmp_path):
    detector = tiny(tmp_path / "a", anchored)
    assert_same(detector, kedge.load(tmp_path / "a"), images(5, side=2))  # by its graph
    wrapped = mlp(anchored=True, seed=5) if anchored else kedge.Classifier(mlp(seed=5))
    for given in (mlp(seed=5), mlp(seed=5).double(), wrapped):
        assert_same(detector, kedge.load(tmp_path / "a", model=given), images(5, side=2))
    if not anchored:
        with pytest.raises(InputError, match="it is anchored"):
            kedge.load(tmp_path / "a", model=mlp(anchored=True))
    one = kedge.AMP(kedge.anchor(nn.Linear(4, 3), init="fresh")).fit(torch.randn(30, 4))  # a network of one layer
    assert_comes_back(one, tmp_path / "b", torch.randn(5, 4), model=nn.Linear(4, 3))


@pytest.mark.parametrize("anchored", [True, False])
def test_another_network_is_refused(anchored, tmp_path):
    tiny(tmp_path / "a", anchored)
    for wrong in (
        nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3)),
        nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 2)),
        nn.Sequential(nn.Flatten(), nn.Linear(12, 4)),
        nn.Sequential(nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(12, 4)),
        build("compact", width=4, classes=3),
        "mlp",
    ):
        with pytest.raises(InputError, match=r"model must be"):
            kedge.load(tmp_path / "a", model=wrong)


def test_a_score_of_the_user_s_own_is_given_again(tmp_path):
    def spread(logits):
        return logits.std(dim=1)

    detector = tiny(tmp_path / "a", score=spread)
    with pytest.raises(InputError, match="saved with a score function of its own; pass it again as score="):
        kedge.load(tmp_path / "a", model=mlp())
    assert_same(detector, kedge.load(tmp_path / "a", model=mlp(), score=spread), images(5, side=2))
    tiny(tmp_path / "b")
    tiny(tmp_path / "c", anchored=False)
    for named in ("b", "c"):
        with pytest.raises(InputError, match="score must not be given"):
            kedge.load(tmp_path / named, model=mlp(), score=spread)


# Damage. A file either says that it is damaged or holds what it held.


class Saved(NamedTuple):
    whole: bytes
    content: tuple
    header_end: int


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "a.kedge"
    tiny(path)
    whole = path.read_bytes()
    return Saved(whole, artifact.read(path), 8 + struct.unpack("<Q", whole[:8])[0])


def test_a_file_that_is_cut_or_longer_is_refused_wherever_it_ends(saved, tmp_path):
    path = tmp_path / "cut.kedge"
    ends = {*range(saved.header_end + 8), *range(saved.header_end, len(saved.whole), 37), len(saved.whole) - 1}
    for content in [saved.whole[:length] for length in sorted(ends)] + [saved.whole + b"\0"]:
        path.write_bytes(content)
        with pytest.raises(FileFormatError, match=r"cut\.kedge is truncated or is not a kedge file"):
            artifact.read(path)
    with pytest.raises(FileFormatError, match="truncated"):
        kedge.load(path)


def test_a_flipped_bit_or_another_byte_is_refused_or_changes_nothing(saved, tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "damaged.kedge"
    header, tensors = saved.content
    bits = [*range(saved.header_end), *rng.integers(saved.header_end, len(saved.whole), 200)]
    for position in (*bits, *rng.integers(0, len(saved.whole), 400)):
        damaged = bytearray(saved.whole)
        damaged[position] = damaged[position] ^ 1 << rng.integers(8) if rng.random() < 0.7 else rng.integers(256)
        path.write_bytes(damaged)
        with contextlib.suppress(FileFormatError):
            again = artifact.read(path)
            assert again[0] == header
            assert again[1].keys() == tensors.keys()
            assert all(again[1][name].equal(tensors[name]) for name in tensors)


def test_every_changed_weight_is_refused(saved, tmp_path):
    path = tmp_path / "changed.kedge"
    for position in range(saved.header_end, len(saved.whole), 23):
        damaged = bytearray(saved.whole)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        for read in (artifact.read, kedge.load):
            with pytest.raises(FileFormatError, match=r"was changed after it was saved: its sha256 does not match"):
                read(path)


def test_an_edited_header_is_refused(saved, tmp_path):
    path = tmp_path / "a"
    path.write_bytes(saved.whole)
    header = artifact.read_header(path)

    def refused(changes, message, *reads):
        save_file(saved.content[1], path, metadata={"kedge": json.dumps(header | changes)})
        for read in reads:
            with pytest.raises(FileFormatError, match=message):
                read(path)

    for changes in ({"classes": ["x", "y", "z"]}, {"calibration": None}, {"more": 1}, {"sha256": "0" * 64}):
        refused(changes, "was changed after it was saved", artifact.read, kedge.load)
    for version in (artifact.FORMAT_VERSION + 1, 10**9, "1", None, 1.0, -5, 0, True):
        message = rf"has format version {version!r}; this kedge reads 1 to {artifact.FORMAT_VERSION}: install"
        refused({"version": version}, message, artifact.read, artifact.read_header)


def test_a_signed_file_with_a_part_missing_or_unknown_is_refused(tmp_path):
    kedge.AMP(network(anchored=True)).fit(labelled()).calibrate(labelled(seed=1)).save(tmp_path / "a")
    whole = artifact.read(tmp_path / "a")
    for change in (
        *(lambda h, t, key=key: h.pop(key) for key in ("detector", "network", "preprocess", "classes")),
        lambda h, t: h["detector"].update(name="oracle"),
        lambda h, t: h["detector"]["config"].update(unheard_of=1),
        lambda h, t: h["calibration"].pop("alpha"),
        lambda h, t: h["network"].pop("record"),
        lambda h, t: h["network"]["anchored"].pop("options"),
        lambda h, t: h["network"]["anchored"]["options"].update(unheard_of=1),
        lambda h, t: h["preprocess"].update(unheard_of=1),
        lambda h, t: h["classes"].append("more than the network has"),
        lambda h, t: h["network"].update(spec={"name": "oracle", "arguments": {}}),
        lambda h, t: h["network"].update(spec={"name": "wrn", "arguments": {"depth": 6 * 10**8 + 4, "width": 1}}),
        lambda h, t: h["network"].update(spec={"name": "compact", "arguments": {"width": 10**9}}),
        lambda h, t: h["network"].update(conversions=[{"name": "udg", "arguments": {"head": "fc", "groups": 10**9}}]),
        lambda h, t: h["detector"].update(name="odin", config={"temperature": 1e-200}),
        lambda h, t: t.pop("calibration.scores"),
        lambda h, t: t.update({"calibration.fingerprints": torch.zeros(3)}),
        lambda h, t: t.pop("net.network.fc.bias"),
        lambda h, t: t.update({"net.std": -t["net.std"]}),
    ):
        content = copy.deepcopy(whole)
        change(*content)
        signed(tmp_path / "a", *content)
        with pytest.raises(KedgeError):
            kedge.load(tmp_path / "a")


HOSTILE = (None, True, math.nan, math.inf, -5, 0, 99, 0.5, 2**70, 10**400, "", "oracle", [], [None], {})


def scalars(content, path=()):
    """The places of all scalars in nested plain data."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        if isinstance(value, (dict, list)) and value:
            yield from scalars(value, (*path, key))
        else:
            yield (*path, key)


def mutants(header, tensors, rng, *, every):
    """Copies of a file's content with one value replaced: where, by what, and the content.

    ``every``: whether the values that the same code reads for every method are replaced by all hostile ones.
    """
    for place in scalars(header):
        for value in HOSTILE if every and place[0] in ("calibration", "version") else rng.sample(HOSTILE, 1):
            changed = copy.deepcopy(header)
            functools.reduce(operator.getitem, place[:-1], changed)[place[-1]] = value
            yield place, value, changed, tensors
    for name in (name for name in tensors if not name.startswith("net.network") or rng.random() < 0.1):
        for change in (
            torch.Tensor.flatten,
            lambda t: t[None],
            lambda t: t.flatten()[:0],
            lambda t: t.double() * math.nan,
        ):
            yield (name,), change, header, {**tensors, name: change(tensors[name])}


@pytest.mark.parametrize("name", ["amp-auto", "deepensemble", "deup", "gram", "knn-anchored", "odin", "student", "svi"])
def test_a_signed_file_with_another_value_is_refused_or_decides_the_same(name, tmp_path):
    path, legacy = tmp_path / "a", Path(__file__).parent / "legacy"
    detector = kedge.load(legacy / f"{name}.kedge")
    detector.net.record = {"preprocess": {"shape": [3, 16, 16], "resize": "bicubic", "fit": "crop"}}
    detector.save(path)
    test = load_file(legacy / "images.safetensors")["test"]
    expected, content = detector(test), artifact.read(path)
    for place, value, header, tensors in mutants(*content, random.Random(name), every=name == "amp-auto"):
        signed(path, header, tensors)
        with contextlib.suppress(KedgeError):
            again = kedge.load(path)
            result = again(test)
            assert again.calibration.threshold == detector.calibration.threshold
            is_option = place[0] in ("detector", "preprocess") or "conversions" in place  # another one may be valid
            if not is_option and place[0] in header:
                assert torch.equal(result.is_ood, expected.is_ood), (place, value)
                assert torch.allclose(result.score, expected.score, atol=1e-4), (place, value)


def test_a_file_whose_method_would_not_end_is_refused(tmp_path):
    kedge.MCDropout(network("wrn"), samples=2).fit(labelled()).save(tmp_path / "a")
    header, tensors = artifact.read(tmp_path / "a")
    header["detector"]["config"]["samples"] = 10**9
    signed(tmp_path / "a", header, tensors)
    with pytest.raises(FileFormatError, match="passes"):
        kedge.load(tmp_path / "a")


def test_a_file_with_another_hash_than_expected_is_refused(tmp_path):
    tiny(tmp_path / "a")
    hashed = hashlib.sha256((tmp_path / "a").read_bytes()).hexdigest()
    for right in (hashed, hashed.upper() + "\n"):
        assert kedge.load(tmp_path / "a", model=mlp(), expected_sha256=right).calibration is not None
    for wrong in ("", "0" * 64, artifact.read_header(tmp_path / "a")["sha256"]):
        with pytest.raises(FileFormatError, match=hashed):
            kedge.load(tmp_path / "a", model=mlp(), expected_sha256=wrong)


def signed(path, header, tensors) -> None:
    """Write a file with whatever header and its right hash."""
    body = {"packed": [], **header}
    save_file(tensors, path, metadata={"kedge": json.dumps(body | {"sha256": artifact._digest(body, tensors)})})


# Files of others.


def test_files_of_something_else_are_refused(tmp_path):
    path = tmp_path / "a"
    for missing in (path, tmp_path, str(path)):
        with pytest.raises(InputError, match="there is no such file"):
            kedge.load(missing)
    for content in (b"", b"\0", b"hello", b"\x89PNG\r\n", b"\xff" * 100, b"{}", b"PK\x03\x04" * 9):
        path.write_bytes(content)
        with pytest.raises(FileFormatError, match="is truncated or is not a kedge file"):
            kedge.load(path)
    for metadata in (None, {"format": "pt"}):
        save_file({"weight": torch.ones(2)}, path, metadata=metadata)
        with pytest.raises(FileFormatError, match="is a safetensors file, but kedge did not write it"):
            kedge.load(path)
    for text in ("", "not json", "[]", "1", "null", "{}", '{"version": 1}', '"version"', "[" * 100000):
        save_file({"weight": torch.ones(2)}, path, metadata={"kedge": text})
        for read in (artifact.read, artifact.read_header):
            with pytest.raises(FileFormatError, match="has a damaged header"):
                read(path)


def test_the_header_is_read_without_the_tensors(saved, tmp_path):
    path = tmp_path / "a"
    damaged = bytearray(saved.whole)
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    header = artifact.read_header(path)
    assert header["detector"]["name"] == "amp"
    assert len(header["sha256"]) == 64
    path.write_bytes(saved.whole)
    scores = artifact.read_tensor(path, "calibration.scores")
    assert scores.equal(kedge.load(path, model=mlp()).calibration.scores)
    with pytest.raises(FileFormatError):
        artifact.read_tensor(path, "nothing")


def test_a_file_of_an_older_version_is_described_in_today_s_words():
    described = facts(Path(__file__).parent / "legacy" / "msp.kedge")
    assert (described["alpha"], described["delta"], described["method"]) == (0.05, None, "msp")


class _Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch '{self.path}'",)


def test_a_pickle_is_refused_and_does_not_run(tmp_path):
    target = tmp_path / "ran"
    (tmp_path / "pickle").write_bytes(pickle.dumps(_Payload(target)))
    torch.save({"net": _Payload(target)}, tmp_path / "torch")
    torch.save({"net": _Payload(target)}, tmp_path / "legacy", _use_new_zipfile_serialization=False)
    for name in ("pickle", "torch", "legacy"):
        with pytest.raises(FileFormatError, match="is not a kedge file"):
            kedge.load(tmp_path / name)
    assert not target.exists()
    pickle.loads((tmp_path / "pickle").read_bytes())  # which shows that the payload would have run
    assert target.exists()


# Writing.


def test_a_failure_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    tiny(tmp_path / "a", anchored=False)
    detector = tiny(tmp_path / "a")  # replaces it
    before = (tmp_path / "a").read_bytes()

    def fails(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifact, "save_file", fails)
    for name in ("a", "b"):
        with pytest.raises(KedgeError, match="No space left"):
            detector.save(tmp_path / name)
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == before


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    detector = kedge.Energy(network()).fit(images())
    with pytest.raises(InputError, match="path must be writable"):
        detector.save(tmp_path / "file" / "a.kedge")
    with pytest.raises(InputError, match="is a directory: add a file name"):
        detector.save(tmp_path)
    detector.save(tmp_path / "new" / "folder" / "a.kedge")
    assert kedge.load(tmp_path / "new" / "folder" / "a.kedge").score(images(2)).shape == (2,)


def test_tensors_of_every_kind_and_numbers_of_the_header_come_back_exactly(tmp_path):
    values = {"a": 0.1 + 0.2, "b": 1e-300, "c": 2**70, "d": float("inf"), "e": None, "f": [True, 'ü\n"']}
    for tensor in (
        *(torch.tensor(1.5), torch.empty(0), torch.empty(0, 3), torch.arange(3), torch.tensor([True, False])),
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.randn(4, 6)[:, ::2].T,
        torch.ones(3, requires_grad=True),
        torch.tensor([float("nan"), float("inf"), -0.0]),
    ):
        artifact.write(tmp_path / "a", values, {"t": tensor, "shared": tensor})
        header, tensors = artifact.read(tmp_path / "a")
        assert header == {"version": artifact.FORMAT_VERSION, **values}
        for name in ("t", "shared"):
            assert (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(tensors[name].nan_to_num(7), tensor.detach().nan_to_num(7))


def test_what_half_precision_holds_takes_half_the_room_and_comes_back_exactly(tmp_path):
    rounded, sizes = torch.randn(64, 64).half().float(), []
    for tensor in (rounded + 2**-20, rounded):
        artifact.write(tmp_path / "a", {}, {"t": tensor})
        sizes.append((tmp_path / "a").stat().st_size)
        again = artifact.read(tmp_path / "a")[1]["t"]
        assert again.dtype == torch.float32
        assert torch.equal(again, tensor)
    assert sizes[0] - sizes[1] > 0.9 * 64 * 64 * 2
    net = kedge.anchor(build("compact", width=8), seed=0)
    assert_comes_back(kedge.AMP(net.round_weights()).fit(images()).calibrate(images(seed=1)), tmp_path / "a")
    for packed in (5, ["nothing of the name"], "t", None, [["t"]]):
        signed(tmp_path / "a", {"version": artifact.FORMAT_VERSION, "packed": packed}, {"tensor": torch.ones(1)})
        with pytest.raises(FileFormatError, match="damaged header"):
            artifact.read(tmp_path / "a")


def test_memory_that_is_shared_is_copied_and_other_is_not(tmp_path, monkeypatch):
    given = torch.arange(4000.0) + 0.1
    tensors = {"whole": given, "again": given, "view": torch.ones(10)[3:5], "transposed": torch.rand(2, 3).T}
    written = {}

    def save(content, path, **options):
        written.update(content)
        save_file(content, path, **options)

    monkeypatch.setattr(artifact, "save_file", save)
    artifact.write(tmp_path / "a.kedge", {"kind": "example"}, tensors)
    read = artifact.read(tmp_path / "a.kedge")[1]
    assert all(read[name].equal(value) for name, value in tensors.items())
    assert written["whole"].data_ptr() == given.data_ptr()  # a large bank is not held twice
