"""Methods that need their own training: a network to prepare and an loss to train it by, beside the detector."""

from abc import abstractmethod
from typing import Any

from torch import nn

from kedge.detectors.base import Detector
from kedge.training.losses import Loss


class TrainedDetector(Detector):
    """A detector whose network is prepared and trained in its own way.

    ::

        net = kedge.train(Method.prepare(net), train_set, loss=Method.loss())
        detector = Method(net).fit(train_set)
    """

    @classmethod
    def prepare(cls, net: nn.Module) -> Any:
        """A copy of a network as the method needs it; by default the network as it is."""
        return net

    @classmethod
    @abstractmethod
    def loss(cls) -> Loss:
        """What `kedge.train` is to minimise."""
