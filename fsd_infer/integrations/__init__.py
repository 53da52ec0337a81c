"""Integrations: vLLM."""
