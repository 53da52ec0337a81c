"""Decode from a model object with eight-bit weights, its tokenizer and the shipped head, as in a notebook."""

import importlib.util

from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig

from fsd_infer import FuzzyDecoder
from fsd_infer.targets.builtin import builtin_dir, shipped_drafter

directory = builtin_dir("smollm2-135m")  # or the name of any model
options = {"dtype": "bfloat16"}
if importlib.util.find_spec("torchao"):  # pip install 'fsd-toolkit[quant]'
    from torchao.quantization import Int8WeightOnlyConfig

    options["quantization_config"] = TorchAoConfig(Int8WeightOnlyConfig())
model = AutoModelForCausalLM.from_pretrained(directory, **options)
tokenizer = AutoTokenizer.from_pretrained(directory)

decoder = FuzzyDecoder.from_pretrained(model, shipped_drafter("smollm2-135m"), tokenizer)
print(
    "weights:", decoder.target.precision or "unquantised", "| head trained for:", decoder.drafter.trained_for or "these"
)
for rule in ("exact", "tilted:1"):
    made = decoder.generate("Why is the sky blue?", rule=rule, max_new_tokens=24, do_sample=False)
    print(f"{rule}: {made.texts[0]!r}, {made.stats.acceptance_length:.2f} tokens per target forward")
