"""A detector at work does less for the same verdicts, with as many threads as there are cores for it."""

import ctypes
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import kedge
from kedge.detectors import for_inference, thread_copies
from kedge.errors import InputError
from kedge.models import build
from kedge.scoring.job import Job, run_here
from kedge.seeds import seeded
from kedge.threads import cores, keep_freed_memory, last_cache, use_threads


def pixels(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, 3, 16, 16), generator=generator, dtype=torch.uint8)


def network(name="compact"):
    """A small network whose norms are not those of a fresh one."""
    with seeded(0):
        net = build(name, width=4)
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.4, 2)
    return net.eval()


def ready(detector):
    return detector.fit(kedge.ImageSet(pixels(20), torch.arange(20) % 10)).calibrate(
        kedge.ImageSet(pixels(60, seed=1), torch.arange(60) % 10)
    )


def norms(net):
    return sum(isinstance(module, nn.BatchNorm2d) for module in net.modules())


MAKERS = {
    "amp": lambda: kedge.AMP(kedge.anchor(network(), init="fresh")),
    "amp with views": lambda: kedge.AMP(kedge.anchor(network(), init="fresh"), variant="recommended"),
    "amp, anchors of each image": lambda: kedge.AMP(kedge.anchor(network(), init="fresh"), variant="authors", pool=9),
    "early exit": lambda: kedge.EarlyExit(kedge.anchor(network(), init="fresh")),
    "energy": lambda: kedge.Energy(network("airbench")),
    "temperature scaling": lambda: kedge.TemperatureScaling(network()),
    "knn": lambda: kedge.KNN(network()),
    "default": lambda: kedge.Combined(network()),
}


@pytest.mark.parametrize("name", MAKERS)
def test_the_verdicts_and_the_file_stay_and_the_norms_go(name, tmp_path):
    detector = ready(MAKERS[name]())
    before = norms(detector.net)
    detector.save(tmp_path / "before.kedge")
    fast = for_inference(detector)
    detector.save(tmp_path / "after.kedge")
    assert (tmp_path / "before.kedge").read_bytes() == (tmp_path / "after.kedge").read_bytes()
    detection, expected = fast(pixels(30, seed=2)), detector(pixels(30, seed=2))
    assert norms(fast.net) == 0 < before == norms(detector.net)
    close = 1e-3 if name == "default" else 1e-5  # distances from few images raise the rounding of the network
    assert torch.allclose(detection.score, expected.score, atol=close)
    assert torch.equal(detection.label, expected.label)
    assert torch.equal(detection.is_ood, expected.is_ood)
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in fast.net.parameters() if p.ndim == 4)


@pytest.mark.parametrize("make", [kedge.ODIN, kedge.Gram])
def test_a_method_that_reads_inside_the_network_or_is_not_fitted_stays_as_it_is(make):
    unfitted, detector = kedge.MSP(network()), ready(make(network()))
    assert for_inference(unfitted) is unfitted
    assert for_inference(detector) is detector
    assert thread_copies(detector, 2) == [detector]


class Reads(nn.Module):
    """A network that uses the weight of a layer beside the layer itself."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Linear(4, 10)
        self.norm.running_var.fill_(9.0)

    def forward(self, x):
        return self.fc((self.norm(self.conv(x)) + self.conv.weight.sum()).mean(dim=(2, 3)))


def test_a_network_that_folding_would_change_stays_as_it_is():
    detector = ready(kedge.MSP(Reads().eval()))
    assert for_inference(detector) is detector


def test_files_are_scored_by_the_faster_one(tmp_path, monkeypatch):
    ready(MAKERS["amp"]()).save(tmp_path / "a.kedge")
    used = []

    def score_parts(job, detector, numbered):
        used.append(detector)
        yield from ()

    monkeypatch.setattr("kedge.scoring.job.score_parts", score_parts)
    run_here(Job(tmp_path / "a.kedge", (), tmp_path / "out.csv", "csv"), [], lambda done, total: None)
    assert norms(used[0].net) == 0


def test_so_is_what_is_served():
    serving = pytest.importorskip("kedge.serving")
    detector = ready(MAKERS["amp"]())
    assert norms(serving.create_app(detector).state.service.detector.net) == 0 < norms(detector.net)


# --- threads --------------------------------------------------------------------------------------------------------


def test_cores_are_those_that_a_container_leaves(monkeypatch, tmp_path):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert cores(tmp_path) == 8
    (tmp_path / "cpu").mkdir()
    for quota, expected in (("-1", 8), ("300000", 3)):  # version 1 of control groups
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota + "\n")
        (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
        assert cores(tmp_path) == expected
    for text, expected in (("max", 8), ("150000", 2), ("10000", 1), ("6400000", 8), ("not what it was", 8)):
        (tmp_path / "cpu.max").write_text(f"{text} 100000\n")
        assert cores(tmp_path) == expected


def test_the_last_cache_is_the_largest_that_linux_lists(tmp_path):
    for number, size in enumerate(("32K", "32K", "1024K", "32768K")):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(size + "\n")
    assert last_cache(tmp_path) == 2**25
    (tmp_path / "index3" / "size").write_text("a lot\n")
    assert last_cache(tmp_path) is None


def test_threads_are_no_more_than_cores_unless_set(monkeypatch):
    threads = [6]  # what torch is set to, without setting it
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr("kedge.threads.cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert use_threads() == 4
    assert use_threads(9) == 9
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    threads.append(6)
    assert use_threads() == 6
    with pytest.raises(InputError, match="threads must be"):
        use_threads(0)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="only for glibc")
def test_freed_memory_is_kept_unless_the_environment_says_otherwise(monkeypatch):
    calls = []
    libc = SimpleNamespace(gnu_get_libc_version=None, mallopt=lambda *values: calls.append(values) or 1)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    assert keep_freed_memory()
    assert calls == [(-3, 2**30), (-1, 2**31 - 1)]
    libc.mallopt = lambda option, value: value <= 2**25  # an old glibc, which refuses the trim threshold here
    assert not keep_freed_memory()
    calls.clear()
    for name, value in (("MALLOC_TRIM_THRESHOLD_", "0"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            assert not keep_freed_memory()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())  # musl
    assert not keep_freed_memory()
    assert calls == []


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="only for glibc")
def test_memory_that_is_kept_needs_no_new_pages():
    """In a process of its own, since the setting lasts as long as the process."""
    program = """if True:
        import resource, sys
        from kedge.threads import keep_freed_memory
        if sys.argv[1] == "keep":
            assert keep_freed_memory()
        totals, faults = [], []
        for _ in range(16):
            totals.append(len(b"1" * (64 << 20)))
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        print(sum(totals), faults[-1] - faults[7])
    """
    lines = [
        subprocess.run([sys.executable, "-c", program, how], capture_output=True, text=True, check=True).stdout.split()
        for how in ("keep", "return")
    ]
    assert lines[0][0] == lines[1][0] == str(1 << 30)
    assert int(lines[0][1]) < int(lines[1][1]) / 2


@pytest.mark.parametrize("name", ["amp", "early exit", "energy", "default"])
def test_thread_copies_share_weights_and_nothing_that_a_pass_writes(name):
    detector = for_inference(ready(MAKERS[name]()))
    first, second = thread_copies(detector, 2)
    assert first is detector
    held = [[*one.net.parameters(), *one.net.buffers()] for one in (first, second)]
    assert all(one is other for one, other in zip(*held, strict=True))
    ours, theirs = (set(map(id, one.net.modules())) for one in (first, second))
    assert not ours & theirs
    images = pixels(40, seed=3)
    expected = detector(images).score
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            results = pool.map(lambda one: one(images, batch_size=7).score, (first, second))
            assert all(torch.allclose(score, expected, atol=1e-3) for score in results)
