"""Decode a batch exactly, then with a rule that may spend two nats per answer."""

from fsd_infer import FuzzyDecoder

decoder = FuzzyDecoder.from_pretrained("smollm2-135m")  # or a directory or Hub id, and a head's directory
prompts = ["Why is the sky blue?", "Name three rivers."]
for rule in ("exact", "tilted:1:budget=2"):
    made = decoder.generate(prompts, rule=rule, max_new_tokens=32, do_sample=False)
    stats = made.stats
    print(f"{rule}: {stats.acceptance_length:.2f} tokens per target forward, {stats.divergence_spent:.2f} nats spent")
    for prompt, text in zip(prompts, made.texts, strict=True):
        print(f"  {prompt} {text!r}")
