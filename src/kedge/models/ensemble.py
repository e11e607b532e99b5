"""Ensemble: several classifiers as one."""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from kedge.errors import InputError
from kedge.models.classifier import Classifier


class Ensemble(Classifier):
    """Several classifiers of the same classes; the logits are the logarithm of their mean softmax.

    Args:
        members: Networks, each a `Classifier` or one that takes images in [0, 1].

    Example:
        >>> members = [nn.Sequential(nn.Flatten(), nn.Linear(12, 2)) for _ in range(3)]
        >>> Ensemble(members).hypotheses(torch.rand(4, 3, 2, 2)).shape
        torch.Size([3, 4, 2])
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        if isinstance(members, nn.Module) or len(members) == 0:
            raise InputError(f"members must be a list of at least one network, got {type(members).__name__}")
        if not all(isinstance(member, nn.Module) for member in members):
            raise InputError(f"members must be networks, got {[type(member).__name__ for member in members]}")
        super().__init__(nn.ModuleList(m if isinstance(m, Classifier) else Classifier(m) for m in members))

    @property
    def members(self) -> list[Classifier]:
        """The classifiers, in the order given."""
        return [cast(Classifier, member) for member in cast(nn.ModuleList, self.network)]

    def hypotheses(self, x: Tensor) -> Tensor:
        """The logits of each member, (M, B, C)."""
        logits = [member(x) for member in self.members]
        if len({tuple(each.shape) for each in logits}) > 1:
            raise InputError(f"members must have the same classes; they give {[tuple(e.shape) for e in logits]}")
        return torch.stack(logits)

    def forward(self, x: Tensor, *, raw: bool = False) -> Any:
        """The logarithm of the mean softmax, (B, C); ``raw`` gives the logits of each member instead."""
        hypotheses = self.hypotheses(x)
        return hypotheses if raw else hypotheses.log_softmax(dim=-1).logsumexp(dim=0) - math.log(len(hypotheses))

    def features(
        self, x: Tensor, layers: Sequence[str] = (), *, like: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Not of an ensemble: its members have features of their own."""
        raise InputError("an ensemble has no layers to read; use one of its members, or DeepEnsemble")
