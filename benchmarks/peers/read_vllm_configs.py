"""Read exported heads' configs by vLLM's classes: ``read_vllm_configs.py TARGET METHOD=DIR ...``.

The script runs in vLLM's environment and imports nothing of this repository. METHOD is "eagle" or "eagle3", or
"speculators" for a directory that names target and method. It prints a JSON object by directory, and reads no weights.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from run_vllm import keep_executor, package_version

SHOWN = (
    "hidden_size", "num_hidden_layers", "vocab_size", "draft_vocab_size", "target_hidden_size", "norm_before_residual",
    "fc_norm", "norm_output", "tie_word_embeddings", "eagle_aux_hidden_state_layer_ids", "rope_parameters",
)  # fmt: skip


def main() -> None:
    package_version()
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.registry import ModelRegistry

    if not torch.cuda.is_available():
        keep_executor()
    target, *heads = sys.argv[1:]
    configs: dict[str, dict[str, Any]] = {}
    for head in heads:
        method, _, directory = head.partition("=")
        arguments: dict[str, Any] = {"model": directory}
        if method != "speculators":
            speculation = {"method": method, "model": directory, "num_speculative_tokens": 4}
            arguments = {"model": target, "speculative_config": speculation}
        engine = EngineArgs(max_model_len=128, skip_tokenizer_init=True, **arguments).create_engine_config()
        speculative: Any = engine.speculative_config
        draft = speculative.draft_model_config
        kind, _ = ModelRegistry.resolve_model_cls(draft.architectures, draft)
        configs[directory] = {
            "target": engine.model_config.model,
            "method": speculative.method,
            "drafted": speculative.num_speculative_tokens,
            "config": type(draft.hf_config).__name__,
            "model": kind.__name__,
            **{name: getattr(draft.hf_config, name, None) for name in SHOWN},
        }
    print(json.dumps(configs))


if __name__ == "__main__":
    main()
