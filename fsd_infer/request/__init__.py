"""What a request brings: its options, its logits processors, its prompts."""
