"""CIFAR-10 for longer: a narrow network and its anchored twin, trained for eight times the epochs of cifar10-fast."""

from kedge.detectors import AMP, KNN, MSP, ODIN, Detector, Energy, FlipsAndCrops
from kedge.suites.cifar10_fast import MOST, NEAR, small_network, small_recipe
from kedge.suites.insight import BUDGETS, NARROW
from kedge.suites.plan import MethodPlan, Protocol, Suite
from kedge.suites.study import SHIFTS, Setting, Study

ON_PLAIN: tuple[type[Detector], ...] = (MSP, Energy, ODIN, KNN)
LEAD = "AMP, tau mean, 6 views"


def cifar10_longer(setting: Setting) -> Study:
    """The twins of the longest budget of `insight`, on the sets of cifar10-fast.

    Example:
        >>> sorted(cifar10_longer(Setting("smoke")).suites[0].networks)
        ['anchored', 'plain']
    """
    load = setting.data("cifar10", (), shifts=SHIFTS, most=MOST)
    how = small_recipe(setting, BUDGETS[-1])
    width = {} if setting.scale == "smoke" else {"arguments": {"width": NARROW}}
    networks = {
        "anchored": small_network(setting, how, anchored=True, anchoring={"spread": True}, **width),
        "plain": small_network(setting, how, **width),
    }
    rows = {
        "AMP": MethodPlan(AMP, ("anchored",)),
        LEAD: MethodPlan(AMP, ("anchored",), {"tau": "mean", "views": 6}),
        "AMP, temperature permuted": MethodPlan(AMP, ("anchored",), permuted=True),
        "AMP, no temperature": MethodPlan(AMP, ("anchored",), {"rescale": "none"}),
        "Energy (anchored)": MethodPlan(Energy, ("anchored",)),
        "MSP (anchored)": MethodPlan(MSP, ("anchored",)),
    }
    rows |= {kind.__name__: MethodPlan(kind, ("plain",)) for kind in ON_PLAIN}
    rows |= {
        "Energy, centred": MethodPlan(Energy, ("plain",), {"centred": True}),
        "Energy, centred, 5 flips and crops": MethodPlan(
            FlipsAndCrops, ("plain",), {"k": 5, "shift": 1, "score": "amp"}
        ),
    }
    suite = Suite(
        name="cifar10",
        title="CIFAR-10 on two cores, for longer",
        networks=networks,
        methods=rows,
        data=lambda seed: load(0),  # the split of cifar10-fast for all seeds
        seeds=setting.seeds,
        comparisons=setting.comparisons,
        protocol=Protocol(("auroc", "fpr95", "aupr_in", "aupr_out", "dtacc")),
        leads=(LEAD,),
        apart=(NEAR,),
    )
    about = "An anchored network and its plain twin, a narrow one, at the longest budget that two cores have time for."
    return Study("cifar10-longer", "CIFAR-10 on two cores, for longer", about, (suite,))
