"""Comparisons over seeds: the t-test against SciPy's, Holm's correction against its definition."""

import itertools

import numpy as np
import pytest
from scipy import stats

from kedge.errors import InputError
from kedge.evaluation.summary import SeedValues
from kedge.studies.judged import corrected, holm, paired_p_value


@pytest.mark.parametrize("n", range(2, 12))
def test_the_p_value_is_that_of_the_paired_t_test(n):
    one, two = np.random.default_rng(n).normal((0.3, 0), 1, (n, 2)).T
    assert paired_p_value(list(one - two)) == pytest.approx(stats.ttest_rel(one, two).pvalue)


def test_equal_differences_have_no_deviation():
    assert paired_p_value([0.0, 0.0, 0.0]) == 1
    assert paired_p_value([0.5, 0.5]) == 0
    with pytest.raises(InputError, match="at least two"):
        paired_p_value([0.5])


def test_an_adjusted_p_value_is_the_smallest_level_at_which_holm_rejects():
    p = [0.012, 0.3, 0.012, 0.004, 0.02]

    def rejected(level):
        order = np.argsort(p, kind="stable")
        passed = itertools.takewhile(lambda rank: p[order[rank]] <= level / (len(p) - rank), range(len(p)))
        return {int(order[rank]) for rank in passed}

    for place, adjusted in enumerate(holm(p)):
        assert place in rejected(adjusted + 1e-12)
        assert place not in rejected(adjusted - 1e-9)


def test_a_table_corrects_over_its_rows():
    a, b = SeedValues((0.9, 0.91, 0.92)), SeedValues((0.8, 0.82, 0.81))
    table = corrected({("A", "B"): (a, b), ("A", "A"): (a, a)}, "AUROC")
    p = 2 * stats.ttest_rel(a.values, b.values).pvalue
    assert table.rows == (("A", "B", "+10.0", f"{p:.3f}", "yes"), ("A", "A", "+0.0", "1.000", "no"))
    assert "over 3 seeds, corrected by Holm over the 2 comparisons" in table.caption
