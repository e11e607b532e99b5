"""The README's code runs as it stands, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_readme_has_code():
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_python_block_runs(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = BLOCKS[number].replace('recipe="demo"', 'recipe=kedge.training.recipe("demo", epochs=1)')
    exec(compile(code, f"README block {number}", "exec"), {})


def test_a_new_user_needs_fewer_than_fifteen_lines():
    own_loop = next(block for block in BLOCKS if "backward()" in block and "is_ood" in block and "for x, y" in block)
    assert len([line for line in own_loop.splitlines() if line.strip()]) < 15


def test_the_suite_of_one_s_own_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/suites/README.md").read_text(), flags=re.DOTALL)
    exec(compile(code, "docs/suites/README.md", "exec"), {})
    assert "AMP" in (tmp_path / "runs/digits/tables.md").read_text()


PAGES = ["README.md", "CONTRIBUTING.md", *(str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("docs/**/*.md")))]


@pytest.mark.parametrize("page", PAGES)
def test_every_local_link_leads_to_a_file(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert "://" in target or (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"
