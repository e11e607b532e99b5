"""A detector out of Lightning's Trainer."""

import sys
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import kedge
from helpers import images, labelled
from kedge.errors import InputError, NotReadyError
from kedge.metrics import auroc
from kedge.models import build

lightning = pytest.importorskip("lightning")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from kedge.adapters.lightning import AnchorCallback

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's, about workers and loggers
TRAIN, HELD_OUT = labelled(48, classes=3), images(40, seed=1)
BRIGHT = 250 + images(20, seed=2) % 6


class Module(lightning.LightningModule):
    def __init__(self, networks=1):
        super().__init__()
        for number in range(networks):
            self.add_module(f"net{number}", kedge.anchor(build("compact", width=4, classes=3), init="fresh", seed=0))
        self.seen = []

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self.net0(x), y)

    def validation_step(self, batch, _):
        self.seen.append(self.net0(batch[0]).shape)  # in evaluation mode, which needs anchors

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(*callbacks, module=None, epochs=2, validate=True, checkpoint=None):
    module = module or Module()
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks),
    )  # fmt: skip
    loader = DataLoader(TRAIN, batch_size=16)
    trainer.fit(module, loader, loader if validate else None, ckpt_path=checkpoint, weights_only=False)
    return trainer, module


def test_fit_ends_with_a_calibrated_detector_of_the_trained_network(tmp_path):
    path = tmp_path / "detector.kedge"
    callback = AnchorCallback(TRAIN, HELD_OUT, alpha=0.1, path=path)
    assert callback.detector is None
    _, module = fit(callback, validate=False)
    detector = callback.detector
    assert isinstance(detector, kedge.AMP)
    assert detector.net is module.net0
    assert detector.net.batches_seen == 6
    assert detector.calibration.alpha == 0.1
    assert detector.classes == ("ant", "bee", "cow")
    expected = kedge.AMP(module.net0).fit(TRAIN).calibrate(HELD_OUT, alpha=0.1)
    assert torch.equal(detector.score(BRIGHT), expected.score(BRIGHT))
    assert torch.equal(kedge.load(path).score(BRIGHT), detector.score(BRIGHT))


def test_validation_can_evaluate_the_network_and_gets_an_auroc_that_others_can_monitor():
    logged, counted = [], []

    class Listen(lightning.Callback):
        def on_validation_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                logged.append(float(trainer.callback_metrics["ood_auroc"]))
                detector = kedge.AMP(pl_module.net0).fit(TRAIN)
                counted.append(auroc(detector.score(HELD_OUT), detector.score(BRIGHT)))

    _, module = fit(AnchorCallback(TRAIN, HELD_OUT, ood=BRIGHT), Listen(), epochs=3)
    assert len(logged) == 3
    assert logged == pytest.approx(counted, abs=1e-6)
    assert module.seen
    assert len(set(logged)) > 1  # of the network as it is, not as it was


def test_training_is_the_same_with_the_callback_and_without():
    weights = []
    for callback in (AnchorCallback(TRAIN, HELD_OUT, ood=BRIGHT), lightning.Callback()):
        torch.manual_seed(0)
        module = Module()
        module.net0.set_anchors(HELD_OUT[:5])
        fit(callback, module=module)
        weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.equal(*weights)


def test_a_checkpoint_is_gone_on_with_and_keeps_its_anchors(tmp_path):
    trainer, module = fit(AnchorCallback(TRAIN, HELD_OUT), epochs=1)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = AnchorCallback(TRAIN, HELD_OUT, make=kedge.Energy)
    _, resumed = fit(again, validate=False, checkpoint=tmp_path / "last.ckpt")
    assert torch.equal(resumed.net0.anchors, module.net0.anchors)
    assert again.detector.net.batches_seen == 6
    assert isinstance(again.detector, kedge.Energy)


def test_the_network_is_found_or_named():
    with pytest.raises(InputError, match="it has none: anchor its network"):
        AnchorCallback(TRAIN, HELD_OUT).network(nn.Linear(1, 1))
    two = Module(networks=2)
    with pytest.raises(InputError, match=r"it has 'net0', 'net1': .*name the one to use as net="):
        AnchorCallback(TRAIN, HELD_OUT).network(two)
    assert AnchorCallback(TRAIN, HELD_OUT, net="net1").network(two) is two.net1
    with pytest.raises(InputError, match="net must name an anchored network of the module: 'net0', 'net1'; got 'net'"):
        AnchorCallback(TRAIN, HELD_OUT, net="net").network(two)


def test_without_lightning_the_error_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "kedge.adapters.lightning")
    monkeypatch.setitem(sys.modules, "lightning.pytorch.callbacks", None)
    with pytest.raises(NotReadyError, match=r"pip install 'kedge\[lightning\]'"):
        __import__("kedge.adapters.lightning")
