"""A head from the Hub drafts, and a head of your own goes there."""

import os

from fsd_infer import FuzzyDecoder, Target
from fsd_infer.heads.head import EagleHead
from fsd_infer.targets.loading import shipped_drafter

TARGET, REPOSITORY = "smollm2-135m", os.environ.get("REPOSITORY", "you/smollm2-135m-head")

# From a directory to the Hub; `fsd-train publish DIR OWNER/NAME` measures it first and writes a model card.
target = Target.from_pretrained(TARGET)
head = EagleHead.from_pretrained(shipped_drafter(TARGET), target)  # yours goes here
print(head.push_to_hub(REPOSITORY, commit_message="a draft head"))

# From the Hub to a decoder. Heads of SafeAILab, SpecForge and speculators are told by their config.json.
decoder = FuzzyDecoder.from_pretrained(TARGET, REPOSITORY)
out = decoder.generate("Why is the sky blue?", max_new_tokens=48, do_sample=False)
print(out.texts[0], f"\n{out.stats.tau:.2f} tokens per forward")

# The class is transformers': a revision, a folder of the repository, a data type, a device.
again = EagleHead.from_pretrained(REPOSITORY, target, revision="main", dtype="float32", local_files_only=True)
print(again.config.layout, again.config.fused_layers, again.dtype, again.num_parameters())
