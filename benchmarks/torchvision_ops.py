"""To import before pytorch_ood: torchvision's wheel wants these operators, which a CPU-only torch does not declare."""

import torch

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
