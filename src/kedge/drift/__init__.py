"""Drift: does a stream of scores still look like the calibration scores of its detector?

`WindowTest` compares the newest scores with the calibration scores again and again; the chance of any false alarm over
a declared horizon is at most ``alpha``. `Martingale` bets on every single score and may run for ever; the chance that
it ever raises a false alarm is at most ``alpha``. `history` runs both over a whole array.
"""

from kedge.drift.martingale import Bet, Martingale
from kedge.drift.replay import History, history
from kedge.drift.window import Comparison, WindowTest

__all__ = ["Bet", "Comparison", "History", "Martingale", "WindowTest", "history"]
