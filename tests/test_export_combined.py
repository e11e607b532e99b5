"""A combination of detectors as one ONNX graph."""

import numpy as np
import pytest
import torch

import kedge
from kedge.errors import ArchitectureError, InputError
from test_combined import combined
from test_contract import images, network

pytest.importorskip("onnx")
runtime = pytest.importorskip("kedge.export")


@pytest.mark.parametrize(
    ("parts", "rule", "kind"),
    [
        (("mds++", "gen"), "sum", "unanchored"),
        (("knn", "fdbd", "max_logit"), "fisher", "unanchored"),
        (("mds++", "gen"), "sum", "anchored"),
        (("amp", "knn", "gen"), "sum", "anchored"),
    ],
)
def test_one_graph_holds_all_parts(parts, rule, kind, tmp_path):
    detector = combined(*parts, net=network(kind), rule=rule).calibrate(images(80, seed=1))
    runtime.export_onnx(detector, tmp_path / "a.onnx")
    some = images(17, seed=2).images
    found, expected = runtime.OnnxDetector(tmp_path / "a.onnx", threads=1)(some), detector(some)
    close = 1e-4 * float(expected.score.abs().max())
    if rule == "sum":  # ten roundings of a part's own score, in the deviations that it is measured in
        close += 10 * np.finfo(np.float32).eps / float(detector.standard["scale"].min())
    np.testing.assert_allclose(found["score"], expected.score, rtol=1e-4, atol=close)
    np.testing.assert_array_equal(found["label"], expected.label)
    sure = (expected.score.double() - detector.calibration.threshold).abs() > close
    np.testing.assert_array_equal(found["is_ood"][sure], expected.is_ood[sure])


def test_a_rule_that_inverts_a_matrix_is_not_exported(tmp_path):
    detector = combined("mds++", "gen", rule="mahalanobis").calibrate(images(80, seed=1))
    with pytest.raises(ArchitectureError, match="cannot be exported to ONNX"):
        runtime.export_onnx(detector, tmp_path / "a.onnx")
    assert not list(tmp_path.iterdir())


def test_parts_with_a_pass_of_their_own_are_not_exported(tmp_path):
    detector = combined("odin", "knn").calibrate(images(80, seed=1))
    with pytest.raises(InputError, match="Combined, which reads more"):
        runtime.export_onnx(detector, tmp_path / "a.onnx")
    assert isinstance(detector, kedge.Combined)
    assert torch.is_grad_enabled()
