"""The README's code runs as it stands, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

import kedge
import kedge.data.digits

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_readme_has_code():
    assert len(BLOCKS) >= 2


@pytest.fixture(scope="module")
def some_digits():
    """A fifth of the digits, of all classes alike: the same code in less time."""
    whole = kedge.data.digits.digits()
    return whole.subset(range(0, len(whole), 5))


@pytest.fixture
def elsewhere(some_digits, tmp_path, monkeypatch):
    """A folder to run code in, with fewer digits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kedge.data.digits, "digits", lambda: some_digits)
    return tmp_path


@pytest.mark.parametrize("number", range(len(BLOCKS)))
@pytest.mark.usefixtures("elsewhere")
def test_every_python_block_runs(number):
    code = BLOCKS[number].replace('recipe="demo"', 'recipe=kedge.training.recipe("demo", epochs=1)')
    train_set, held_out = kedge.data.digits.digits().split(0.8)
    net = kedge.Classifier(kedge.models.build("compact", width=4, channels=1), mean=0.1, std=0.3)
    given = {"my_network": net, "train_set": train_set, "held_out": held_out, "images": held_out}
    exec(compile(code, f"README block {number}", "exec"), given)


def test_a_new_user_needs_fewer_than_fifteen_lines():
    protecting = next(block for block in BLOCKS if "kedge.protect(" in block and "is_ood" in block)
    assert len([line for line in protecting.splitlines() if line.strip()]) < 15


def test_the_suite_of_one_s_own_runs(elsewhere):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/suites/README.md").read_text(), flags=re.DOTALL)
    exec(compile(code, "docs/suites/README.md", "exec"), {})
    assert "AMP" in (elsewhere / "runs/digits/tables.md").read_text()


PAGES = ["README.md", "CONTRIBUTING.md", *(str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("docs/**/*.md")))]


@pytest.mark.parametrize("page", PAGES)
def test_every_local_link_leads_to_a_file(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert "://" in target or (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"
