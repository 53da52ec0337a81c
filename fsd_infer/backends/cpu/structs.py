"""The structs that the functions of ``kernels.cpp`` take, see ``native/interface.h``."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int64, c_void_p


class Linear(Structure):
    """The struct ``fsd_linear`` of kernels.cpp."""

    _fields_ = [
        ("panels", c_void_p),
        *((name, c_int64) for name in ("kind", "side")),
        *((name, c_void_p) for name in ("scales", "bias")),
        *((name, c_int64) for name in ("columns", "depth")),
    ]


class Layer(Structure):
    """The struct ``fsd_layer`` of kernels.cpp."""

    _fields_ = [
        *((name, Linear) for name in ("query", "key", "value", "output", "gate", "up", "down")),
        *((name, c_void_p) for name in ("input_norm", "query_norm", "key_norm", "mlp_norm")),
    ]


class StackStruct(Structure):
    """The struct ``fsd_stack`` of kernels.cpp."""

    _fields_ = [
        ("layers", POINTER(Layer)),
        *((name, c_int64) for name in ("number", "hidden", "inner", "query_heads", "key_heads", "width")),
        *((name, c_float) for name in ("epsilon", "scale")),
    ]


class Forward(Structure):
    """The struct ``fsd_forward`` of kernels.cpp."""

    _fields_ = [
        *((name, c_int64) for name in ("batch", "count")),
        *((name, c_void_p) for name in ("x", "attended", "positions", "slots", "cosine", "sine")),
        ("angles", c_int64),
        ("visible", POINTER(c_void_p)),
        ("used", c_int64),
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_int64) for name in ("capacity", "layer_stride", "batch_stride", "head_stride", "slot_stride")),
        ("outputs", POINTER(c_void_p)),
        *((name, c_void_p) for name in ("final_norm", "out", "scratch")),
        *((name, c_int64) for name in ("many", "threads")),
    ]


class Head(Structure):
    """``fsd_head`` of kernels.cpp."""

    _fields_ = [
        *((name, Linear) for name in ("embed", "fc", "lm_head", "fusion")),
        *((name, c_void_p) for name in ("fusion_norms", "feature_scale")),
        ("fused", c_int64),
        ("fusion_epsilon", c_float),
    ]


class HeadStepArguments(Structure):
    """``fsd_step`` of kernels.cpp."""

    _fields_ = [
        *((name, c_void_p) for name in ("ids", "embeds", "features", "joined", "inner", "more")),
        ("extra", c_int64),
        ("logits", c_void_p),
    ]


class Tree(Structure):
    """``fsd_tree`` of kernels.cpp."""

    _fields_ = [*((name, c_void_p) for name in ("tokens", "parents", "scores", "proposers")), ("count", c_int64)]


class Mixing(Structure):
    """``fsd_mixing`` of kernels.cpp."""

    _fields_ = [(name, c_float) for name in ("likely", "drawn", "unsure", "sure", "min_rest", "min_accept")]


class SampledRound(Structure):
    """``fsd_round`` of kernels.cpp."""

    _fields_ = [
        *((name, c_int64) for name in ("batch", "count", "columns", "drafts", "drafted")),
        *((name, c_void_p) for name in ("p", "q", "logits", "q_logits")),
        *((name, c_int64) for name in ("narrow_p", "narrow_q", "narrow_logits", "narrow_q_logits")),
        *((name, c_void_p) for name in ("tokens", "parents", "q_index", "scores", "drawn", "draft_ids", "uniforms")),
        ("stride", c_int64),
    ]


class WalkedRound(Structure):
    """``fsd_walked`` of kernels.cpp."""

    _fields_ = [
        ("width", c_int64),
        *((name, c_void_p) for name in ("path", "tokens", "sources", "first_choices", "gaps", "accepted")),
    ]
