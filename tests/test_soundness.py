"""Every post-hoc method on networks of all kinds: few and many classes, narrow and wide features, transformers."""

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.detectors.registry import make, post_hoc
from kedge.errors import ArchitectureError, InputError
from kedge.seeds import seeded

SIDE = 8
CONSTANT = frozenset({"cop", "knn", "gram"})  # of one feature behind a ReLU, whose direction is always the same


def images(n: int, classes: int, seed: int) -> kedge.ImageSet:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (n, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator)
    return kedge.ImageSet(pixels, torch.arange(n) % classes, name=f"images {seed}")


def fitted(name: str, net: kedge.Classifier, train: kedge.ImageSet) -> kedge.detectors.Detector:
    classes = int(train.labels.max()) + 1
    return make(name, net).fit(train).calibrate(images(80, classes, seed=1))


def check(net: kedge.Classifier, train: kedge.ImageSet, *, constant: frozenset[str] = frozenset()) -> set[str]:
    """Methods that this network cannot have, after scores of all others were seen to be finite and to differ."""
    refused = set()
    for name in post_hoc(unanchored=not isinstance(net, kedge.Anchored)):
        try:
            score = fitted(name, net, train).score(images(6, 2, seed=2))
        except (ArchitectureError, InputError):
            refused.add(name)
            continue
        assert score.isfinite().all(), name
        assert len(score.unique()) > 1 or name in constant, name
    return refused


@pytest.mark.parametrize(
    ("classes", "width", "count"),
    [(2, 1, 24), (2, 96, 24), (3, 16, 60), pytest.param(1000, 24, 1100, marks=pytest.mark.slow)],
)
def test_any_number_of_classes_and_any_width_also_of_more_features_than_images(classes, width, count):
    with seeded(0):
        net = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE**2, width), nn.ReLU(), nn.Linear(width, classes))
    net[1].bias.data += 0.5
    net[3].bias.data += 1  # ViM needs logits that are positive on average
    net = kedge.Classifier(net, mean=0.5, std=0.3)
    constant = CONSTANT if width == 1 else frozenset()
    assert check(net, images(count, classes, seed=0), constant=constant) == {"rankfeat"}


class Transformer(nn.Module):
    """A small vision transformer whose head reads the class token or the mean of all tokens."""

    def __init__(self, pool: str) -> None:
        super().__init__()
        self.pool = pool
        self.patches = nn.Conv2d(3, 16, 2, stride=2)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0] if self.pool == "token" else x.mean(dim=1)))


@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("pool", ["token", "mean"])
def test_transformers_that_read_a_class_token_or_pool_all_tokens(pool, anchored):
    with seeded(0):
        net = Transformer(pool).eval()
    net.head.bias.data += 3
    x = torch.rand(2, 3, SIDE, SIDE)
    net = kedge.anchor(net, mean=0.5, std=0.3, example=x) if anchored else kedge.Classifier(net, mean=0.5, std=0.3)
    assert check(net.eval(), images(30, 3, seed=0)) == set()
