"""Detectors on the hub: what is pushed comes back; here the hub is a folder."""

import inspect
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

import kedge
from helpers import flat, images, network, small_amp
from kedge import hub
from kedge.errors import FileFormatError, InputError, NotReadyError


@pytest.fixture(scope="module")
def detector():
    detector = small_amp(side=8)
    detector.classes = ("ant", "bee | wasp", "cow\n\x1box")
    return detector.calibrate(images(30), alpha=0.1)


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """huggingface_hub with repositories in a folder."""
    calls = []

    class HfApi:
        def __init__(self, token=None, library_name=None, library_version=None):
            self.token = token

        def create_repo(self, repo_id, *, private, exist_ok):
            assert exist_ok
            calls.append(("create", repo_id, private, self.token))
            (tmp_path / repo_id).mkdir(parents=True, exist_ok=True)
            return f"hub/{repo_id}"

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            shutil.copytree(folder_path, tmp_path / repo_id, dirs_exist_ok=True)

        def hf_hub_download(self, *, repo_id, filename, revision):
            calls.append(("download", repo_id, revision, self.token))
            path = tmp_path / repo_id / filename
            if not path.exists():
                raise RuntimeError(f"404: {repo_id}\nand much more")
            return str(path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=HfApi))
    return SimpleNamespace(folder=tmp_path, calls=calls)


def test_the_stub_has_the_parameters_of_the_real_hub():
    api = pytest.importorskip("huggingface_hub").HfApi
    for call, needed in (
        (api, {"token", "library_name", "library_version"}),
        (api.create_repo, {"repo_id", "private", "exist_ok"}),
        (api.upload_folder, {"repo_id", "folder_path", "commit_message"}),
        (api.hf_hub_download, {"repo_id", "filename", "revision"}),
    ):
        assert needed <= set(inspect.signature(call).parameters)


def same(one, other):
    a, b = one(images(9)), other(images(9))
    return torch.equal(a.score, b.score) and torch.equal(a.is_ood, b.is_ood) and one.classes == other.classes


@pytest.mark.parametrize("name", ["me/insects", "hf://me/insects"])
def test_what_is_pushed_comes_back(detector, remote, name):
    assert kedge.push_to_hub(detector, name, token="secret", private=True) == "hub/me/insects"
    assert same(kedge.from_pretrained(name, revision="v1", token="other"), detector)
    assert remote.calls == [("create", "me/insects", True, "secret"), ("download", "me/insects", "v1", "other")]
    pushed = remote.folder / "me" / "insects"
    assert sorted(path.name for path in pushed.iterdir()) == ["README.md", "detector.kedge"]
    assert not any(b"secret" in path.read_bytes() for path in pushed.iterdir())


def test_the_card_describes_the_detector(detector, remote, tmp_path):
    kedge.push_to_hub(detector, "me/insects")
    card = (remote.folder / "me/insects/README.md").read_text()
    head, _, body = card.removeprefix("---\n").partition("---\n")
    assert {"library_name: kedge", "pipeline_tag: image-classification"} <= set(head.splitlines())
    for words in (
        "# insects\n",
        'kedge.from_pretrained("me/insects")',
        "| method | amp |",
        "| input | 3 x 8 x 8 |",
        r"| classes | ant, bee \| wasp, cow ox |",
        "at most 10 %, on average over draws of the 30 calibration images",
    ):
        assert words in body
    assert "None" not in body
    strict = kedge.MSP(network(classes=3)).fit(images()).calibrate(images(40, seed=1), alpha=0.2, delta=0.1)
    hub.save_pretrained(strict, tmp_path)
    assert "at most 20 %, for all but 10 % of the draws" in (tmp_path / "README.md").read_text()
    hub.save_pretrained(kedge.MSP(flat()).fit(images()), tmp_path, repo_id="me/flat")
    foreign = (tmp_path / "README.md").read_text()
    assert 'from_pretrained("me/flat", model=network)' in foreign
    assert "no threshold yet" in foreign


def test_a_folder_and_a_file_need_no_hub(detector, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "_api", lambda *_: pytest.fail("the hub was used"))
    hub.save_pretrained(detector, tmp_path / "kept")
    for given in (tmp_path / "kept", str(tmp_path / "kept"), tmp_path / "kept" / "detector.kedge"):
        assert same(kedge.from_pretrained(given), detector)
    with pytest.raises(InputError, match=r"must hold detector\.kedge"):
        kedge.from_pretrained(tmp_path)
    with pytest.raises(InputError, match="revision"):
        kedge.from_pretrained(tmp_path / "kept", revision="main")
    for wrong in ("nowhere", "a/b/c", "hf://", "runs/detector.kedge", "a b/c", "../x/y", "./x", "../x", "x/.."):
        with pytest.raises(InputError, match="as owner/name"):
            kedge.from_pretrained(wrong)
    with pytest.raises(InputError, match="as owner/name"):
        kedge.push_to_hub(detector, "name")
    with pytest.raises(InputError, match="as owner/name"):
        hub.save_pretrained(detector, tmp_path / "new", repo_id='a/b")\nimport os')
    assert not (tmp_path / "new").exists()


def test_a_network_that_is_not_kedge_s_own_is_passed_again(remote):
    detector = kedge.MSP(flat()).fit(images()).calibrate(images(seed=1))
    kedge.push_to_hub(detector, "me/flat")
    assert same(kedge.from_pretrained("me/flat", model=flat(seed=5)), detector)


def test_what_goes_wrong_on_the_hub_is_one_line(detector, remote, monkeypatch):
    with pytest.raises(NotReadyError, match=r"^me/none could not be read from the hub: 404: me/none$"):
        kedge.from_pretrained("me/none")
    (remote.folder / "me/broken").mkdir(parents=True)
    (remote.folder / "me/broken/detector.kedge").write_bytes(b"no detector")
    with pytest.raises(FileFormatError, match="is not a kedge file"):
        kedge.from_pretrained("me/broken")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for call in (lambda: kedge.push_to_hub(detector, "me/x"), lambda: kedge.from_pretrained("me/x")):
        with pytest.raises(NotReadyError, match=r"pip install 'kedge\[hub\]'"):
            call()
