"""Methods that need their own training: a network to prepare and an objective to train it by, beside the detector."""

from abc import abstractmethod
from typing import Any

from torch import nn

from kedge.detectors.base import Detector
from kedge.objective import Objective


class TrainedDetector(Detector):
    """A detector whose network is prepared and trained in its own way.

    ::

        net = kedge.train(Method.prepare(net), train_set, objective=Method.objective())
        detector = Method(net).fit(train_set)
    """

    @classmethod
    def prepare(cls, net: nn.Module) -> Any:
        """A copy of a network as the method needs it; by default the network as it is."""
        return net

    @classmethod
    @abstractmethod
    def objective(cls) -> Objective:
        """What `kedge.train` is to minimise."""
