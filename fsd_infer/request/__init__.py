"""A request's options, logits processors, guide and prompts."""
