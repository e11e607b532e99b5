"""A calibrated detector from Lightning's Trainer."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kedge.anchoring import Anchored
from kedge.detectors import AMP, Detector
from kedge.errors import InputError, NotReadyError
from kedge.metrics import auroc
from kedge.models.classifier import evaluating

try:
    from lightning.pytorch.callbacks import Callback
except ImportError as missing:
    raise NotReadyError(
        f"kedge.adapters.lightning needs {missing.name}, which is missing: pip install 'kedge[lightning]'"
    ) from missing

LOGGED = "ood_auroc"


class AnchorCallback(Callback):  # type: ignore[misc]  # mypy does not read Lightning
    """Fits and calibrates a detector on a module's anchored network when `Trainer.fit` ends.

    The network gets its anchors from the training images before training begins, so that ``validation_step`` can
    evaluate it. With out-of-distribution images, ``ood_auroc`` is logged after each validation: the AUROC of the
    held-out images against them, which other callbacks can monitor.

    Args:
        train_set: The training images, in any form that `kedge.data.batches` takes.
        held_out: In-distribution images that are not trained on, for the threshold.
        ood: Out-of-distribution images for ``ood_auroc``, which selects nothing; None for none.
        net: The name of the anchored network in the module, such as ``"net"``; by default the only one there is.
        make: Builds a detector from a network.
        alpha: The largest share of in-distribution images to flag.
        path: File to save the detector to, or None.

    Attributes:
        detector: None until `fit` has ended.

    ::

        callback = AnchorCallback(train_set, held_out, path="detector.kedge")
        lightning.Trainer(callbacks=[callback]).fit(module, loader)
    """

    def __init__(
        self,
        train_set: Any,
        held_out: Any,
        *,
        ood: Any = None,
        net: str | None = None,
        make: Callable[[nn.Module], Detector] = AMP,
        alpha: float = 0.05,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        self.train_set, self.held_out, self.ood = train_set, held_out, ood
        self.net, self.make, self.alpha, self.path = net, make, alpha, path
        self.detector: Detector | None = None

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Set the anchors before a checkpoint is loaded, which may hold others."""
        if stage == "fit" and self.network(pl_module).anchors is None:
            self._fitted(pl_module)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the AUROC."""
        if self.ood is None or trainer.sanity_checking:
            return
        detector = self._fitted(pl_module)
        value = auroc(detector.score(self.held_out), detector.score(self.ood))
        pl_module.log(LOGGED, value, rank_zero_only=True)

    def on_fit_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Make the detector, and save it."""
        self.detector = self._fitted(pl_module).calibrate(self.held_out, alpha=self.alpha)
        if self.path is not None and trainer.is_global_zero:
            self.detector.save(self.path)

    def network(self, module: nn.Module) -> Anchored:
        """The anchored network of a module."""
        networks = {name: part for name, part in module.named_modules() if isinstance(part, Anchored)}
        names = ", ".join(map(repr, networks)) or "none"
        if self.net is None and len(networks) != 1:
            raise InputError(
                f"the module must have one network made by kedge.anchor; it has {names}: anchor its network, or name "
                "the one to use as net="
            )
        name = next(iter(networks)) if self.net is None else self.net
        if name not in networks:
            raise InputError(f"net must name an anchored network of the module: {names}; got {name!r}")
        return networks[name]

    @torch.inference_mode(False)  # Lightning validates in it, and anchors set in it could not be trained with
    def _fitted(self, module: nn.Module) -> Detector:
        net = self.network(module)
        with evaluating(net):  # and back: `fit` may leave a network in evaluation mode
            return self.make(net).fit(self.train_set)
