"""To import before timm: torchvision's wheel needs these operators, which a CPU-only torch does not have."""

import torch

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    try:
        LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except RuntimeError:  # a torchvision that fits its torch has them
        break
