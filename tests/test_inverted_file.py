"""The index of large banks: NumPy's brute force and the share of neighbours that it finds are the oracles."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

import kedge
from kedge.detectors import bank as bank_module
from kedge.detectors import inverted_file
from kedge.detectors.bank import BankDetector, sample_rows
from kedge.errors import FileFormatError, InputError
from kedge.export.graph import check_exportable
from kedge.io import artifact

D, K = 24, 5
METHODS = {"knn": kedge.KNN, "nnguide": kedge.NNGuide}


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """A projection to fewer dimensions than the vectors of these tests have."""
    monkeypatch.setattr(inverted_file, "WIDTH", 12)


def points(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Points around 40 centres, within each mostly in few directions; the same centres for each seed."""
    fixed, draw = torch.Generator().manual_seed(99), torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(40, D, generator=fixed)
    spread = torch.randn(6, D, generator=fixed)
    labels = torch.randint(40, (count,), generator=draw)
    within = 0.5 * torch.randn(count, 6, generator=draw) @ spread
    return (centres[labels] + within + 0.05 * torch.randn(count, D, generator=draw)).to(dtype)


def identity(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A network whose features are its inputs."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Identity(), nn.Linear(D, 3, dtype=dtype))


def brute_force(detector, train: torch.Tensor, x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The scores by their definitions, and the numbers of the nearest rows of each query, in double precision."""
    weight, bias = (p.detach().double().numpy() for p in detector.net.network[1].parameters())

    def read(z: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        z = z.double().numpy()
        return z / np.linalg.norm(z, axis=1, keepdims=True), np.log(np.exp(z @ weight.T + bias).sum(axis=1))

    (rows, energies), (queries, own) = read(train), read(x)
    if isinstance(detector, kedge.KNN):
        distances = np.sqrt(((queries[:, None] - rows) ** 2).sum(axis=2))
        return np.sort(distances, axis=1)[:, K - 1], np.argsort(distances, axis=1)[:, :K]
    products = queries @ rows.T * energies
    return -own * np.sort(products, axis=1)[:, -K:].mean(axis=1), np.argsort(-products, axis=1)[:, :K]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_finds_the_neighbours_of_brute_force(method, dtype):
    """At least 99 % of those of new points, and the scores of points whose neighbours are all found are exact."""
    train, x = points(3000, dtype=dtype), points(100, seed=1, dtype=dtype)
    detector = METHODS[method](identity(dtype), k=K, index="ivf").fit(train)
    scores, numbers = brute_force(detector, train, x)
    assert detector.probes < len(detector.inverted_file.centres) / 2  # it reads less than all
    queries = normalize(x, dim=1)
    found = [
        np.isin(own, detector.inverted_file.candidates(q).numpy()) for own, q in zip(numbers, queries, strict=True)
    ]
    assert detector.recall >= 0.99
    assert np.mean(found) >= 0.98
    whole = np.all(found, axis=1)
    assert whole.mean() > 0.9
    tolerance = 1e-5 if dtype == torch.float32 else 1e-9
    assert detector.score(x).numpy()[whole] == pytest.approx(scores[whole], rel=tolerance, abs=tolerance)
    if method == "knn":  # what is missed can only make the neighbour seem further away
        assert np.all(detector.score(x).numpy() >= scores - 1e-6)


def test_the_recall_is_that_of_rows_of_the_bank_without_themselves():
    train = points(1500)
    detector = kedge.KNN(identity(), k=K, index="ivf", probes=2).fit(train)
    bank = detector.bank.double().numpy()
    order = torch.randperm(1500, generator=torch.Generator().manual_seed(0))
    shares = []
    for row in order[: inverted_file.TESTED].tolist():
        distances = ((bank - bank[row]) ** 2).sum(axis=1)
        distances[row] = np.inf
        candidates = detector.inverted_file.candidates(detector.bank[row]).numpy()
        shares.append(np.isin(np.argsort(distances)[:K], candidates).mean())
    assert detector.probes == 2
    assert detector.recall < 0.99
    assert detector.recall <= np.mean(shares) + 1e-9
    assert detector.recall == pytest.approx(np.mean(shares), abs=0.03)  # rows of other cells compete for no places


@pytest.mark.parametrize("method", METHODS)
def test_scores_do_not_depend_on_the_batch(method):
    detector = METHODS[method](identity(), k=K, index="ivf").fit(points(1500))
    x, logits = points(40, seed=1), torch.linspace(0, 3, 120).view(40, 3)  # a network's own may differ by rounding
    whole = detector.of_features(logits, x).score
    for size in (1, 7):
        parts = [detector.of_features(*part).score for part in zip(logits.split(size), x.split(size), strict=True)]
        assert torch.cat(parts).equal(whole)
    again = METHODS[method](identity(), k=K, index="ivf").fit(points(1500))
    assert again.of_features(logits, x).score.equal(whole)


@pytest.mark.parametrize("method", METHODS)
def test_small_banks_are_compared_exactly(method, monkeypatch):
    assert BankDetector.INDEXED == 50_000
    monkeypatch.setattr(BankDetector, "INDEXED", 1000)
    x = points(20, seed=1)
    for count, indexed in ((999, False), (1000, True)):
        detector = METHODS[method](identity(), k=K).fit(points(count))
        exact = METHODS[method](identity(), k=K, index="exact").fit(points(count))
        assert (detector.inverted_file is not None) is indexed
        assert (exact.inverted_file, exact.probes, exact.recall) == (None, None, 1)
        assert indexed or detector.score(x).equal(exact.score(x))
        assert exact.score(x).numpy() == pytest.approx(brute_force(exact, points(count), x)[0], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("count", [5, 6, 7, 40])
@pytest.mark.parametrize("method", METHODS)
def test_an_index_of_few_rows_is_exact(method, count):
    detector = METHODS[method](identity(), k=K, index="ivf", probes=1).fit(points(count))
    assert 0 <= detector.recall <= 1
    assert detector.score(points(3, seed=1)).isfinite().all()
    if count == K:
        exact = METHODS[method](identity(), k=K, index="exact").fit(points(count))
        assert detector.score(points(3, seed=1)).allclose(exact.score(points(3, seed=1)))


def test_equal_rows_and_features_without_a_direction():
    train = torch.cat([torch.zeros(50, D), torch.ones(900, D), points(50)])
    detector = kedge.KNN(identity(), k=K, index="ivf").fit(train)
    scores = detector.score(torch.stack([torch.zeros(D), torch.ones(D)]))
    assert scores.tolist() == pytest.approx([0, 0], abs=1e-6)


# Files.


@pytest.mark.parametrize("method", METHODS)
def test_a_saved_index_gives_the_same_scores(method, tmp_path):
    detector = METHODS[method](identity(), k=K, index="ivf").fit(points(1500)).calibrate(points(60, seed=2))
    detector.save(tmp_path / "a.kedge")
    again, x = kedge.load(tmp_path / "a.kedge"), points(20, seed=1)
    assert (again.probes, again.recall) == (detector.probes, detector.recall)
    assert again(x).score.equal(detector(x).score)
    assert repr(again.inverted_file) == repr(detector.inverted_file)


def rewritten(path, **changed):
    """A file's content, with some tensors changed or, where None, left out."""
    header, tensors = artifact.read(path)
    header = {key: value for key, value in header.items() if key not in ("sha256", "packed", "version")}
    for name, value in changed.items():
        tensors.pop(f"detector.index.{name}")
        tensors |= {} if value is None else {f"detector.index.{name}": value}
    return header, tensors


def test_files_from_before_there_was_an_index_are_compared_exactly(tmp_path, monkeypatch):
    monkeypatch.setattr(BankDetector, "INDEXED", 1000)
    detector = kedge.KNN(identity(), k=K).fit(points(1500))
    detector.save(tmp_path / "new.kedge")
    header, tensors = rewritten(tmp_path / "new.kedge")
    config = header["detector"]["config"]
    assert config.pop("index") == "auto"
    assert config.pop("probes") is None
    tensors = {name: value for name, value in tensors.items() if ".index." not in name}
    artifact.write(tmp_path / "old.kedge", header, tensors)
    old, x = kedge.load(tmp_path / "old.kedge"), points(20, seed=1)
    assert old.inverted_file is None
    assert old.score(x).equal(kedge.KNN(identity(), k=K, index="exact").fit(points(1500)).score(x))


def test_a_damaged_index_is_refused(tmp_path):
    detector = kedge.KNN(identity(), k=K, index="ivf").fit(points(1500))
    path = tmp_path / "a.kedge"
    detector.save(path)
    state = detector.inverted_file.state()
    damages = {
        "order": state["order"].clone().index_fill_(0, torch.tensor([3]), 1500),
        "starts": state["starts"].flip(0),
        "rows": state["rows"][:-1],
        "probes": torch.tensor(0.0, dtype=torch.float64),
        "centres": None,
    }
    for name, value in damages.items():
        artifact.write(tmp_path / "b.kedge", *rewritten(path, **{name: value}))
        with pytest.raises(FileFormatError, match="index" if value is not None else name):
            kedge.load(tmp_path / "b.kedge")
    artifact.write(tmp_path / "b.kedge", *rewritten(path, **dict.fromkeys(state)))
    with pytest.raises(FileFormatError, match="index must be in the file"):
        kedge.load(tmp_path / "b.kedge")


def test_an_index_is_not_exported():
    net = identity()
    detector = kedge.KNN(net, k=K, index="ivf").fit(points(300))
    with pytest.raises(InputError, match='index="exact"'):
        check_exportable(detector)
    with pytest.raises(InputError, match='index="exact"'):
        check_exportable(kedge.Combined([detector, kedge.MSP(detector.net)]))


# Options and memory.


def test_options_are_checked():
    with pytest.raises(InputError, match="index"):
        kedge.KNN(identity(), index="faiss")
    with pytest.raises(InputError, match="probes"):
        kedge.NNGuide(identity(), probes=0)


def test_rows_are_joined_without_a_second_copy(monkeypatch):
    whole = points(500)
    monkeypatch.setattr(bank_module, "JOINED", 100 * D * 4)
    for size in (1, 30, 100, 500):
        assert sample_rows(iter(whole.split(size)), None, 0).equal(whole)
