"""Detectors on the hub: what is pushed comes back; here the hub is a folder."""

import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import kedge
from kedge import hub
from kedge.errors import FileFormatError, InputError, NotReadyError
from kedge.models import build
from kedge.seeds import seeded

IMAGES = torch.rand(60, 3, 8, 8, generator=torch.Generator().manual_seed(0))
CLASSES = ("ant", "bee | wasp", "cow\nox")


@pytest.fixture(scope="module")
def detector():
    with seeded(0):
        net = kedge.anchor(build("compact", width=4, classes=3), init="fresh", seed=0)
    train = kedge.ImageSet((255 * IMAGES[:30]).byte(), torch.arange(30) % 3, "insects", CLASSES)
    return kedge.AMP(net).fit(train).calibrate(IMAGES[30:], alpha=0.1)


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """huggingface_hub with repositories in a folder."""
    asked = []

    class HfApi:
        def __init__(self, token=None, library_name=None, library_version=None):
            self.token = token

        def create_repo(self, repo_id, *, private, exist_ok):
            assert exist_ok
            asked.append(("create", repo_id, private, self.token))
            (tmp_path / repo_id).mkdir(parents=True, exist_ok=True)
            return f"hub/{repo_id}"

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            shutil.copytree(folder_path, tmp_path / repo_id, dirs_exist_ok=True)

        def hf_hub_download(self, *, repo_id, filename, revision):
            asked.append(("download", repo_id, revision, self.token))
            path = tmp_path / repo_id / filename
            if not path.exists():
                raise RuntimeError(f"404: {repo_id}\nand much more")
            return str(path)

    found = SimpleNamespace(HfApi=HfApi)
    monkeypatch.setitem(sys.modules, "huggingface_hub", found)
    return SimpleNamespace(folder=tmp_path, asked=asked)


def same(one, other):
    a, b = one(IMAGES[:9]), other(IMAGES[:9])
    return torch.equal(a.score, b.score) and torch.equal(a.is_ood, b.is_ood) and one.classes == other.classes


@pytest.mark.parametrize("name", ["me/insects", "hf://me/insects"])
def test_what_is_pushed_comes_back(detector, remote, name):
    assert kedge.push_to_hub(detector, name, token="secret", private=True) == "hub/me/insects"
    assert same(kedge.from_pretrained(name, revision="v1", token="other"), detector)
    assert remote.asked == [("create", "me/insects", True, "secret"), ("download", "me/insects", "v1", "other")]
    pushed = remote.folder / "me" / "insects"
    assert sorted(path.name for path in pushed.iterdir()) == ["README.md", "detector.kedge"]
    assert not any(b"secret" in path.read_bytes() for path in pushed.iterdir())


def test_the_card_tells_what_the_detector_is(detector, remote):
    kedge.push_to_hub(detector, "me/insects")
    card = (remote.folder / "me/insects/README.md").read_text()
    head, _, body = card.removeprefix("---\n").partition("---\n")
    assert "library_name: kedge" in head
    assert "pipeline_tag: image-classification" in head
    assert body.strip().startswith("# insects")
    assert 'kedge.from_pretrained("me/insects")' in body
    assert "| method | amp |" in body
    assert "| input | 3 x 8 x 8 |" in body
    assert r"| classes | ant, bee \| wasp, cow ox |" in body
    assert "at most 10 %, on average over draws of the 30 images" in body
    assert "None" not in body


def test_the_card_of_a_network_that_is_not_kedge_s_own_says_that_it_is_needed(tmp_path):
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    hub.save_pretrained(kedge.MSP(net).fit(IMAGES[:9]), tmp_path, repo_id="me/flat")
    card = (tmp_path / "README.md").read_text()
    assert 'from_pretrained("me/flat", model=network)' in card
    assert "no threshold yet" in card


def test_a_folder_and_a_file_need_no_hub(detector, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "_hub", lambda: pytest.fail("the hub was asked"))
    hub.save_pretrained(detector, tmp_path / "kept")
    for given in (tmp_path / "kept", str(tmp_path / "kept"), tmp_path / "kept" / "detector.kedge"):
        assert same(kedge.from_pretrained(given), detector)
    with pytest.raises(InputError, match=r"name_or_folder must hold detector\.kedge"):
        kedge.from_pretrained(tmp_path)
    with pytest.raises(InputError, match="revision is of repositories on the hub"):
        kedge.from_pretrained(tmp_path / "kept", revision="main")
    for wrong in ("nowhere", "a/b/c", "hf://", "runs/detector.kedge", "a b/c", "../x/y"):
        with pytest.raises(InputError, match="a detector must be a repository of the hub as owner/name"):
            kedge.from_pretrained(wrong)


def test_a_network_that_is_not_kedge_s_own_is_given_again(remote):
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    detector = kedge.MSP(net).fit(IMAGES[:9]).calibrate(IMAGES)
    kedge.push_to_hub(detector, "me/flat")
    fresh = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    assert same(kedge.from_pretrained("me/flat", model=fresh), detector)


def test_what_goes_wrong_on_the_hub_is_told_in_one_line(detector, remote):
    with pytest.raises(NotReadyError, match=r"^me/none could not be read from the hub: 404: me/none$"):
        kedge.from_pretrained("me/none")
    (remote.folder / "me/broken").mkdir(parents=True)
    (remote.folder / "me/broken/detector.kedge").write_bytes(b"no detector")
    with pytest.raises(FileFormatError, match="is truncated or is not a kedge file"):
        kedge.from_pretrained("me/broken")
    with pytest.raises(InputError, match="as owner/name"):
        kedge.push_to_hub(detector, "name")


def test_without_the_library_the_error_names_the_extra(detector, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for call in (lambda: kedge.push_to_hub(detector, "me/x"), lambda: kedge.from_pretrained("me/x")):
        with pytest.raises(NotReadyError, match=r"pip install 'kedge\[hub\]'"):
            call()


def test_the_library_has_what_is_asked_of_it():
    """The stub above must not drift from the real one."""
    import inspect

    api = pytest.importorskip("huggingface_hub").HfApi
    for call, needed in (
        (api, {"token", "library_name", "library_version"}),
        (api.create_repo, {"repo_id", "private", "exist_ok"}),
        (api.upload_folder, {"repo_id", "folder_path", "commit_message"}),
        (api.hf_hub_download, {"repo_id", "filename", "revision"}),
    ):
        assert needed <= set(inspect.signature(call).parameters)
