"""Headers of older files, in the words of this version."""

from typing import Any

DETECTOR_NAMES = {"flips_and_crops": "tta", "pixel_statistics": "low_level_statistics"}
SCORE_NAMES = {"amp": "kl_uniform", "temperature": "tau"}


def migrate(header: dict[str, Any]) -> dict[str, Any]:
    """The header of a saved detector as this version writes it; a header of this version comes back as it is.

    Example:
        >>> old = {"detector": {"name": "energy", "config": {"centred": True}}, "network": {"anchored": None}}
        >>> migrate(old | {"calibration": None})["detector"]["name"]
        'kl_uniform'
    """
    if header.get("version", 0) > 2:
        return header
    return {
        **header,
        "detector": _detector(**header["detector"]),
        "network": _network(header["network"]),
        "calibration": _calibration(header["calibration"]),
    }


def _detector(name: str, config: dict[str, Any]) -> dict[str, Any]:
    config = dict(config)
    if config.pop("centred", False):
        name = "kl_uniform"
    if "temperature" in config and name == "amp":
        config["shared_tau"] = config.pop("temperature") == "global"
    if name == "amp" and "views" in config:
        config["tta"] = config.pop("views")
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
    options = dict(described["anchored"]["options"])
    for old, new in {"spread": "per_sample", "made": "synthetic_outliers"}.items():
        if old in options:
            options[new] = options.pop(old)
    if isinstance(options.get("corruption"), dict) and "grey" in options["corruption"]:
        options["corruption"] = {**options["corruption"], "gray": options["corruption"]["grey"]}
        del options["corruption"]["grey"]
    return {**described, "anchored": {**described["anchored"], "options": options}}


def _calibration(known: dict[str, Any] | None) -> dict[str, Any] | None:
    if known is None:
        return None
    known = dict(known)
    tpr, confidence = known.pop("tpr"), known.pop("confidence")
    return known | {"alpha": _rest(tpr), "delta": None if confidence is None else _rest(confidence)}


def _rest(share: float) -> float:
    """1 - share, as a person would write it: 0.05 of 0.95."""
    return round(1 - share, 12)
