"""Drift: tests whether a stream of scores still looks like the calibration scores of its detector.

`WindowTest` compares the newest scores with the calibration scores at regular intervals; the probability of any false
alarm over a declared horizon is at most ``alpha``. `Martingale` bets on every single score and may run forever; the
probability that it ever raises a false alarm is at most ``alpha``. `history` runs both over a whole array.
"""

from kedge.drift.martingale import Bet, Martingale
from kedge.drift.replay import DriftHistory, history, scores_of
from kedge.drift.window import Comparison, WindowTest

__all__ = ["Bet", "Comparison", "DriftHistory", "Martingale", "WindowTest", "history", "scores_of"]
