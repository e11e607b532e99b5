"""The study of heads: its references, the kernel's prediction, and a run at the smoke scale."""

import json

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF

from helpers import run_cli
from kedge.studies import head_scores, heads
from kedge.studies.gaussian_process import NOISES, GaussianProcess
from kedge.studies.head_scores import COUNTS, THIRD, added_scores
from kedge.studies.kernel_of_heads import deviation, head_kernel
from kedge.studies.laplace import LastLayerLaplace
from kedge.studies.theory import ntk
from kedge.training import frozen


def rand(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_laplace_is_the_inverse_of_the_kronecker_curvature_with_a_prior():
    h, z, labels = rand(30, 4), rand(30, 3, seed=1), torch.arange(30) % 3
    posterior = LastLayerLaplace.fit(h, z, (h, z, labels))
    p = z.softmax(dim=1).numpy()
    features = np.concatenate([h.numpy(), np.ones((30, 1))], axis=1)
    classes = np.mean([np.diag(row) - np.outer(row, row) for row in p], axis=0)
    covariance = np.linalg.inv(np.kron(features.T @ features, classes) + posterior.precision * np.eye(15))
    certain, variance = posterior(h[:5], z[:5])
    for image in range(5):
        jacobian = np.kron(features[image][None], np.eye(3))  # of the logits, by (d + 1, C) weights
        expected = np.diag(jacobian @ covariance @ jacobian.T)
        assert float(variance[image]) == pytest.approx(expected.mean())
        scaled = z[image].numpy() / np.sqrt(1 + np.pi / 8 * expected)
        np.testing.assert_allclose(certain[image].numpy(), scaled)


def test_the_gaussian_process_is_that_of_scikit_learn():
    h, labels, new = rand(40, 5), torch.arange(40) % 3, rand(6, 5, seed=1)
    process = GaussianProcess.chosen(h, labels, (h, labels))
    noise = float((process.cholesky @ process.cholesky.T)[0, 0]) - 1
    assert noise == pytest.approx(min(NOISES, key=lambda each: abs(each - noise)))
    one_hot, normed = np.eye(3)[labels], lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)
    oracle = GaussianProcessRegressor(RBF(process.length), alpha=noise, optimizer=None)
    oracle.fit(normed(h.numpy()), one_hot - one_hot.mean(axis=0))
    mean, deviation = oracle.predict(normed(new.numpy()), return_std=True)
    logits, variance = process(new)
    np.testing.assert_allclose(variance, deviation[:, 0] ** 2, rtol=1e-6)
    scaled = process.factor * (mean + one_hot.mean(axis=0))
    certain = scaled / np.sqrt(1 + np.pi / 8 * process.factor**2 * deviation**2)
    np.testing.assert_allclose(logits, certain, rtol=1e-6)


def test_the_fast_kernel_is_the_kernel():
    a, b = rand(6, 5), rand(4, 5, seed=1)
    torch.testing.assert_close(head_kernel(a, b), ntk.h_ntk(a, b))


def test_the_deviation_over_anchors_ignores_a_common_offset():
    z = rand(4, 2, 3)
    centred = z.numpy() - z.numpy().mean(axis=2, keepdims=True)
    expected = np.sqrt(centred.var(axis=0, ddof=1).mean(axis=1))
    np.testing.assert_allclose(deviation(z + rand(4, 2, 1, seed=2)).numpy(), expected)


def test_scores_are_added_in_units_of_held_out_images():
    one, two = (
        {"held out": rand(50), "far": rand(5, seed=1)},
        {"held out": rand(50, seed=2) * 9, "far": rand(5, seed=3)},
    )
    expected = sum((part["far"] - part["held out"].mean()) / part["held out"].std() for part in (one, two))
    torch.testing.assert_close(added_scores([one, two])["far"], expected)


def test_a_run_at_the_smoke_scale_has_every_row_and_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(frozen, "FEWEST_STEPS", 5)
    monkeypatch.setattr(head_scores, "EPOCHS", 1)
    monkeypatch.setattr(head_scores, "WIDE", 8)
    command = ("reproduce", "heads", "--scale", "smoke", "--out", tmp_path / "heads")
    result = run_cli(*command)
    assert result.exit_code == 0, result.exception
    whole = json.loads((tmp_path / "heads" / "metrics.json").read_text())
    for label in (
        "anchored: AMP",
        "anchored, wide: tau",
        "ensemble: gen",
        "Laplace: msp",
        "GP: variance",
        "MDS++",
        THIRD,
    ):
        for task in ("toy", "toys"):
            (result,) = whole["results"][label][task].values()
            assert set(result["groups"]) == {"near", "far"}
            assert 0 <= result["id"]["aurc"] <= 1
    assert set(whole["by count"]["toy"]["tau"]) == {str(k) for k in COUNTS}
    assert len(whole["by distance"]["toy"]["distance"]) == heads.BINS
    assert (tmp_path / "heads" / "heads.svg").read_text().startswith("<?xml")
    for each in ("anchored: mutual_information", "gaussian process: 512 wide"):
        assert each in (tmp_path / "heads" / "tables.md").read_text()
    monkeypatch.setattr(heads, "trained_heads", None)  # every cell is there
    again = run_cli(*command, "--overwrite", "--rows", "anchored: tau")
    assert again.exit_code == 0, again.exception
    assert "anchored: tau" in again.output
    assert "ensemble: gen" not in again.output
