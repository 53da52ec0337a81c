"""Recurrent layers that read draft trees: convolutions, state-space models and delta rules.

:mod:`.mixers` finds them in a model, and gives transformers' own code other functions for its convolution and its scan.
Each of these is a :class:`fsd_infer.device.states.Recurrence`, in a file of its own.
"""
