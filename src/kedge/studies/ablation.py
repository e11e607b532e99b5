"""What of anchoring matters: the paper's Table 8 and Figure 1B, and more readings of the method than it has."""

from typing import Any

from kedge.anchoring.corruption import Corruption
from kedge.detectors import AMP, MSP, TTA, Energy, LowLevelStatistics
from kedge.evaluation.curve import Curve
from kedge.studies.plan import MethodPlan, NetworkPlan, PaperTable, Protocol, Suite
from kedge.studies.study import CLASSES, DRAWS, SHIFTS, Setting, Study, draw_label

ANCHORS = (2, 5, 10, 20)
OOD = ("svhn",)
OFF = {"crop": False, "flip": False, "jitter": False, "blur": False, "gray": False}
# The rows of the table, each with all corruptions of those before it; the last is the method.
CUMULATIVE: dict[str, dict[str, bool]] = {
    "none": {},
    "jitter, blur": {"jitter": True, "blur": True},
    "jitter, blur, flip, grey": {"jitter": True, "blur": True, "flip": True, "gray": True},
    "all five": {"jitter": True, "blur": True, "flip": True, "gray": True, "crop": True},
}
# The same rows as they can also be read, each on its own.
SEPARATE: dict[str, dict[str, bool]] = {
    "flip, grey": {"flip": True, "gray": True},
    "crop": {"crop": True},
}
METHOD = "all five"
AS_IT_IS = "AMP, as it is"


def ablation(setting: Setting) -> Study:
    """Table 8: the corruption of anchors against their number; then every reading of the method on one network.

    The full scale also trains the rows that can be read as separate, corruption in every batch, and reference masking.

    Example:
        >>> sorted(ablation(Setting("smoke")).suites[0].networks)
        ['all five', 'jitter, blur', 'jitter, blur, flip, grey', 'none', 'plain']
    """
    classes = CLASSES["cifar10"]

    def anchored(**anchoring: Any) -> NetworkPlan:
        return setting.network("wrn-40-2", classes, anchored=True, anchoring=anchoring)

    rows = CUMULATIVE if setting.scale != "full" else CUMULATIVE | SEPARATE
    networks = {row: anchored(**_corrupted(on)) for row, on in rows.items()}
    networks["plain"] = setting.network("wrn-40-2", classes)
    if setting.scale == "full":
        networks["corrupted in every batch"] = anchored(every=1)
        networks["masked, label"] = anchored(mask=0.25)
        networks["masked, uniform"] = anchored(mask=0.25, mask_target="uniform")
    methods = {
        _row(row, k): MethodPlan(AMP, (row,), {"k": k}, paper=f"AMP, {_row(', '.join(on) or 'none', k)}")
        for row, on in rows.items()
        for k in ANCHORS
    }
    for name in networks:
        if name not in rows and name != "plain":
            methods[f"AMP, {name}"] = MethodPlan(AMP, (name,))
    methods |= {f"AMP, {reading}": MethodPlan(AMP, (METHOD,), options) for reading, options in READINGS.items()}
    methods |= {
        "Energy, same network": MethodPlan(Energy, (METHOD,)),
        "MSP, same network": MethodPlan(MSP, (METHOD,)),
        "Energy, plain twin": MethodPlan(Energy, ("plain",)),
        "MSP, plain twin": MethodPlan(MSP, ("plain",)),
        "Energy, plain twin, 5 flips and crops": MethodPlan(TTA, ("plain",), {"k": 5, "shift": 2}),
        "pixel statistics": MethodPlan(LowLevelStatistics, ("plain",)),
    }
    methods |= {
        "AMP, temperature permuted": MethodPlan(AMP, (METHOD,), permuted=True),
        **{draw_label(seed): MethodPlan(AMP, (METHOD,), {"seed": seed}) for seed in DRAWS},
    }
    suite = Suite(
        name="cifar10",
        title="What of anchoring matters",
        networks=networks,
        methods=methods,
        data=setting.data("cifar10", OOD, shifts=SHIFTS),
        seeds=setting.seeds,
        comparisons=setting.comparisons,
        resamples=0,
        protocol=Protocol(("fpr95", "auroc")),
        paper=PaperTable("8", "cifar10", "wrn-40-2"),
        leads=(AS_IT_IS,),
        draws={AS_IT_IS: tuple(map(draw_label, DRAWS))},
        curves=(
            Curve(
                "The number of anchors",
                "anchors",
                {f"T: {row}": {k: (_row(row, k), None) for k in ANCHORS} for row in rows},
            ),
        ),
    )
    about = (
        "Which corruption of the anchors, how many anchors, which reading of the formula: what makes the difference?"
    )
    return Study("ablation", "What of anchoring matters (Table 8, Figure 1B)", about, (suite,))


def _row(corruption: str, k: int) -> str:
    return f"T: {corruption}, K = {k}"


def _corrupted(on: dict[str, bool]) -> dict[str, Any]:
    """The arguments of `kedge.anchor`; none for all corruptions, so that other studies have the same network."""
    if all((OFF | on).values()):
        return {}
    return {"corruption": Corruption(**OFF | on) if on else None}


# Readings of the formula, all on the network of the last row.
READINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "tau mean": {"tau": "mean"},
    "tau sum, plain": {"rescale": "plain"},
    "tau mean, plain": {"tau": "mean", "rescale": "plain"},
    "no temperature": {"rescale": "none"},
    "one temperature for all": {"temperature": "global"},
    "temperature alone": {"score": "temperature"},
    "authors (anchors per image)": {"variant": "authors"},
    "balanced anchors": {"anchors": "balanced"},
    "entropy": {"score": "entropy"},
    "energy": {"score": "energy"},
    "max logit": {"score": "max_logit"},
    "MSP": {"score": "msp"},
}
