"""Tell draft heads that other programs publish by their config.json and the names of their tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fsd_infer.heads.stored_parts import our_name

BLOCK, P_EAGLE, MEDUSA, HYDRA, MLP_SPECULATOR = "block", "p-eagle", "medusa", "hydra", "mlp-speculator"
MTP, ASSISTANT = "mtp", "assistant"

# What the class names, or keys, of each kind's configs contain.
_CLASSES = {
    "dflash": BLOCK, "dspark": BLOCK, "domino": BLOCK, "museglimmerassistant": BLOCK, "peagle": P_EAGLE,
    "medusa": MEDUSA, "hydra": HYDRA, "mlpspeculator": MLP_SPECULATOR, "gemma4assistant": ASSISTANT,
    "gemma4unifiedassistant": ASSISTANT, "nextn": MTP, "mtp": MTP,
}  # fmt: skip
_KEYS = {
    "dflash_config": BLOCK, "ptd_token_id": P_EAGLE, "pard_token": P_EAGLE, "medusa_num_heads": MEDUSA,
    "hydra_num_heads": HYDRA,
}  # fmt: skip


def kind_of_head(config: Mapping[str, Any], names: Collection[str] = ()) -> str | None:
    """Return the kind of a published head that is no EAGLE head, or None.

    Args:
        config: its config.json.
        names: of its tensors, as far as known.
    """
    told = [config.get("architectures"), config.get("speculators_model_type"), config.get("model_type")]
    classes = str(told).lower().replace("_", "").replace("-", "")
    found = [kind for word, kind in _CLASSES.items() if word in classes]
    found += [kind for key, kind in _KEYS.items() if key in config]
    if not found and "mask_hidden" in map(our_name, names):
        return P_EAGLE
    return found[0] if found else None
