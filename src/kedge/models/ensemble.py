"""Ensemble: several classifiers as one."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from kedge.checks import shape_of
from kedge.errors import InputError
from kedge.models.classifier import Classifier, as_classifier


def log_mean_softmax(logits: Tensor) -> Tensor:
    """The logarithm of the mean softmax over members or draws: logits (M, B, C) -> (B, C)."""
    return logits.log_softmax(dim=-1).logsumexp(dim=0) - math.log(len(logits))


class Ensemble(Classifier):
    """Several classifiers of the same classes; the logits are the logarithm of their mean softmax.

    Args:
        members: Networks, each a `Classifier` or one that takes images in [0, 1].

    Example:
        >>> members = [nn.Sequential(nn.Flatten(), nn.Linear(12, 2)) for _ in range(3)]
        >>> Ensemble(members).members_logits(torch.rand(4, 3, 2, 2)).shape
        torch.Size([3, 4, 2])
    """

    def __init__(self, members: Sequence[nn.Module] | nn.ModuleList) -> None:
        if not isinstance(members, list | tuple | nn.ModuleList):
            raise InputError(f"members must be a list of networks, got {type(members).__name__}")
        if len(members) == 0 or not all(isinstance(member, nn.Module) for member in members):
            kinds = ", ".join(type(member).__name__ for member in members) or "none"
            raise InputError(f"members must be at least one network and nothing else, got {kinds}")
        super().__init__(nn.ModuleList(map(as_classifier, members)))

    @property
    def members(self) -> list[Classifier]:
        """The classifiers, in the order given."""
        return [cast(Classifier, member) for member in cast(nn.ModuleList, self.network)]

    @property
    def passes(self) -> float:
        """Those of the members together."""
        return sum(member.passes for member in self.members)

    @property
    def record(self) -> dict[str, Any]:
        """What was set, and the members' preprocessing where they agree on it; their own records hold the rest."""
        trained = [m.record["preprocess"] for m in self.members if m.record.get("preprocess") is not None]
        agreed = bool(trained) and all(each == trained[0] for each in trained)
        return self._record | ({"preprocess": trained[0]} if agreed else {})

    @record.setter
    def record(self, value: Mapping[str, Any]) -> None:
        self._record = dict(value)

    def members_logits(self, x: Tensor) -> Tensor:
        """The logits of each member, (M, B, C)."""
        logits = [member(x) for member in self.members]
        if len({each.shape for each in logits}) > 1:
            raise InputError(f"members must have the same classes; they give {', '.join(map(shape_of, logits))}")
        return torch.stack(logits)

    def forward(self, x: Tensor, *, raw: bool = False) -> Any:
        """The logarithm of the mean softmax, (B, C); ``raw`` gives the logits of each member instead."""
        logits = self.members_logits(x)
        return logits if raw else log_mean_softmax(logits)

    def features(
        self, x: Tensor, layers: Sequence[str] = (), *, like: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Raise: only the members have features."""
        raise InputError("an ensemble has no layers to read; use one of its members, or DeepEnsemble")
