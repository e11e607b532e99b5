"""What a notebook shows: small gray images, two methods in one table, a DataFrame and figures.

Needs ``pip install 'kedge[demo,pandas]'``; run it with ``python examples/plots.py FOLDER``, or cell by cell.
"""

import sys
from pathlib import Path

import kedge
from kedge.data.digits import digits


def main(folder: str | Path = ".", epochs: int = 2) -> kedge.evaluation.Evaluation:
    """Train a network on the digits 0 to 4, and write figures of what it says about the others."""
    everything = digits()
    known = everything.subset(everything.labels < 5)
    others = everything.subset(everything.labels >= 5, name="digits 5 and up")[:300]
    train_set, rest = known.split(0.7)
    held_out, test = rest.split(0.5)

    net = kedge.models.build("compact", width=8, classes=5, channels=1)
    net = kedge.train(net, train_set, kedge.training.recipe("demo", epochs=epochs))
    detectors = {"KNN": kedge.KNN(net), "MSP": kedge.MSP(net)}
    for detector in detectors.values():
        detector.fit(train_set).calibrate(held_out)

    evaluation = kedge.evaluate(detectors, test, [others], resamples=100)
    print(evaluation)  # the table; in a notebook, `evaluation` alone
    print(evaluation.to_pandas()[["auroc", "auroc_low", "auroc_high", "flagged"]].round(3))
    print(detectors["KNN"](others[:3]).to_pandas()[["label", "probability", "p_value", "is_ood"]].round(3))

    figures = {kind: evaluation.plot(kind) for kind in ("scores", "roc", "reliability")}
    figures["verdicts"] = detectors["KNN"].plot(others, most=8, train_set=train_set)
    for name, figure in figures.items():
        figure.savefig(Path(folder) / f"{name}.png", dpi=100)
    return evaluation


if __name__ == "__main__":
    main(*sys.argv[1:])
