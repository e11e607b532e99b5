"""Which part of anchoring matters: the paper's Table 8 and Figure 1B, and further variants of the score."""

from typing import Any

from kedge.anchoring.corruption import Corruption
from kedge.detectors import AMP, MSP, TTA, Energy, LowLevelStatistics
from kedge.evaluation.result import Curve
from kedge.studies.plan import MethodPlan, NetworkPlan, PaperTable, Protocol
from kedge.studies.study import CLASSES, DRAWS, SHIFTS, Setting, Study, draw_label

ANCHORS = (2, 5, 10, 20)
SWITCHES = ("crop", "flip", "jitter", "blur", "gray")
# The rows of the table, each with all corruptions of those before it; the last is the method.
CUMULATIVE: dict[str, tuple[str, ...]] = {
    "none": (),
    "jitter, blur": ("jitter", "blur"),
    "jitter, blur, flip, gray": ("jitter", "blur", "flip", "gray"),
    "all five": ("jitter", "blur", "flip", "gray", "crop"),
}
# The same rows as they can also be read, each on its own.
SEPARATE: dict[str, tuple[str, ...]] = {"flip, gray": ("flip", "gray"), "crop": ("crop",)}
METHOD = "all five"
LEAD = "AMP, defaults"
# Variants of the formula, all on the network of the last row.
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "tau mean": {"tau": "mean"},
    "tau sum, divided by tau": {"rescale": "plain"},
    "tau mean, divided by tau": {"tau": "mean", "rescale": "plain"},
    "no tau": {"rescale": "none"},
    "shared tau": {"shared_tau": True},
    "tau alone": {"score": "tau"},
    "authors (anchors per image)": {"variant": "authors"},
    "balanced anchors": {"anchors": "balanced"},
    "entropy": {"score": "entropy"},
    "energy": {"score": "energy"},
    "max logit": {"score": "max_logit"},
    "MSP": {"score": "msp"},
}


def ablation(setting: Setting) -> Study:
    """Table 8: the corruption of anchors against their number; then every variant of the score on one network.

    The full scale also trains the rows that can be read as separate, corruption in every batch, and reference masking.
    """
    classes, full = CLASSES["cifar10"], setting.scale == "full"

    def anchored(**anchoring: Any) -> NetworkPlan:
        return setting.network("wrn-40-2", classes, anchored=True, anchoring=anchoring)

    rows = CUMULATIVE | SEPARATE if full else CUMULATIVE
    networks = {row: anchored(**_corruption(switches)) for row, switches in rows.items()}
    networks["unanchored"] = setting.network("wrn-40-2", classes)
    more: dict[str, dict[str, Any]] = {
        "corrupted in every batch": {"every": 1},
        "masked, label": {"mask": 0.25},
        "masked, uniform": {"mask": 0.25, "mask_target": "uniform"},
    }
    networks |= {name: anchored(**anchoring) for name, anchoring in more.items() if full}
    methods = {
        _label(row, k): MethodPlan(AMP, (row,), {"k": k}, paper=f"AMP, {_label(', '.join(switches) or 'none', k)}")
        for row, switches in rows.items()
        for k in ANCHORS
    }
    methods |= {f"AMP, {name}": MethodPlan(AMP, (name,)) for name in more if full}
    methods |= {f"AMP, {variant}": MethodPlan(AMP, (METHOD,), options) for variant, options in VARIANTS.items()}
    methods |= {
        "Energy, same network": MethodPlan(Energy, (METHOD,)),
        "MSP, same network": MethodPlan(MSP, (METHOD,)),
        "Energy, unanchored": MethodPlan(Energy, ("unanchored",)),
        "MSP, unanchored": MethodPlan(MSP, ("unanchored",)),
        "Energy, unanchored, TTA, 5 views": MethodPlan(TTA, ("unanchored",), {"k": 5, "shift": 2}),
        "low-level statistics": MethodPlan(LowLevelStatistics, ("unanchored",)),
        "AMP, tau permuted": MethodPlan(AMP, (METHOD,), permuted=True),
        **{draw_label(seed): MethodPlan(AMP, (METHOD,), {"seed": seed}) for seed in DRAWS},
    }
    suite = setting.suite(
        "cifar10",
        "Which part of anchoring matters",
        networks=networks,
        methods=methods,
        data=setting.data("cifar10", ("svhn",), shifts=SHIFTS),
        protocol=Protocol(("fpr95", "auroc")),
        paper=PaperTable("8", "cifar10", "wrn-40-2"),
        leads=(LEAD,),
        draws={LEAD: tuple(map(draw_label, DRAWS))},
        curves=(
            Curve(
                "The number of anchors",
                "anchors",
                {f"T: {row}": {k: (_label(row, k), None) for k in ANCHORS} for row in rows},
            ),
        ),
    )
    about = "Which corruption of the anchors, how many anchors, and which variant of the score make the difference?"
    return Study("ablation", "Which part of anchoring matters (Table 8, Figure 1B)", about, (suite,))


def _label(corruption: str, k: int) -> str:
    return f"T: {corruption}, K = {k}"


def _corruption(switches: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of `kedge.anchor`; none for all corruptions, so that other studies have the same network."""
    if set(switches) == set(SWITCHES):
        return {}
    on: dict[str, Any] = {name: name in switches for name in SWITCHES}
    return {"corruption": Corruption(**on) if switches else None}
