"""Conversations, prompts and data rows, up to token ids."""
