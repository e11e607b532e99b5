"""CIFAR-10 for longer: narrow networks, trained for eight times the epochs of cifar10-fast."""

from functools import partial

from kedge.detectors import AMP, TTA
from kedge.studies.cifar10_fast import METRICS, NEAR, PER_SAMPLE, cifar10_fast, small_network, small_recipe
from kedge.studies.insight import BUDGETS, NARROW
from kedge.studies.plan import MethodPlan
from kedge.studies.study import Setting, Study
from kedge.training.losses import SyntheticOutliers

LEADS = ("AMP, recommended", "AMP, tau mean, TTA, 6 views")


def cifar10_longer(setting: Setting) -> Study:
    """The longest budget of `insight`, with and without synthetic outliers, on the sets of cifar10-fast."""
    (fast,) = cifar10_fast(setting).suites
    width = {} if setting.scale == "smoke" else {"arguments": {"width": NARROW}}
    network = partial(small_network, setting, small_recipe(setting, BUDGETS[-1]), **width)
    networks = {
        "unanchored": network(),
        "anchored": network(**PER_SAMPLE),
        "synthetic outliers": network(loss=SyntheticOutliers()),
        "anchored, synthetic outliers": network(loss=SyntheticOutliers(), **PER_SAMPLE),
        **{name: network(seed=plan.seed) for name, plan in fast.networks.items() if plan.seed is not None},
    }
    other_draws = {row for rows in fast.draws.values() for row in rows}
    rows = {
        label: plan
        for label, plan in fast.methods.items()
        if set(plan.networks) <= set(networks) and label not in other_draws
    }
    same_views = {"k": 5, "score": "kl_uniform", "same_as_amp": True}
    rows |= {
        "AMP, no tau": MethodPlan(AMP, ("anchored",), {"rescale": "none"}),
        "KL to uniform, TTA as in AMP": MethodPlan(TTA, ("unanchored",), same_views),
        "KL to uniform, TTA as in AMP (synthetic outliers)": MethodPlan(TTA, ("synthetic outliers",), same_views),
    }
    suite = setting.suite(
        "cifar10",
        "CIFAR-10 on two cores, for longer",
        networks=networks,
        methods=rows,
        data=fast.data,
        protocol=METRICS,
        leads=LEADS,
        apart=(NEAR,),
    )
    about = "Every method that needs no training of its own, on narrow networks, for 32 epochs."
    return Study("cifar10-longer", "CIFAR-10 on two cores, for longer", about, (suite,))
