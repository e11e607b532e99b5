"""Anchoring: widen a network's first layer to [c, x - c], draw anchors, marginalise over them."""

from kedge.anchoring.anchored import Anchored
from kedge.anchoring.options import DEFAULT_K, AnchoringOptions, Draw
from kedge.anchoring.widen import anchor

__all__ = ["DEFAULT_K", "Anchored", "AnchoringOptions", "Draw", "anchor"]
