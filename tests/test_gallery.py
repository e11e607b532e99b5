"""The examples that need no pretrained network: signals, figures, a client of the service."""

import importlib.util
from pathlib import Path

import pytest
from PIL import Image

import kedge
from helpers import labelled, network, service_process

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_signals_of_other_shapes_are_flagged():
    shares = example("signals").main()
    assert shares["sine"] <= 0.12
    assert min(shares["square"], shares["burst"]) > 3 * shares["sine"]


def test_a_table_frames_and_figures_come_out_of_an_evaluation(tmp_path, capsys):
    pytest.importorskip("pandas")
    evaluation = example("plots").main(tmp_path, epochs=1)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["reliability", "roc", "scores", "verdicts"]
    for path in tmp_path.iterdir():
        with Image.open(path) as picture:
            assert min(picture.size) > 200
    assert str(evaluation) in capsys.readouterr().out


def test_the_client_gets_the_verdict_of_the_detector(tmp_path):
    detector = kedge.MSP(network()).fit(labelled()).calibrate(labelled(seed=1))
    Image.new("RGB", (8, 8), "teal").save(tmp_path / "a.png")
    with service_process(detector, tmp_path) as (_, port, _):
        answer = example("service_client").ask(f"http://127.0.0.1:{port}", str(tmp_path / "a.png"))
    expected = detector(tmp_path / "a.png")[0]
    assert (answer["class"], answer["is_ood"]) == (expected["class"], expected["is_ood"])
    assert answer["p_value"] == pytest.approx(expected["p_value"])
