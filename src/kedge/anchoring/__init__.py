"""Anchoring: a layer on [c, x - c], anchors drawn from the training set, and the mean over them."""

from kedge.anchoring.anchored import Anchored
from kedge.anchoring.corruption import Corruption, FeatureNoise
from kedge.anchoring.options import DEFAULT_K, AnchoringOptions, Draw
from kedge.anchoring.wrap import anchor

__all__ = ["DEFAULT_K", "Anchored", "AnchoringOptions", "Corruption", "Draw", "FeatureNoise", "anchor"]
