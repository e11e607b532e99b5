"""AMP with anchors="auto": two hypotheses where they settle it, all where they do not, and the promise as before."""

import pytest
import torch
from torch import nn

import kedge
from kedge.errors import InputError, NotReadyError
from kedge.seeds import seeded


def network(seed=0) -> kedge.Anchored:
    with seeded(seed):
        return kedge.anchor(nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3)), init="fresh")


def images(n, seed=0, per_sample=0.1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (0.5 + spread * torch.randn(n, 3, 2, 2, generator=generator)).clamp(0, 1)


def detector(k=6, **options) -> kedge.AMP:
    return kedge.AMP(network(), anchors="auto", k=k, seed=0, **options).fit(images(50)).calibrate(images(400, seed=1))


def by_hand(hypotheses: torch.Tensor) -> torch.Tensor:
    """The paper's score of hypotheses (K, B, C), negated."""
    tau = hypotheses.sigmoid().std(dim=0).sum(dim=1)
    rescaled = hypotheses.mean(dim=0) / (1 + tau.exp())[:, None]
    return rescaled.mean(dim=1) - rescaled.logsumexp(dim=1)


@pytest.mark.parametrize("views", [1, 2, 6])
def test_settled_images_have_the_score_of_two_and_the_others_that_of_all(views):
    adaptive, fresh = detector(tta=views), images(300, seed=2, per_sample=0.2)
    hypotheses = adaptive.net.per_anchor_logits(fresh, tta=views)
    two, every = by_hand(hypotheses[:2]), by_hand(hypotheses)
    settled = two <= adaptive.settled
    assert 0 < int(settled.sum()) < len(fresh)
    said = adaptive(fresh)
    assert torch.allclose(said.score, torch.where(settled, two, every), atol=1e-5)
    mean = torch.where(settled[:, None], hypotheses[:2].mean(dim=0), hypotheses.mean(dim=0))
    assert torch.allclose(said.logits, mean, atol=1e-5)


def test_the_mean_number_of_passes_is_counted():
    adaptive, fresh = detector(k=6), images(300, seed=2)
    assert adaptive.fit(images(50)).mean_passes == 6
    adaptive.calibrate(images(400, seed=1))
    adaptive.asked = [0, 0]
    adaptive.score(fresh, batch_size=7)
    settled = by_hand(adaptive.net.per_anchor_logits(fresh)[:2]) <= adaptive.settled
    assert adaptive.mean_passes == pytest.approx(2 + 4 * float((~settled).double().mean()))


def test_scores_do_not_depend_on_the_batch():
    adaptive, fresh = detector(), images(40, seed=2)
    assert torch.allclose(adaptive.score(fresh, batch_size=40), adaptive.score(fresh, batch_size=1), atol=1e-5)


def test_images_that_two_settle_are_accepted():
    adaptive = detector()
    fresh = images(500, seed=3, per_sample=0.3)
    settled = by_hand(adaptive.net.per_anchor_logits(fresh)[:2]) <= adaptive.settled
    assert not bool(adaptive(fresh).is_ood[settled].any())


def test_the_promise_holds_over_draws_of_the_calibration_images():
    net, flagged = network(), []
    base = kedge.AMP(net, anchors="auto", k=4, seed=0).fit(images(50))
    fresh = images(2000, seed=4)
    for draw in range(120):
        base.calibrate(images(160, seed=100 + draw), alpha=0.1)
        flagged.append(float(base(fresh, batch_size=2000).is_ood.double().mean()))
    share = torch.tensor(flagged)
    error = float(share.std() / len(share) ** 0.5)
    assert share.mean() <= 0.1 + 3 * error
    assert share.mean() > 0.06  # it flags, and not far less than it may


def test_it_is_saved_and_calibrated_anew(tmp_path):
    adaptive, fresh = detector(), images(40, seed=2)
    adaptive.save(tmp_path / "a.kedge")
    again = kedge.load(
        tmp_path / "a.kedge", model=nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
    )
    assert torch.equal(again.score(fresh), adaptive.score(fresh))
    again.calibrate(images(300, seed=9))
    assert again.settled != adaptive.settled


def test_before_calibration_nothing_is_known_of_when_to_stop():
    with pytest.raises(NotReadyError, match="does not know yet when two hypotheses are enough"):
        kedge.AMP(network(), anchors="auto").fit(images(50)).score(images(3))


@pytest.mark.parametrize("options", [{"temperature": "global"}, {"score": "temperature"}])
def test_it_goes_with_each_image_s_own_temperature(options):
    with pytest.raises(InputError, match="goes with a score of rescaled logits"):
        kedge.AMP(network(), anchors="auto", **options)


def test_loaded_and_fitted_anew_it_draws_as_many_anchors_as_before(tmp_path):
    detector(k=9).save(tmp_path / "a.kedge")
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
    again = kedge.load(tmp_path / "a.kedge", model=model)
    drawn = again.net.anchors
    assert torch.equal(again.fit(images(50)).net.anchors, drawn)
    assert len(drawn) == 9


def test_a_twin_has_the_score_of_the_user_s_own_too():
    made = kedge.AMP(network(), score=lambda logits: -logits.amax(dim=1)).fit(images(50)).calibrate(images(400, seed=1))
    twin = made.twin(images(400, seed=1), anchors=None)
    assert torch.equal(twin.score(images(7, seed=3)), made.score(images(7, seed=3)))
