"""The examples run: pretrained networks are anchored and fine-tuned in other people's loops."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

import kedge
from kedge import metrics

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def example(monkeypatch):
    """Imports an example as if it were run in its folder."""
    pytest.importorskip("efficientnet_lite_pytorch")
    monkeypatch.syspath_prepend(EXAMPLES)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == EXAMPLES:
            del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "needs", "steps", "options"),
    [
        ("own_loop", "torch", 25, {}),
        ("lightning_module", "lightning", 25, {"enable_progress_bar": False, "enable_model_summary": False}),
        ("transformers_trainer", "accelerate", 100, {"disable_tqdm": True, "use_cpu": True}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_example_learns_and_gives_a_calibrated_detector(example, name, needs, steps, options):
    pytest.importorskip(needs)
    module = example(name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        detector = module.main(steps=steps, **options)
    held_out = example("pretrained").images(module.SIZE)[1]
    result = detector(held_out)
    assert isinstance(detector.net, kedge.Anchored)
    assert detector.net.batches_seen == steps
    assert metrics.accuracy(result.label, held_out.labels) > 0.5  # of ten classes
    assert 0 < float(result.is_ood.double().mean()) <= 0.05


def test_the_pretrained_network_knows_its_size_and_normalisation(example):
    net = example("pretrained").lite0().eval()
    assert net.record["preprocess"]["shape"] == (3, 224, 224)
    black, white = (net.normalise(torch.full((1, 3, 2, 2), value, dtype=torch.uint8)) for value in (0, 255))
    assert torch.allclose(black, torch.tensor(-127 / 128))
    assert torch.allclose(white, torch.tensor(1.0))


def test_transformers_brings_the_normalisation_of_its_image_processor(example, tmp_path):
    pytest.importorskip("accelerate")
    module = example("transformers_trainer")
    module.write_network(tmp_path)
    net = kedge.network(f"hf:{tmp_path}", pretrained=True)
    assert net.mean.tolist() == pytest.approx([0.485, 0.456, 0.406])
    assert net.record["preprocess"]["crop"] == 0.875
    assert net.record["preprocess"]["shape"] == (3, module.SIZE, module.SIZE)
