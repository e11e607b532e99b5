"""Timings measure the same images, in turns, against one unanchored forward pass; no test depends on the speed."""

import copy
import json
import runpy
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import kedge
from helpers import run_cli, wide_weight
from kedge.errors import FileFormatError, InputError, NotReadyError
from kedge.experimental import EarlyExit
from kedge.provenance import processor
from kedge.seeds import seeded
from kedge.studies import bench
from kedge.studies.bench.early_exit import full_share
from kedge.studies.bench.page import bench_page
from kedge.studies.bench.plain import Naive, on_pairs, without_anchors
from kedge.studies.bench.quality import quality
from kedge.studies.bench.steps import training_steps
from kedge.studies.bench.subjects import HELD_OUT, noise_images
from kedge.studies.bench.turns import Quartiles, in_turns, ratios
from test_report import check

FEW = ("unanchored", "naive", "kedge", "folded", "early-exit")  # those that need no export
SCRIPT = Path(__file__).parents[1] / "benchmarks" / "inference.py"


def noise(n, seed=0):
    return noise_images(n, (3, 32, 32), seed=seed)


def grays(n):
    return torch.arange(n, dtype=torch.uint8)[:, None, None, None].expand(n, 3, 32, 32).contiguous()


@pytest.fixture(scope="module")
def detector():
    return bench.detector_of("compact", width=4, classes=3)


@pytest.fixture(scope="module")
def prepared(detector, tmp_path_factory):
    return bench.prepare_engines(detector, tmp_path_factory.mktemp("bench"), engines=FEW)


@pytest.fixture(scope="module")
def record(detector, prepared):
    return bench.measure(detector, name="tiny", batches=[1, 4], repeats=2, least=0, prepared=prepared)


# --- references -----------------------------------------------------------------------------------------------------


def test_the_unanchored_network_is_the_one_that_anchoring_started_from():
    with seeded(0):
        network = kedge.models.build("airbench", width=4).eval()
    net = kedge.anchor(network, mean=0.4, std=0.2)  # init="preserve": the image's half has the old weights
    images = torch.rand(3, 3, 32, 32)
    assert torch.equal(without_anchors(net)(images), kedge.Classifier(network, mean=0.4, std=0.2)(images))


def test_the_network_of_pairs_has_twice_the_channels_and_the_weights_of_both_halves():
    net = kedge.anchor(nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, bias=False), nn.Flatten()), init="fresh")
    layer = on_pairs(net).network[0]
    assert (type(layer), layer.in_channels, layer.stride, layer.bias) == (nn.Conv2d, 6, (2, 2), None)
    assert torch.equal(layer.weight, wide_weight(net))


@pytest.mark.parametrize("variant", ["paper", "recommended"])
def test_naive_passes_of_pairs_give_the_scores_of_amp(variant):
    images = noise_images(40, (3, 16, 16))
    with seeded(0):
        net = kedge.anchor(kedge.models.build("compact", width=4), init="fresh", mean=0.4, std=0.2)
    detector = kedge.AMP(net, variant=variant).fit(kedge.ImageSet(images, torch.arange(40) % 10))
    assert torch.allclose(Naive(detector)(images[:7]), detector.score(images[:7]), atol=1e-5)


# --- turns ----------------------------------------------------------------------------------------------------------


def test_each_has_a_turn_in_every_round_and_another_one_begins_it():
    called, turns = [], []
    calls = {name: (lambda name=name: called.append(name)) for name in "abc"}
    times = in_turns(calls, repeats=3, least=0, report=turns.append)
    assert called[:6] == ["a", "a", "b", "b", "c", "c"]  # to warm up
    assert called[6:] == turns == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 3, "b": 3, "c": 3}
    with pytest.raises(InputError, match="repeats"):
        in_turns(calls, repeats=0)
    assert ratios([2, 6, 20], [1, 2, 5]) == Quartiles(median=3, low=2.5, high=3.5)  # turn by turn
    assert Quartiles.of([4.0]) == Quartiles(4.0, 4.0, 4.0)


def test_a_fast_call_is_repeated_until_its_turn_is_filled(monkeypatch):
    called = []
    clock = SimpleNamespace(perf_counter=lambda: len(called), sleep=lambda _: None)  # on which a call takes a second
    monkeypatch.setattr("kedge.studies.bench.turns.time", clock)
    times = in_turns({"fast": lambda: called.append(1)}, repeats=2, least=20)
    assert len(called) == 2 + 2 * 20  # to warm up, and in two turns
    assert times == {"fast": [1, 1]}  # of one call, not of all


# --- engines --------------------------------------------------------------------------------------------------------


def test_all_engines_decide_as_the_detector_does(detector, prepared):
    assert prepared.engines == FEW
    images = noise(12, seed=9)
    expected = detector(images)
    for engine in ("kedge", "folded"):
        detection = prepared.start(engine)(images)
        assert torch.allclose(detection.score, expected.score, atol=1e-5)
        assert torch.equal(detection.is_ood, expected.is_ood)
    assert torch.allclose(prepared.start("naive")(images), expected.score, atol=1e-5)
    assert prepared.start("unanchored")(images).shape == (12, 3)


def test_early_exit_keeps_the_anchors_and_takes_all_of_them_for_a_given_share_of_images(detector, prepared):
    copied = kedge.load(prepared.folder / "early-exit.kedge")
    assert isinstance(copied, EarlyExit)
    assert torch.equal(copied.net.anchors, detector.net.anchors)
    assert copied.exit_threshold is not None
    assert len(copied.calibration.scores) < HELD_OUT  # the other half went into the exit threshold
    run, images = prepared.start("early-exit"), noise(10, seed=8)
    for share, expected in ((0.2, 2), (0, 0), (1, 10), (0.5, 5)):
        run.set_full_share(images, share)
        assert run.mean_passes(images) == pytest.approx((2 * 10 + 3 * expected) / 10)


def test_a_detector_with_early_exit_is_measured_with_all_anchors_too_at_the_same_guarantee(detector, tmp_path):
    early = EarlyExit(copy.deepcopy(detector)).calibrate(noise(100, seed=1), alpha=0.2, delta=0.1)
    engines = bench.prepare_engines(early, tmp_path, engines=("early-exit",)).engines
    assert engines == ("unanchored", "kedge", "early-exit")
    for name, kind in (("detector.kedge", kedge.AMP), ("early-exit.kedge", EarlyExit)):
        copied = kedge.load(tmp_path / name)
        assert type(copied) is kind
        assert (copied.calibration.alpha, copied.calibration.delta) == (0.2, 0.1)


def test_a_method_without_anchors_leaves_out_what_is_about_them(tmp_path):
    images = noise_images(60, (3, 16, 16))
    detector = kedge.Energy(kedge.models.build("compact", width=4)).fit(images).calibrate(images)
    result = bench.prepare_engines(detector, tmp_path, engines=FEW)
    assert set(result.left_out) == {"naive", "early-exit"}
    assert "AMP" in result.left_out["early-exit"]
    rows = bench.time_inference(result, 2, repeats=1, least=0)
    assert [row["engine"] for row in rows] == ["unanchored", "kedge", "folded"] == list(result.engines)


def test_errors_name_the_reason(detector, prepared, tmp_path):
    own = kedge.MSP(nn.Sequential(nn.Flatten(), nn.Linear(12, 2))).fit(torch.rand(9, 3, 2, 2))
    own.calibrate(torch.rand(30, 3, 2, 2))
    images, abacus = kedge.ImageSet(grays(2)), {"engines": ("abacus",)}
    unknown = r"engine must be one of 'unanchored', .*; got 'abacus'"
    for kind, message, call in (
        (NotReadyError, "calibrated", lambda: bench.prepare_engines(kedge.AMP(copy.deepcopy(detector.net)), tmp_path)),
        (InputError, "of kedge's own", lambda: bench.prepare_engines(own, tmp_path)),
        (InputError, "ood must be at least one", lambda: quality(prepared, images, [])),
        (InputError, unknown, lambda: bench.prepare_engines(detector, tmp_path, **abacus)),
        (InputError, unknown, lambda: bench.time_inference(prepared, 2, repeats=1, **abacus)),
        (InputError, unknown, lambda: quality(prepared, images, [images], **abacus)),
    ):
        with pytest.raises(kind, match=message):
            call()


def test_engines_that_cannot_be_prepared_are_left_out_with_the_reason(detector, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    with monkeypatch.context() as patch:
        patch.setattr(bench.engines, "export_onnx", lambda detector, path: path.write_bytes(b""))
        patch.setitem(sys.modules, "openvino", None)
        result = bench.prepare_engines(detector, tmp_path, engines=("openvino-fp32", "openvino-int8"))
    assert result.engines == ("unanchored", "kedge")
    assert set(result.left_out) == {"openvino-fp32", "openvino-int8"}
    assert "pip install 'kedge[openvino]'" in result.left_out["openvino-fp32"]

    def fail(detector, path):
        raise InputError("no such operation")

    monkeypatch.setattr(bench.engines, "export_onnx", fail)
    result = bench.prepare_engines(detector, tmp_path, engines=("onnxruntime-int8", "openvino-fp32"))
    assert result.left_out == {"onnxruntime-int8": "no such operation", "openvino-fp32": "no such operation"}


def test_exported_engines_are_measured_and_compared(detector, tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    ours = ("onnxruntime-fp32", "onnxruntime-int8", "onnxruntime-fp32-early-exit", "onnxruntime-int8-early-exit")
    result = bench.prepare_engines(detector, tmp_path, engines=ours)
    assert result.left_out == {}
    rows = bench.time_inference(result, 3, repeats=1, threads=1, least=0)
    assert [row["engine"] for row in rows] == ["unanchored", "kedge", *ours]
    test, ood = kedge.ImageSet(noise(40, seed=6), name="noise"), kedge.ImageSet(grays(30), name="grays")
    values = quality(result, test, [ood], threads=1)
    assert values["onnxruntime-fp32"]["agreement"] == 1
    assert values["onnxruntime-fp32"]["auroc_points"]["grays"] == pytest.approx(0, abs=0.2)
    assert 0 <= values["onnxruntime-int8"]["flagged"]["noise"] <= 1
    passes = kedge.load(tmp_path / "early-exit.kedge").mean_passes(test)
    assert values["onnxruntime-fp32-early-exit"]["passes"]["noise"] == pytest.approx(passes)
    run, images = result.start("onnxruntime-fp32-early-exit"), noise(10, seed=8)
    run.set_full_share(images, 0.3)
    assert run.mean_passes(images) == pytest.approx((2 * 10 + 3 * 3) / 10)


# --- records --------------------------------------------------------------------------------------------------------


def test_a_record_has_a_row_for_each_engine_and_batch_and_compares_with_another(record):
    assert [(row["engine"], row["batch"]) for row in record["inference"]] == [(e, b) for b in (1, 4) for e in FEW]
    for row in record["inference"]:
        assert row["images_per_second"] > 0
        assert 0 < row["low"] <= row["ratio"] <= row["high"]
        assert row["engine"] != "unanchored" or row["low"] == row["high"] == 1
    assert record["network"]["spec"]["arguments"]["width"] == 4
    assert record["passes"] == 5
    assert json.loads(json.dumps(record)) == record
    then = copy.deepcopy(record)
    then["inference"] = [row for row in then["inference"] if row["batch"] == 4]
    for row in then["inference"]:
        row |= {"images_per_second": row["images_per_second"] / 2, "ratio": row["ratio"] * 4}
    changes = bench.compare_records(record, then)
    assert set(changes) == {(engine, 4) for engine in FEW}
    assert all(change == pytest.approx((2, 0.25)) for change in changes.values())
    for wrong in ([], {}, {"kedge bench": 99, "inference": []}, {"kedge bench": 2, "inference": [{}]}):
        with pytest.raises(FileFormatError, match=r"old\.json must be a bench.json"):
            bench.check_record(wrong, "old.json")


def test_a_row_has_the_share_of_images_that_took_all_anchors(prepared):
    shares = {}
    for batch, share in ((1, 0.28), (3, 0.5), (16, 0.2)):
        rows = bench.time_inference(prepared, batch, repeats=1, least=0, share=share, engines=("early-exit",))
        shares[batch] = rows[1]["full_share"]
        assert "full_share" not in rows[0]
    assert shares == {1: 3 / 10, 3: 6 / 12, 16: 3 / 16}  # of whole images, in whole batches
    assert [full_share(*passes) for passes in ((2.0, 5), (3.5, 5), (5.0, 5), (2.0, 2))] == [0, 0.5, 1, 0]


def test_memory_that_cannot_be_measured_is_an_error_before_anything_is_measured(detector, tmp_path, monkeypatch):
    monkeypatch.setattr(bench.memory, "CLEAR", tmp_path / "no-such-folder" / "clear_refs")
    with pytest.raises(NotReadyError, match=r"Linux.*clear_refs"):
        bench.measure(detector, name="a", memory=True, report=lambda _: pytest.fail("measured"))


def test_memory_is_that_of_a_process_of_its_own(prepared):
    layer = 400 * 32 * 32 * 4 * 4  # the first layer's output alone
    assert layer < bench.peak_memory(prepared, "unanchored", 400, threads=1) < layer + 200e6


def test_training_steps_are_measured_on_copies_with_and_without_anchors(detector):
    data = kedge.ImageSet(noise_images(64, (3, 16, 16)), torch.arange(64) % 3)
    before, random = copy.deepcopy(detector.net.state_dict()), torch.random.get_rng_state()
    result = training_steps(detector.net, data, batch=16, repeats=2)
    assert result["ratio"]["low"] <= result["ratio"]["median"] <= result["ratio"]["high"]
    for kind in ("unanchored", "anchored"):
        assert 0 < result[kind]["outside"] < 1
        assert result[kind]["step"]["median"] > 0
    assert all(torch.equal(value, before[name]) for name, value in detector.net.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), random)


def test_every_measured_cycle_has_a_step_with_corrupted_anchors():
    corrupted = []
    network = kedge.models.build("compact", width=4, classes=2)
    net = kedge.anchor(network, corruption=lambda c: corrupted.append(len(c)) or c)
    data = kedge.ImageSet(noise_images(40, (3, 8, 8)), torch.arange(40) % 2)  # two steps an epoch
    training_steps(net, data, batch=16, repeats=2)
    assert corrupted == [16, 16, 16]  # one of five steps, in the cycle that warms up and in both that are measured


def test_the_page_shows_every_row_and_what_changed(record):
    alone = bench_page(record)
    compared = bench_page(record | {"left_out": {"openvino-int8": "a <reason>"}}, record)
    for page in (alone, compared):
        check(page)
    for text in ("tiny at 32 x 32", processor(), "naive AMP", "kedge, norms folded", "batch 4", "unanchored"):
        assert text in alone
    assert "now / then" not in alone
    assert "now / then" in compared
    assert "a &lt;reason&gt;" in compared


def test_quality_is_that_of_the_exact_engine_but_for_what_an_engine_changes(prepared):
    test, ood = kedge.ImageSet(noise(60, seed=6), name="noise"), kedge.ImageSet(grays(50), name="grays")
    result = quality(prepared, test, [ood])
    assert list(result) == ["kedge", "folded", "early-exit"]
    exact = kedge.load(prepared.folder / "detector.kedge")
    inside, outside = exact(test), exact(ood)
    auroc = kedge.metrics.auroc(inside.score, outside.score)
    assert result["kedge"]["auroc"]["grays"] == pytest.approx(auroc, abs=1e-6)
    assert result["kedge"]["fpr95_points"] == {"grays": 0.0}
    flagged = {"noise": float(inside.is_ood.double().mean()), "grays": float(outside.is_ood.double().mean())}
    assert result["kedge"]["flagged"] == pytest.approx(flagged)
    assert result["folded"]["agreement"] == 1
    assert result["folded"]["passes"] is result["kedge"]["passes"] is None
    early = kedge.load(prepared.folder / "early-exit.kedge")
    agreement = float((early(test).label == inside.label).double().mean())
    assert result["early-exit"]["agreement"] == pytest.approx(agreement)
    assert result["early-exit"]["passes"]["noise"] == pytest.approx(early.mean_passes(test))


# --- the command and the script -------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """Measure without waiting for a turn to fill."""
    monkeypatch.setattr(bench, "measure", partial(bench.measure, least=0))


def test_the_command_writes_a_record_and_a_page_and_compares_with_the_one_before(quick, detector, tmp_path):
    options = ["--batch", 2, "--repeats", 1, "--engine", "kedge", "--engine", "folded"]
    first = run_cli("bench", "compact", "--width", 4, *options, "--training", 0, "-o", tmp_path / "a")
    assert first.exit_code == 0, first.output
    assert "kedge, norms folded" in first.output
    assert "compact at 32 x 32" in first.output
    old = tmp_path / "a" / "bench.json"
    assert [row["engine"] for row in json.loads(old.read_text())["inference"]] == ["unanchored", "kedge", "folded"]
    check((tmp_path / "a" / "bench.html").read_text())
    detector.save(tmp_path / "own.kedge")
    more = ["--training", 1, "-o", tmp_path / "b", "--against", old, "--json"]
    second = run_cli("bench", tmp_path / "own.kedge", *options, *more)
    assert second.exit_code == 0, second.output
    record = json.loads(second.stdout)
    assert (record["name"], record["training"]["ratio"]["median"] > 0) == ("own", True)
    assert "now / then" in (tmp_path / "b" / "bench.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such"], "SUBJECT must be a detector's file, one of cifar10, or a network, one of wrn"),
        (["compact", "--engine", "abacus"], "engine must be one of 'unanchored', 'naive', .*; got 'abacus'"),
        (["cifar10", "--width", "3"], "--width is for networks by name"),
        (["compact", "--against", "nowhere.json"], "--against must be a file that can be read; nowhere.json cannot"),
        (["compact", "--against", __file__], r"test_bench\.py must be a bench.json"),
    ],
)
def test_a_wrong_argument_of_the_command_is_an_error(arguments, message):
    failed = run_cli("bench", *arguments)
    with pytest.raises((InputError, FileFormatError), match=message):
        raise failed.exception


def test_the_script_prints_its_tables(record, prepared, monkeypatch):
    script = runpy.run_path(str(SCRIPT))
    monkeypatch.setitem(script["main"].__globals__, "measure", lambda *_, **__: pytest.fail("measured first"))
    monkeypatch.setitem(sys.modules, "pytorch_ood", None)
    monkeypatch.setattr(sys, "argv", ["inference.py", "--peers", "--quick"])
    with pytest.raises(SystemExit, match="--peers needs pytorch-ood"):
        script["main"]()
    lines = list(script["time_table"](record | {"left_out": {"openvino-fp32": "it is missing"}}))
    assert lines[0].startswith("tiny at 32 x 32 (Compact of width 4), 5 anchors")
    assert sum("kedge, norms folded" in line for line in lines) == 4
    assert lines[-1] == "  OpenVINO, float32 is left out: it is missing"
    test, ood = kedge.ImageSet(noise(30), name="noise"), kedge.ImageSet(grays(9), name="grays")
    result = quality(prepared, test, [ood])
    lines = list(script["quality_table"](result, "noise"))
    assert "100.00% the same labels" in lines[1]
    assert len(lines) == 1 + 3 * 2
    passes = kedge.load(prepared.folder / "early-exit.kedge").mean_passes(test)
    measured_share = script["measured_share"]
    assert measured_share(prepared, result, "noise", 0.2) == pytest.approx((passes - 2) / 3, abs=1e-6)
    assert measured_share(prepared, {"early-exit": {"passes": {"noise": 2.0}}}, "noise", 0.2) == 0.0
    assert measured_share(prepared, {}, "noise", 0.2) == 0.2
    assert script["with_tta"](kedge.load(prepared.folder / "detector.kedge"), 2, test).tta == 2
    assert len(script["some"](test, 7)) == 7
    assert np.array_equal(script["some"](test, 0).images, test.images)
