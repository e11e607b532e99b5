"""Anchored networks learn in other people's loops."""

import importlib.util
from pathlib import Path

import pytest
import torch

import kedge
from kedge import metrics
from kedge.data.digits import digits

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("name", "needs", "steps", "options"),
    [
        ("own_loop", "torch", 50, {}),
        ("lightning_module", "lightning", 50, {"enable_progress_bar": False, "enable_model_summary": False}),
        ("transformers_trainer", "accelerate", 80, {"disable_tqdm": True, "use_cpu": True}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_example_learns_and_gives_a_calibrated_detector(name, needs, steps, options):
    pytest.importorskip(needs)
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        detector = module.main(steps=steps, **options)
    held_out = digits().split(0.9)[1]
    found = detector(held_out)
    assert isinstance(detector.net, kedge.Anchored)
    assert detector.net.batches_seen == steps
    assert metrics.accuracy(found.label, held_out.labels) > 0.8
    assert 0 < float(found.is_ood.double().mean()) <= 0.05
