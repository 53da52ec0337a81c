"""Draft heads: the module and its checkpoint format."""
