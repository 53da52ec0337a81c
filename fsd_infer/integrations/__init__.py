"""Integrations: vLLM, and EleutherAI's evaluation harness."""
