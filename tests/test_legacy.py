"""Files that earlier versions of kedge wrote: each kind opens, and says what it said when it was saved."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import kedge

FOLDER = Path(__file__).parent / "legacy"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())


@pytest.mark.parametrize("name", EXPECTED)
def test_a_detector_of_format_2_gives_the_same_verdicts(name):
    expected = EXPECTED[name]
    detector = kedge.load(FOLDER / f"{name}.kedge")
    verdicts = detector(load_file(FOLDER / "images.safetensors")["test"])
    assert verdicts.is_ood.tolist() == expected["is_ood"]
    assert verdicts.p_value.tolist() == expected["p_value"]
    assert detector.calibration.threshold == expected["threshold"]
    assert (detector.calibration.alpha, detector.calibration.delta) == (0.05, None)
    for found, value in ((verdicts.score, "score"), (verdicts.logits, "logits"), (verdicts.tau, "tau")):
        if expected[value] is None:
            assert found is None
        else:
            torch.testing.assert_close(found.double(), torch.tensor(expected[value]).double(), rtol=1e-5, atol=1e-5)
