"""Timings measure the same images, in turns, against one unanchored forward pass; never how fast it is."""

import copy
import dataclasses
import json
import runpy
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import kedge
from helpers import wide_weight
from kedge.cli import app
from kedge.errors import FileFormatError, InputError, NotReadyError
from kedge.provenance import processor
from kedge.seeds import seeded
from kedge.studies import bench
from kedge.studies.bench.early_exit import EarlyExitEngine, full_share
from kedge.studies.bench.page import bench_page
from kedge.studies.bench.plain import Naive, on_pairs, without_anchors
from kedge.studies.bench.quality import quality
from kedge.studies.bench.steps import training_steps
from kedge.studies.bench.subjects import noise_images
from kedge.studies.bench.turns import Quartiles, in_turns, ratios
from test_report import check

ROOT = Path(__file__).parents[1]
FEW = ("unanchored", "naive", "kedge", "folded", "early-exit")  # those that need no export


@pytest.fixture(scope="module")
def detector():
    return bench.detector_of("compact", width=4, classes=3)


@pytest.fixture(scope="module")
def prepared(detector, tmp_path_factory):
    return bench.prepare_engines(detector, tmp_path_factory.mktemp("bench"), engines=FEW)


@pytest.fixture(scope="module")
def record(detector, prepared):
    return bench.measure(detector, name="tiny", batches=[1, 4], repeats=2, least=0, prepared=prepared)


# --- what is measured against ---------------------------------------------------------------------------------------


def test_the_plain_network_is_the_one_that_anchoring_started_from():
    with seeded(0):
        network = kedge.models.build("airbench", width=4).eval()
    net = kedge.anchor(network, mean=0.4, std=0.2)  # init="preserve": the image's half has the old weights
    images = torch.rand(3, 3, 32, 32)
    expected = kedge.Classifier(network, mean=0.4, std=0.2)(images)
    assert torch.equal(without_anchors(net)(images), expected)


def test_the_network_of_pairs_has_twice_the_channels_and_the_weights_of_both_halves():
    net = kedge.anchor(nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, bias=False), nn.Flatten()), init="fresh")
    layer = on_pairs(net).network[0]
    assert type(layer) is nn.Conv2d
    assert (layer.in_channels, layer.stride, layer.bias) == (6, (2, 2), None)
    assert torch.equal(layer.weight, wide_weight(net))


@pytest.mark.parametrize("variant", ["paper", "recommended"])
def test_naive_passes_of_pairs_give_the_scores_of_amp(variant):
    images = noise_images(40, (3, 16, 16))
    with seeded(0):
        net = kedge.anchor(kedge.models.build("compact", width=4), init="fresh", mean=0.4, std=0.2)
    detector = kedge.AMP(net, variant=variant).fit(kedge.ImageSet(images, torch.arange(40) % 10))
    assert torch.allclose(Naive(detector)(images[:7]), detector.score(images[:7]), atol=1e-5)


# --- turns ----------------------------------------------------------------------------------------------------------


def test_everybody_has_a_turn_in_every_round_and_another_one_begins_it():
    called, turns = [], []
    calls = {name: (lambda name=name: called.append(name)) for name in "abc"}
    times = in_turns(calls, repeats=3, least=0, report=turns.append)
    assert called[:6] == ["a", "a", "b", "b", "c", "c"]  # to warm up
    assert called[6:] == turns == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_what_is_fast_is_called_as_often_as_fills_its_turn(monkeypatch):
    called = []
    clock = SimpleNamespace(perf_counter=lambda: len(called), sleep=lambda _: None)  # on which a call takes a second
    monkeypatch.setattr("kedge.studies.bench.turns.time", clock)
    times = in_turns({"fast": lambda: called.append(1)}, repeats=2, least=20)
    assert len(called) == 2 + 2 * 20  # to warm up, and in two turns
    assert times == {"fast": [1, 1]}  # of one call, not of all


def test_ratios_are_taken_turn_by_turn():
    assert ratios([2, 6, 20], [1, 2, 5]) == Quartiles(median=3, low=2.5, high=3.5)
    assert Quartiles.of([4.0]) == Quartiles(4.0, 4.0, 4.0)


def test_no_turn_is_an_error():
    with pytest.raises(InputError, match="repeats must be a whole number of at least 1; got 0"):
        in_turns({"a": list}, repeats=0)


# --- engines --------------------------------------------------------------------------------------------------------


def test_all_engines_say_what_the_detector_says(detector, prepared):
    assert prepared.engines == FEW
    images, said = noise_images(12, (3, 32, 32), seed=9), detector(noise_images(12, (3, 32, 32), seed=9))
    for engine in ("kedge", "folded"):
        found = prepared.start(engine)(images)
        assert torch.allclose(found.score, said.score, atol=1e-5)
        assert torch.equal(found.is_ood, said.is_ood)
    assert torch.allclose(prepared.start("naive")(images), said.score, atol=1e-5)
    assert prepared.start("unanchored")(images).shape == (12, 3)


@pytest.mark.parametrize(("share", "expected"), [(0.2, 2), (0, 0), (1, 10), (0.5, 5)])
def test_the_adaptive_engine_leaves_the_share_of_images_open_that_it_is_told(prepared, share, expected):
    run, images = prepared.start("early-exit"), noise_images(10, (3, 32, 32), seed=8)
    assert isinstance(run, EarlyExitEngine)
    run.set_full_share(images, share)
    assert run.mean_passes(images) == pytest.approx((2 * 10 + 3 * expected) / 10)


def test_the_adaptive_twin_has_the_anchors_of_the_detector_and_a_threshold_of_its_own(detector, prepared):
    twin = kedge.load(prepared.folder / "early-exit.kedge")
    assert twin.adaptive
    assert torch.equal(twin.net.anchors, detector.net.anchors)
    assert twin.exit_threshold is not None
    assert len(twin.calibration.scores) < 120  # the other half went into the bound


def test_an_adaptive_detector_is_measured_with_all_anchors_too(detector, tmp_path):
    twin = kedge.AMP(copy.deepcopy(detector.net), anchors="auto").fit(noise_images(20, (3, 32, 32)))
    twin.calibrate(noise_images(100, (3, 32, 32), seed=1))
    found = bench.prepare_engines(twin, tmp_path, engines=("early-exit",))
    assert found.engines == ("unanchored", "kedge", "early-exit")
    assert not kedge.load(tmp_path / "detector.kedge").adaptive


def test_twins_keep_the_promise_of_the_detector(detector, tmp_path):
    images = noise_images(100, (3, 32, 32), seed=1)
    adaptive = kedge.AMP(copy.deepcopy(detector.net), anchors="auto").fit(images)
    bench.prepare_engines(adaptive.calibrate(images, alpha=0.2, delta=0.1), tmp_path, engines=("early-exit",))
    for twin in ("detector.kedge", "early-exit.kedge"):
        promised = kedge.load(tmp_path / twin).calibration
        assert (promised.alpha, promised.delta) == (0.2, 0.1)


def test_random_images_may_be_too_few_for_the_promise(detector, tmp_path):
    strict = kedge.AMP(copy.deepcopy(detector.net)).fit(noise_images(20, (3, 32, 32)))
    strict.calibrate(noise_images(100, (3, 32, 32), seed=1), alpha=0.01)
    assert bench.prepare_engines(strict, tmp_path, engines=("early-exit",)).left_out == {}  # and nothing warns


def test_exported_engines_run_at_the_batch_that_they_are_given(prepared, monkeypatch):
    monkeypatch.setattr(bench.engines, "OnnxDetector", lambda *_, **__: lambda images, batch_size=16: batch_size)
    run = dataclasses.replace(prepared, engines=("onnxruntime-fp32",)).start("onnxruntime-fp32")
    assert run(noise_images(40, (3, 32, 32))) == 40


def test_a_method_without_anchors_leaves_out_what_is_about_them(tmp_path):
    images = noise_images(60, (3, 16, 16))
    detector = kedge.Energy(kedge.models.build("compact", width=4)).fit(images).calibrate(images)
    found = bench.prepare_engines(detector, tmp_path, engines=FEW)
    assert found.engines == ("unanchored", "kedge", "folded")
    assert set(found.left_out) == {"naive", "early-exit"}
    assert "AMP" in found.left_out["early-exit"]
    rows = bench.time_inference(found, 2, repeats=1, least=0)
    assert [row["engine"] for row in rows] == ["unanchored", "kedge", "folded"]


def test_networks_that_are_made_for_imagenet_see_images_of_its_size(monkeypatch):
    def asked(n, shape, seed):
        raise RuntimeError(f"asked for {shape}")  # before anything is computed

    monkeypatch.setattr(bench.subjects, "noise_images", asked)
    for network, side, expected in (("resnet18", None, 224), ("resnet18-cifar", None, 32), ("compact", 16, 16)):
        with pytest.raises(RuntimeError, match=rf"asked for \(3, {expected}, {expected}\)"):
            bench.detector_of(network, side=side)


def test_what_cannot_be_measured_is_an_error_that_says_why(detector, tmp_path):
    with pytest.raises(NotReadyError, match="must be fitted and calibrated"):
        bench.prepare_engines(kedge.AMP(copy.deepcopy(detector.net)), tmp_path)
    own = kedge.MSP(nn.Sequential(nn.Flatten(), nn.Linear(12, 2))).fit(torch.rand(9, 3, 2, 2))
    with pytest.raises(InputError, match="of kedge's own"):
        bench.prepare_engines(own.calibrate(torch.rand(30, 3, 2, 2)), tmp_path)


def test_an_engine_that_nobody_knows_is_told(detector, prepared, tmp_path):
    images = kedge.ImageSet(greys(2))
    for call in (
        lambda: bench.prepare_engines(detector, tmp_path, engines=("abacus",)),
        lambda: bench.time_inference(prepared, 2, repeats=1, engines=("abacus",)),
        lambda: quality(prepared, images, [images], engines=("abacus",)),
    ):
        with pytest.raises(InputError, match=r"engine must be one of 'unanchored', .*; got 'abacus'"):
            call()


def test_an_engine_that_is_not_installed_is_left_out_with_the_reason(detector, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    monkeypatch.setattr(bench.engines, "export_onnx", lambda detector, path: path.write_bytes(b""))
    monkeypatch.setitem(sys.modules, "openvino", None)
    found = bench.prepare_engines(detector, tmp_path, engines=("openvino-fp32", "openvino-int8"))
    assert found.engines == ("unanchored", "kedge")
    assert set(found.left_out) == {"openvino-fp32", "openvino-int8"}
    assert "pip install 'kedge[openvino]'" in found.left_out["openvino-fp32"]


def test_a_network_that_cannot_be_exported_leaves_out_all_exports(detector, tmp_path, monkeypatch):
    def fails(detector, path):
        raise InputError("no such operation")

    monkeypatch.setattr(bench.engines, "export_onnx", fails)
    found = bench.prepare_engines(detector, tmp_path, engines=("onnxruntime-int8", "openvino-fp32"))
    assert found.left_out == {"onnxruntime-int8": "no such operation", "openvino-fp32": "no such operation"}


def test_exported_engines_are_measured_and_compared(tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    detector = bench.detector_of("compact", width=4, classes=3)
    ours = ("onnxruntime-fp32", "onnxruntime-int8", "onnxruntime-fp32-early-exit", "onnxruntime-int8-early-exit")
    found = bench.prepare_engines(detector, tmp_path, engines=ours)
    assert found.left_out == {}
    rows = bench.time_inference(found, 3, repeats=1, threads=1, least=0)
    assert [row["engine"] for row in rows] == ["unanchored", "kedge", *ours]
    test, ood = (
        kedge.ImageSet(noise_images(40, (3, 32, 32), seed=6), name="noise"),
        kedge.ImageSet(greys(30), name="greys"),
    )
    values = quality(found, test, [ood], threads=1)
    assert values["onnxruntime-fp32"]["agreement"] == 1
    assert values["onnxruntime-fp32"]["auroc_points"]["greys"] == pytest.approx(0, abs=0.2)
    assert 0 <= values["onnxruntime-int8"]["flagged"]["noise"] <= 1
    twin = kedge.load(tmp_path / "early-exit.kedge")
    twin(noise_images(40, (3, 32, 32), seed=6))
    assert values["onnxruntime-fp32-early-exit"]["passes"]["noise"] == pytest.approx(twin.mean_passes)
    run, images = found.start("onnxruntime-fp32-early-exit"), noise_images(10, (3, 32, 32), seed=8)
    assert isinstance(run, EarlyExitEngine)
    run.set_full_share(images, 0.3)
    assert run.mean_passes(images) == pytest.approx((2 * 10 + 3 * 3) / 10)


def greys(n):
    return torch.arange(n, dtype=torch.uint8)[:, None, None, None].expand(n, 3, 32, 32).contiguous()


# --- records --------------------------------------------------------------------------------------------------------


def test_a_record_has_a_row_for_each_engine_and_batch(record):
    assert [(row["engine"], row["batch"]) for row in record["inference"]] == [(e, b) for b in (1, 4) for e in FEW]
    for row in record["inference"]:
        assert row["images_per_second"] > 0
        assert 0 < row["low"] <= row["ratio"] <= row["high"]
    plain = [row for row in record["inference"] if row["engine"] == "unanchored"]
    assert [(row["ratio"], row["low"], row["high"]) for row in plain] == [(1, 1, 1)] * 2
    assert record["network"]["spec"]["arguments"]["width"] == 4
    assert record["passes"] == 5
    assert json.loads(json.dumps(record)) == record


def test_the_progress_is_no_more_than_was_announced(detector, prepared):
    said = []
    options = {"batches": [2], "repeats": 2}
    bench.measure(detector, name="a", least=0, prepared=prepared, training=1, training_batch=8, report=said.append,
                  **options)  # fmt: skip
    assert len(FEW) * 2 + 2 == len(said) <= bench.progress_steps(**options, training=1)


def test_a_row_tells_the_share_of_images_that_was_left_open(prepared):
    shares = {}
    for batch, asked in ((1, 0.28), (3, 0.5), (16, 0.2)):
        rows = bench.time_inference(prepared, batch, repeats=1, least=0, share=asked, engines=("early-exit",))
        shares[batch] = rows[1]["full_share"]
        assert "full_share" not in rows[0]
    assert shares == {1: 3 / 10, 3: 6 / 12, 16: 3 / 16}  # of whole images, in whole batches


def test_the_memory_of_the_adaptive_engine_is_measured_with_the_share_that_it_is_told(prepared, monkeypatch):
    told = []
    monkeypatch.setattr(EarlyExitEngine, "set_full_share", lambda run, images, share: told.append((len(images), share)))
    monkeypatch.setattr(bench.memory, "CLEAR", prepared.folder / "clear_refs")
    bench.memory.added(str(prepared.folder), [3, 32, 32], "early-exit", 4, torch.get_num_threads(), 0.3)
    assert told == [(12, 0.3)]


def test_memory_that_cannot_be_measured_is_told_before_anything_is_measured(detector, tmp_path, monkeypatch):
    monkeypatch.setattr(bench.memory, "CLEAR", tmp_path / "no-such-folder" / "clear_refs")
    said = []
    with pytest.raises(NotReadyError, match=r"memory can be measured on Linux, .*clear_refs; here it may not"):
        bench.measure(detector, name="a", memory=True, report=said.append)
    assert said == []


def test_memory_is_that_of_a_process_of_its_own(prepared):
    small, large = (bench.peak_memory(prepared, "unanchored", batch, threads=1) for batch in (1, 400))
    weight_and_maps = 400 * 32 * 32 * 4 * 4  # the first layer's output alone
    assert large - small > weight_and_maps
    assert small < 200e6


def test_training_steps_are_those_of_both_twins(detector):
    data = kedge.ImageSet(noise_images(64, (3, 16, 16)), torch.arange(64) % 3)
    before, random = copy.deepcopy(detector.net.state_dict()), torch.random.get_rng_state()
    found = training_steps(detector.net, data, batch=16, repeats=2)
    assert found["ratio"]["low"] <= found["ratio"]["median"] <= found["ratio"]["high"]
    for kind in ("unanchored", "anchored"):
        assert 0 < found[kind]["outside"] < 1
        assert found[kind]["step"]["median"] > 0
    assert all(torch.equal(value, before[name]) for name, value in detector.net.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), random)


def test_every_measured_cycle_has_a_step_with_corrupted_anchors():
    corrupted = []
    net = kedge.anchor(
        kedge.models.build("compact", width=4, classes=2), corruption=lambda c: corrupted.append(len(c)) or c
    )
    data = kedge.ImageSet(noise_images(40, (3, 8, 8)), torch.arange(40) % 2)  # two steps an epoch
    training_steps(net, data, batch=16, repeats=2)
    assert corrupted == [16, 16, 16]  # one of five steps, in the cycle that warms up and in both that are measured


def test_records_are_compared_where_both_have_a_row(record):
    then = copy.deepcopy(record)
    then["inference"] = [
        row | {"images_per_second": row["images_per_second"] / 2, "ratio": row["ratio"] * 4}
        for row in then["inference"]
        if row["batch"] == 4
    ]
    changes = bench.compare_records(record, then)
    assert set(changes) == {(engine, 4) for engine in FEW}
    assert all(change == pytest.approx((2, 0.25)) for change in changes.values())


@pytest.mark.parametrize("wrong", [[], {}, {"kedge bench": 99, "inference": []}, {"kedge bench": 2, "inference": [{}]}])
def test_what_is_no_record_is_refused(wrong):
    with pytest.raises(FileFormatError, match=r"old\.json must be a bench.json"):
        bench.check_record(wrong, "old.json")


def test_the_page_shows_every_row_and_what_changed(record):
    plain = bench_page(record)
    check(plain)
    assert "The cost of a detection by tiny at 32 x 32" in plain
    assert processor() in plain
    for title in ("naive AMP, K passes of pairs", "kedge, norms folded", "batch 4", "one forward pass, unanchored"):
        assert title in plain
    assert "now / then" not in plain
    compared = bench_page(record | {"left_out": {"openvino-int8": "a <reason>"}}, record)
    check(compared)
    assert "now / then" in compared
    assert "a &lt;reason&gt;" in compared


# --- quality --------------------------------------------------------------------------------------------------------


def test_quality_is_that_of_the_exact_engine_but_for_what_an_engine_changes(prepared):
    test = kedge.ImageSet(noise_images(60, (3, 32, 32), seed=6), name="noise")
    ood = kedge.ImageSet(greys(50), name="greys")
    found = quality(prepared, test, [ood])
    assert list(found) == ["kedge", "folded", "early-exit"]
    exact = kedge.load(prepared.folder / "detector.kedge")
    inside, outside = exact(test), exact(ood)
    assert found["kedge"]["auroc"]["greys"] == pytest.approx(kedge.metrics.auroc(inside.score, outside.score), abs=1e-6)
    assert found["kedge"]["fpr95_points"] == {"greys": 0.0}
    assert found["kedge"]["flagged"] == {
        "noise": pytest.approx(float(inside.is_ood.double().mean())),
        "greys": pytest.approx(float(outside.is_ood.double().mean())),
    }
    assert found["folded"]["agreement"] == 1
    assert found["folded"]["passes"] is found["kedge"]["passes"] is None
    adaptive = kedge.load(prepared.folder / "early-exit.kedge")
    adaptive.asked = [0, 0]
    agreement = float((adaptive(test).label == inside.label).double().mean())
    assert found["early-exit"]["agreement"] == pytest.approx(agreement)
    assert found["early-exit"]["passes"]["noise"] == pytest.approx(adaptive.mean_passes)


def test_the_open_share_follows_from_the_passes():
    assert full_share(2.0, 5) == 0
    assert full_share(3.5, 5) == 0.5
    assert full_share(5.0, 5) == 1
    assert full_share(2.0, 2) == 0


def test_quality_needs_a_set_that_is_out_of_distribution(prepared):
    with pytest.raises(InputError, match="ood must be at least one set"):
        quality(prepared, kedge.ImageSet(noise_images(2, (3, 32, 32))), [])


# --- the commands ---------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """Measure without waiting for a turn to fill."""
    command = import_module("kedge.studies.commands.bench")  # its name in the package is that of the function
    monkeypatch.setattr(command, "measure", partial(bench.measure, least=0))


def test_the_command_writes_a_record_and_a_page_and_compares_with_the_one_before(quick, tmp_path):
    arguments = ["bench", "compact", "--width", "4", "--batch", "2", "--repeats", "1", "--training", "0"]
    engines = ["--engine", "kedge", "--engine", "folded"]
    first = CliRunner().invoke(app, [*arguments, *engines, "-o", str(tmp_path / "a")])
    assert first.exit_code == 0, first.output
    assert "kedge, norms folded" in first.output
    assert "compact at 32 x 32" in first.output
    old = tmp_path / "a" / "bench.json"
    assert [row["engine"] for row in json.loads(old.read_text())["inference"]] == ["unanchored", "kedge", "folded"]
    check((tmp_path / "a" / "bench.html").read_text())
    second = CliRunner().invoke(app, [*arguments, *engines, "-o", str(tmp_path / "b"), "--against", str(old), "--json"])
    assert second.exit_code == 0, second.output
    assert json.loads(second.stdout)["name"] == "compact"
    assert "now / then" in (tmp_path / "b" / "bench.html").read_text()


def test_the_command_takes_a_detector_s_file(quick, detector, tmp_path):
    detector.save(tmp_path / "mine.kedge")
    done = CliRunner().invoke(
        app, ["bench", str(tmp_path / "mine.kedge"), "--batch", "2", "--repeats", "1", "--training", "1", "--engine",
              "folded", "-o", str(tmp_path), "--json"]
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["name"] == "mine"
    assert record["training"]["ratio"]["median"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such"], "SUBJECT must be a detector's file, one of cifar10, or a network, one of wrn"),
        (["compact", "--engine", "abacus"], "engine must be one of 'unanchored', 'naive', .*; got 'abacus'"),
        (["cifar10", "--width", "3"], "--width is for networks by name"),
        (["compact", "--against", "nowhere.json"], "--against must be a file that can be read; nowhere.json cannot"),
    ],
)
def test_what_is_asked_for_wrongly_is_told(arguments, message):
    failed = CliRunner().invoke(app, ["bench", *arguments])
    with pytest.raises((InputError, FileFormatError), match=message):
        raise failed.exception


def test_a_file_that_is_no_record_is_told(tmp_path):
    (tmp_path / "a.json").write_text("no JSON")
    failed = CliRunner().invoke(app, ["bench", "compact", "--against", str(tmp_path / "a.json")])
    with pytest.raises(FileFormatError, match=r"a\.json must be a bench.json"):
        raise failed.exception


def test_the_benchmark_of_inference_looks_for_its_peers_before_it_measures(monkeypatch):
    script = runpy.run_path(str(ROOT / "benchmarks" / "inference.py"))
    monkeypatch.setitem(script["main"].__globals__, "measure", lambda *_, **__: pytest.fail("measured first"))
    monkeypatch.setitem(sys.modules, "pytorch_ood", None)
    monkeypatch.setattr(sys, "argv", ["inference.py", "--peers", "--quick"])
    with pytest.raises(SystemExit, match="--peers needs pytorch-ood"):
        script["main"]()


def test_the_benchmark_of_inference_prints_its_tables(record, prepared):
    script = runpy.run_path(str(ROOT / "benchmarks" / "inference.py"))
    lines = list(script["time_table"](record | {"left_out": {"openvino-fp32": "it is missing"}}))
    assert lines[0].startswith("tiny at 32 x 32 (Compact of width 4), 5 anchors")
    assert sum("kedge, norms folded" in line for line in lines) == 4
    assert lines[-1] == "  OpenVINO, float32 is left out: it is missing"
    sets = kedge.ImageSet(noise_images(30, (3, 32, 32)), name="noise"), kedge.ImageSet(greys(9), name="greys")
    found = quality(prepared, sets[0], sets[1:])
    lines = list(script["quality_table"](found, "noise"))
    assert "100.00% the same labels" in lines[1]
    assert len(lines) == 1 + 3 * 2
    twin = kedge.load(prepared.folder / "early-exit.kedge")
    twin(sets[0])
    measured_share = script["measured_share"]
    assert measured_share(prepared, found, "noise", 0.2) == pytest.approx((twin.mean_passes - 2) / 3, abs=1e-6)
    assert measured_share(prepared, {"early-exit": {"passes": {"noise": 2.0}}}, "noise", 0.2) == 0.0
    assert measured_share(prepared, {}, "noise", 0.2) == 0.2
    assert len(script["some"](sets[0], 7)) == 7
    assert np.array_equal(script["some"](sets[0], 0).images, sets[0].images)
