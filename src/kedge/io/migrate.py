"""Files of older versions in the terms of this one: headers, and tensors of anchored layers."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

DETECTOR_NAMES = {"flips_and_crops": "tta", "pixel_statistics": "low_level_statistics"}
DETECTOR_TENSORS = {"detector.settled": "detector.exit_threshold"}
SCORE_NAMES = {"amp": "kl_uniform", "temperature": "tau"}


def migrate(header: dict[str, Any]) -> dict[str, Any]:
    """The header of a saved detector as this version writes it; a header of this version comes back as it is."""
    if header.get("version", 0) > 2:
        return header
    return {
        **header,
        "detector": _detector(**header["detector"]),
        "network": _network(header["network"]),
        "calibration": _calibration(header["calibration"]),
    }


def migrate_tensors(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a saved detector as this version writes them; ``header`` is the file's own, not migrated."""
    if header.get("version", 0) > 2:
        return dict(tensors)
    described = header["network"]
    members = described.get("ensemble")
    networks = {"net.": described} if members is None else {f"net.network.{i}.": m for i, m in enumerate(members)}
    for prefix, network in networks.items():
        if network["anchored"] is not None:
            tensors = split_anchored_layer(tensors, f"{prefix}network.{network['anchored']['layer']}.")
    return {DETECTOR_TENSORS.get(name, name): tensor for name, tensor in tensors.items()}


def split_anchored_layer(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The one layer for [c, x - c] of format 2, under a prefix of names, as the pair of layers of format 3.

    The order is that of the network's parameters: ``layer_x.weight``, ``layer_x.bias`` if any, ``layer_c.weight``.
    """
    result = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    wide = tensors[f"{prefix}weight"]
    half = wide.shape[1] // 2
    result[f"{prefix}layer_x.weight"] = wide[:, half:].contiguous()
    if f"{prefix}bias" in tensors:
        result[f"{prefix}layer_x.bias"] = tensors[f"{prefix}bias"]
    result[f"{prefix}layer_c.weight"] = wide[:, :half].contiguous()
    return result


def _detector(name: str, config: dict[str, Any]) -> dict[str, Any]:
    config = dict(config)
    if config.pop("centred", False):
        name = "kl_uniform"
    if "temperature" in config and name == "amp":
        config["shared_tau"] = config.pop("temperature") == "global"
    if name == "amp" and "views" in config:
        config["tta"] = config.pop("views")
    if name == "amp" and config.get("anchors") == "auto":
        name, config = "early_exit", {**config, "anchors": None, "min_anchors": 2}
    if name == "flips_and_crops":
        config["same_as_amp"] = config.pop("views", False)
    if "score" in config:
        config["score"] = SCORE_NAMES.get(config["score"], config["score"])
    return {"name": DETECTOR_NAMES.get(name, name), "config": config}


def _network(described: dict[str, Any]) -> dict[str, Any]:
    if "ensemble" in described:
        return {**described, "ensemble": [_network(member) for member in described["ensemble"]]}
    if described["anchored"] is None:
        return described
    options = described["anchored"]["options"]
    options = _renamed(options, {"spread": "per_sample", "made": "synthetic_outliers"})
    if isinstance(options.get("corruption"), dict):
        options["corruption"] = _renamed(options["corruption"], {"grey": "gray"})
    return {**described, "anchored": {**described["anchored"], "options": options}}


def _renamed(options: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in options.items()}


def _calibration(old: dict[str, Any] | None) -> dict[str, Any] | None:
    if old is None:
        return None
    rest = dict(old)
    shares = {"alpha": rest.pop("tpr"), "delta": rest.pop("confidence")}
    return rest | {name: None if share is None else round(1 - share, 12) for name, share in shares.items()}
