"""Architectures of timm, across families: anchored, trained for a step, scored, saved and opened without timm."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import kedge
from kedge.models.graph import StoredGraph

pytest.importorskip("timm")

FAST = """resnet18 tf_mobilenetv3_small_minimal_100 resnetv2_50x1_bit vit_tiny_patch16_224 swin_tiny_patch4_window7_224
    convnext_atto mixer_s32_224 nfnet_l0 efficientformer_l1 maxvit_nano_rw_256""".split()  # noqa: SIM905
SLOW = """resnet50d resnext50_32x4d seresnet50 resnest14d regnety_002 densenet121 vgg11_bn inception_v3 xception41
    mobilenetv2_050 mobilenetv3_small_050 mobilenetv4_conv_small efficientnet_lite0 tf_efficientnet_b0
    tf_efficientnetv2_b0 mnasnet_small ghostnet_100 repvgg_a0 convnextv2_atto dm_nfnet_f0 resnetv2_50
    deit_tiny_patch16_224 deit3_small_patch16_224 beit_base_patch16_224 cait_xxs24_224 xcit_nano_12_p8_224
    swinv2_tiny_window8_256 coatnet_nano_rw_224 efficientformerv2_s0 gmlp_s16_224 resmlp_12_224 poolformer_s12 pvt_v2_b0
    levit_128s mobilevit_xxs fastvit_t8 edgenext_xx_small hrnet_w18_small dla34 rexnet_100 focalnet_tiny_srf
    eva02_tiny_patch14_224 hiera_tiny_224""".split()  # noqa: SIM905


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_an_architecture_is_anchored_trained_scored_saved_and_opened(name: str, tmp_path: Path) -> None:
    net = kedge.network(f"timm:{name}", classes=4)
    shape = net.record["preprocess"]["shape"]
    images = torch.randint(0, 256, (4, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    x = images[:2].float() / 255
    anchored = kedge.anchor(net, example=x)
    anchored.set_anchors(images[2:])
    with torch.no_grad():
        expected, result = net(x), anchored.eval()(x)
    assert float((result - expected).abs().max()) <= 1e-4 * float(expected.abs().max())

    anchored.train()
    F.cross_entropy(anchored(x), torch.tensor([0, 1])).backward()
    gradient = sum(float(p.grad.abs().sum()) for p in anchored.parameters() if p.grad is not None)
    assert 0 < gradient < float("inf")

    detector = kedge.AMP(anchored.eval(), k=2).fit(images)
    detector.save(tmp_path / "a.kedge")
    opened = kedge.load(tmp_path / "a.kedge")
    assert isinstance(opened.net.network, StoredGraph)
    torch.testing.assert_close(opened.score(images[:2]), detector.score(images[:2]), rtol=1e-4, atol=1e-5)
