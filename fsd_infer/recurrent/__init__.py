"""Recurrent layers that read draft trees: convolutions, state-space models and delta rules.

:mod:`.mixers` finds them in a model, and gives transformers' own code other functions for its convolution and its scan.
:mod:`.recurrences` has these.
"""
