"""Backends: how a model computes on a kind of processor, chosen when it is loaded."""
