"""Tell draft heads by their config.json and the names of their tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fsd_infer.heads.config import EagleConfig
from fsd_infer.heads.stored_parts import D2T, our_name

OURS, OLD, EAGLE, EAGLE_3 = "fsd", "fsd-eagle-head", "EAGLE-1/2", "EAGLE-3"
EAGLES = (OURS, OLD, EAGLE, EAGLE_3)  # kinds that :class:`.EagleHead` reads
BLOCK, P_EAGLE, MEDUSA, HYDRA, MLP_SPECULATOR = "block", "p-eagle", "medusa", "hydra", "mlp-speculator"
MTP, ASSISTANT = "mtp", "assistant"

# What the class names, or keys, of each kind's configs contain.
_CLASSES = {
    "eagledeepseekmtp": EAGLE, "lilicorr": BLOCK,
    "dflash": BLOCK, "dspark": BLOCK, "domino": BLOCK, "xpress": BLOCK, "museglimmerassistant": BLOCK,
    "peagle": P_EAGLE, "medusa": MEDUSA, "hydra": HYDRA, "mlpspeculator": MLP_SPECULATOR, "gemma4assistant": ASSISTANT,
    "gemma4unifiedassistant": ASSISTANT, "nextn": MTP, "mtp": MTP,
}  # fmt: skip
_KEYS = {
    "dflash_config": BLOCK, "ptd_token_id": P_EAGLE, "pard_token": P_EAGLE, "medusa_num_heads": MEDUSA,
    "hydra_num_heads": HYDRA,
}  # fmt: skip


def kind_of(config: Mapping[str, Any], names: Collection[str] = ()) -> str | None:
    """Return the kind of a draft head, or None for another model.

    Args:
        config: its config.json, which rarely identifies EAGLE heads.
        names: names of its tensors, as far as known.
    """
    if config.get("model_type") == EagleConfig.model_type:
        return OURS
    if config.get("format") == OLD:
        return OLD
    types = [config.get("architectures"), config.get("speculators_model_type"), config.get("model_type")]
    classes = str(types).lower().replace("_", "").replace("-", "")
    kinds = [kind for word, kind in _CLASSES.items() if word in classes]
    kinds += [kind for key, kind in _KEYS.items() if key in config]
    if kinds:
        return kinds[0]
    names, described = set(map(our_name, names)), str(types[:2]).lower()
    if "mask_hidden" in names:
        return P_EAGLE
    if "eagle3" in described or D2T in names or any(name.endswith("hidden_norm.weight") for name in names):
        return EAGLE_3
    return EAGLE if "eagle" in described or "fc.weight" in names else None
