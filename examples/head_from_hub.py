"""Publish a head on the Hub, and decode with a head from the Hub."""

import os

from fsd_infer import FuzzyDecoder, Target
from fsd_infer.heads.head import EagleHead
from fsd_infer.targets.builtin import shipped_drafter

TARGET, REPOSITORY = "smollm2-135m", os.environ.get("REPOSITORY", "you/smollm2-135m-head")

# Upload a head from a directory. `fsd-train publish DIR OWNER/NAME` also measures it and writes a model card.
target = Target.from_pretrained(TARGET)
head = EagleHead.from_pretrained(shipped_drafter(TARGET), target)  # use your own
print(head.push_to_hub(REPOSITORY, commit_message="a draft head"))

# Decode with it. The config.json tells heads of SafeAILab, SpecForge and speculators apart.
decoder = FuzzyDecoder.from_pretrained(TARGET, REPOSITORY)
out = decoder.generate("Why is the sky blue?", max_new_tokens=48, do_sample=False)
print(out.texts[0], f"\n{out.stats.acceptance_length:.2f} tokens per forward")

# EagleHead is a transformers model: it takes a revision, a subfolder, a dtype, a device.
again = EagleHead.from_pretrained(REPOSITORY, target, revision="main", dtype="float32", local_files_only=True)
print(again.config.layout, again.config.fused_layers, again.dtype, again.num_parameters())
