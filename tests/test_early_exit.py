"""Early exit: two anchors for images that are surely accepted, all for the others, and the guarantee as before."""

import pytest
import torch
from torch import nn

import kedge
from kedge.errors import FileFormatError, InputError, NotReadyError
from kedge.seeds import seeded


def network(seed=0) -> kedge.Anchored:
    with seeded(seed):
        return kedge.anchor(nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3)), init="fresh")


def images(n, seed=0, spread=0.1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (0.5 + spread * torch.randn(n, 3, 2, 2, generator=generator)).clamp(0, 1)


def detector(k=6, min_anchors=2, alpha=0.05, **options) -> kedge.EarlyExit:
    amp = kedge.AMP(network(), k=k, seed=0, **options).fit(images(50))
    return kedge.EarlyExit(amp, min_anchors=min_anchors).calibrate(images(400, seed=1), alpha=alpha)


def by_hand(per_anchor: torch.Tensor) -> torch.Tensor:
    """The paper's score of per-anchor logits (K, B, C), negated."""
    tau = per_anchor.sigmoid().std(dim=0).sum(dim=1)
    rescaled = per_anchor.mean(dim=0) / (1 + tau.exp())[:, None]
    return rescaled.mean(dim=1) - rescaled.logsumexp(dim=1)


@pytest.mark.parametrize(("tta", "least"), [(1, 2), (2, 3), (6, 2)])
def test_images_that_exit_have_the_score_of_the_first_anchors_and_the_others_that_of_all(tta, least):
    early, fresh = detector(tta=tta, min_anchors=least), images(300, seed=2, spread=0.2)
    per_anchor = early.net.per_anchor_logits(fresh, tta=tta)
    few, full = by_hand(per_anchor[:least]), by_hand(per_anchor)
    exits = few <= early.exit_threshold
    assert 0 < int(exits.sum()) < len(fresh)
    result = early(fresh)
    assert torch.allclose(result.score, torch.where(exits, few, full), atol=1e-5)
    mean = torch.where(exits[:, None], per_anchor[:least].mean(dim=0), per_anchor.mean(dim=0))
    assert torch.allclose(result.logits, mean, atol=1e-5)
    assert early.mean_passes(fresh) == pytest.approx(least + (6 - least) * float((~exits).double().mean()))
    assert torch.allclose(early.score(fresh, batch_size=1), result.score, atol=1e-5)


def test_a_call_changes_nothing_in_the_detector():
    early = detector()
    before = {name: value for name, value in vars(early).items() if name != "net"}
    early(images(30, seed=2))
    early.mean_passes(images(30, seed=2))
    assert {name: value for name, value in vars(early).items() if name != "net"} == before


@pytest.mark.parametrize("alpha", [0.01, 0.05, 0.2, 0.4])
def test_images_that_exit_are_accepted_at_any_alpha(alpha):
    early, fresh = detector(alpha=alpha), images(500, seed=3, spread=0.3)
    exits = by_hand(early.net.per_anchor_logits(fresh)[:2]) <= early.exit_threshold
    assert bool(exits.any())
    assert not bool(early(fresh).is_ood[exits].any())


def test_the_guarantee_holds_over_draws_of_the_calibration_images():
    early, flagged = kedge.EarlyExit(network(), k=4, seed=0).fit(images(50)), []
    fresh = images(2000, seed=4)
    for draw in range(120):
        early.calibrate(images(160, seed=100 + draw), alpha=0.1)
        flagged.append(float(early(fresh).is_ood.double().mean()))
    mean, error = torch.tensor(flagged).mean(), torch.tensor(flagged).std() / len(flagged) ** 0.5
    assert mean <= 0.1 + 3 * error
    assert mean > 0.04  # it does not flag nothing at all


def test_a_saved_detector_exits_as_before_and_learns_anew(tmp_path):
    early, fresh = detector(min_anchors=3), images(40, seed=2)
    early.save(tmp_path / "a.kedge")
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
    again = kedge.load(tmp_path / "a.kedge", model=model)
    assert (again.min_anchors, again.exit_threshold) == (3, early.exit_threshold)
    assert torch.equal(again.score(fresh), early.score(fresh))
    for wrong in (float("nan"), float("inf")):  # with infinity every image would exit, and few be flagged
        with pytest.raises(FileFormatError, match="exit_threshold must be finite"):
            again.load_state({"exit_threshold": torch.tensor(wrong)})
    again.load_state(early.state())
    again.calibrate(images(400, seed=9))
    assert again.exit_threshold != early.exit_threshold
    again.fit(images(50))
    assert again.exit_threshold is None


def test_the_detector_that_is_wrapped_stays_and_comes_back():
    amp = kedge.AMP(network(), k=4, seed=0).fit(images(50)).calibrate(images(80, seed=1))
    expected = amp(images(20, seed=2))
    early = kedge.EarlyExit(amp).calibrate(images(400, seed=1), alpha=0.1)
    assert early.net is amp.net
    assert torch.equal(amp(images(20, seed=2)).score, expected.score)
    full = early.without_early_exit().calibrate(images(80, seed=1))
    assert type(full) is kedge.AMP
    assert torch.equal(full(images(20, seed=2)).p_value, expected.p_value)


def test_errors():
    with pytest.raises(NotReadyError, match="call calibrate"):
        kedge.EarlyExit(network()).fit(images(50)).score(images(3))
    for options in ({"shared_tau": True}, {"score": "tau"}, {"score": "mutual_information"}):
        with pytest.raises(InputError, match="early exit needs"):
            kedge.EarlyExit(network(), **options)
    with pytest.raises(InputError, match="min_anchors must be"):
        kedge.EarlyExit(network(), min_anchors=1)
    with pytest.raises(InputError, match="which must hold numbers of anchors, 0 to 3; got"):
        kedge.EarlyExit(network(), k=4, min_anchors=5).fit(images(50)).calibrate(images(80)).score(images(3))
