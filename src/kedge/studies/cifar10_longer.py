"""CIFAR-10 for longer: a narrow network and its anchored twin, trained for eight times the epochs of cifar10-fast."""

from functools import partial

from kedge.detectors import AMP, TTA
from kedge.studies.cifar10_fast import MEMBERS, NEAR, cifar10_fast, small_network, small_recipe
from kedge.studies.insight import BUDGETS, NARROW
from kedge.studies.plan import MethodPlan, Protocol, Suite
from kedge.studies.study import Setting, Study
from kedge.training.losses import SyntheticOutliers

LEADS = ("AMP, recommended", "AMP, tau mean, 6 views")


def cifar10_longer(setting: Setting) -> Study:
    """The twins of the longest budget of `insight`, with and without made outliers, on the sets of cifar10-fast.

    Example:
        >>> sorted(cifar10_longer(Setting("smoke")).suites[0].networks)[:3]
        ['anchored', 'anchored, made outliers', 'made outliers']
    """
    (fast,) = cifar10_fast(setting).suites
    width = {} if setting.scale == "smoke" else {"arguments": {"width": NARROW}}
    network = partial(small_network, setting, small_recipe(setting, BUDGETS[-1]), **width)
    networks = {
        "plain": network(),
        "anchored": network(anchored=True, anchoring={"spread": True}),
        "made outliers": network(loss=SyntheticOutliers()),
        "anchored, made outliers": network(loss=SyntheticOutliers(), anchored=True, anchoring={"spread": True}),
    } | {f"plain {number}": network(seed=number) for number in range(MEMBERS)}
    other_draws = {row for rows in fast.draws.values() for row in rows}
    rows = {
        name: plan
        for name, plan in fast.methods.items()
        if set(plan.networks) <= set(networks) and name not in other_draws
    }
    same_views = {"k": 5, "score": "kl_uniform", "views": True}
    rows |= {
        "AMP, no temperature": MethodPlan(AMP, ("anchored",), {"rescale": "none"}),
        "Energy, centred, AMP's views": MethodPlan(TTA, ("plain",), same_views),
        "Energy, centred, AMP's views (made outliers)": MethodPlan(TTA, ("made outliers",), same_views),
    }
    suite = Suite(
        name="cifar10",
        title="CIFAR-10 on two cores, for longer",
        networks=networks,
        methods=rows,
        data=fast.data,
        seeds=setting.seeds,
        comparisons=setting.comparisons,
        protocol=Protocol(("auroc", "fpr95", "aupr_in", "aupr_out", "dtacc")),
        leads=LEADS,
        apart=(NEAR,),
    )
    about = "Every method that needs no training of its own, on narrow twins, for as long as two cores have time."
    return Study("cifar10-longer", "CIFAR-10 on two cores, for longer", about, (suite,))
