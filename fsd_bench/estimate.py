"""`fsd-bench estimate`: memory and the least time of a round, from a target's config alone.

Model and drafter are made without values (on torch's "meta" device), so their weights are counted. A round's parts run
one after the other, and each takes at least what :mod:`fsd_bench.roofline` says. With N nodes, B rows, context C,
vocabulary V, draft vocabulary Vd, depth D and width w:

* target: reads once its weights without the input embeddings (all experts of a mixture), and B·C tokens of keys and
  values. It computes 2 operations per node and weight (of a mixture, those of the experts that a token uses), and
  4·L·heads·head width per node and token that the node sees.
* head: is read D times, over D tokens of the text and then over w nodes, and so are D sets of logits. Each set is read
  in bf16, and written and read in fp32. The same holds for a small LM. Weights rounded to b bits take b bits each and 4
  bytes per 64 of them.
* rule: p at all nodes is read once (exact). Lossy rules also write and read p and q in fp32.

A program takes longer than these bounds. What a GPU took beyond them is in :class:`.Overhead` and is added for each
decoder layer, draft step and round. :mod:`benchmarks.gpu_round` measures it again.

The accepted length cannot be known on paper. ``break-even`` is the τ at which drafting is as fast as plain decoding.
Several devices hold the target by ``tp_plan``: each has its part of every layer and cache, and a whole drafter. What
they exchange is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fsd_bench.planned import EXPERTS, count_weights, planned_target, sizes_of
from fsd_bench.roofline import FORWARD_GRAPHS, Hardware, MemoryItem, Work, device_rows, seconds
from fsd_core.errors import ModelLoadError, foreign_errors
from fsd_infer.device.cuda_graphs import shared_slots
from fsd_infer.drafters.from_target import GROUP, PREFIX, FromTarget
from fsd_infer.heads.config import EagleConfig
from fsd_infer.heads.head import EagleHead
from fsd_infer.request.prompts import PREFILL_CHUNK
from fsd_infer.targets.target import Target
from fsd_infer.trees.shape import TreeShape

LOGITS = 2 + 4 + 4  # bytes per log-probability: bf16 read, fp32 written and read


def planned_head(target: Target, **options: Any) -> EagleHead:
    """Make a head without values. Takes the options of :meth:`EagleConfig.for_target`, and raises its errors.

    Also raises ModelLoadError for sizes that transformers' layers refuse.
    """
    config = EagleConfig.for_target(target, **options)
    with foreign_errors(ModelLoadError, f"no head can be planned for {target.name}: {{why}}"), torch.device("meta"):
        return EagleHead(config).to(torch.bfloat16)


def weights_read(target: Target) -> int:
    """Return the number of weights that a forward reads: all but input embeddings that are not the LM head."""
    table, head = target.model.get_input_embeddings().weight, target.model.get_output_embeddings().weight
    return count_weights(target.model) - (0 if table is head else table.numel())


def weights_used(target: Target) -> int:
    """Return the number of weights that a token is multiplied with: of a mixture's experts, those that it uses."""
    config, weights = target.config, weights_read(target)
    experts = next((count for name in EXPERTS if (count := getattr(config, name, None))), None)
    if experts is None:
        return weights
    expert_weights = sum(weight.numel() for name, weight in target.model.named_parameters() if ".experts." in name)
    return weights - expert_weights + expert_weights * int(config.num_experts_per_tok) // int(experts)


@dataclass(frozen=True)
class PlannedDrafter:
    """A drafter on paper.

    Attributes:
        name: "head" or "small LM".
        weights: own weights that each depth reads.
        lm_rows: weights of the target's LM head that each depth reads.
        depth_bytes: bytes of both.
        once: weights that are read once per round.
        vocabulary: tokens that it drafts, Vd.
        features: width of the target's features that are kept for it.
        cache: bytes of keys and values per token.
        held: memory of its weights that are not the target's.
    """

    name: str
    weights: int
    lm_rows: int
    depth_bytes: float
    once: int
    vocabulary: int
    features: int
    cache: int
    held: MemoryItem


def head_on_paper(target: Target, head: EagleHead) -> PlannedDrafter:
    """Return the sizes of a head, with or without values."""
    config, layer = head.config, head.config.layer
    vocabulary = config.draft_vocab_size or target.vocab_size
    lm_rows = 0 if head.lm_head is not None else vocabulary * target.hidden_size
    fused = [head.fc] if head.eagle3 else [head.fusion] if head.fusion is not None else []
    total, fusion = count_weights(head), sum(map(count_weights, fused))
    copied = lm_rows if config.draft_vocab_size else 0
    kv_heads = int(layer.get("num_key_value_heads") or layer["num_attention_heads"])
    width = int(layer.get("head_dim") or config.hidden_size // layer["num_attention_heads"])
    held = MemoryItem("head's weights", 2.0 * (total + copied), f"2 B x ({total:,} + {copied:,} of the LM head's rows)")
    return PlannedDrafter(
        "head", total - fusion, lm_rows, 2.0 * (total - fusion + lm_rows), fusion,
        vocabulary, config.feature_width, 2 * config.num_layers * kv_heads * width * 2, held,
    )  # fmt: skip


def lm_on_paper(target: Target, name: str) -> PlannedDrafter:
    """Return the sizes of a small LM named "self:..." or as :func:`planned_target` takes it.

    Raises:
        FsdError: no such drafter.
    """
    from_target = FromTarget.parse(name) if name.startswith(PREFIX) else None
    small = planned_target(name) if from_target is None else replace(from_target, bits=None).of(target, name)
    layers = small.layers(range(int(small.config.num_hidden_layers))) if from_target and from_target.bits else []
    quantised = sum(weight.numel() for layer in layers for weight in layer.parameters() if weight.dim() > 1)
    each = (from_target.bits if from_target and from_target.bits else 0) / 8 + 4 / GROUP
    others = 0 if from_target else count_weights(small.model) - quantised
    held = MemoryItem(
        "small LM's weights", 2.0 * others + quantised * each, f"2 B x {others:,} + {each:.3g} B x {quantised:,}"
    )  # fmt: skip
    weights = weights_read(small)
    return PlannedDrafter(
        "small LM", weights, 0, 2.0 * (weights - quantised) + quantised * each, 0, small.vocab_size, target.hidden_size,
        small.cache_bytes_per_token, held,
    )  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """A request, and the models that answer it.

    Attributes:
        target: without values.
        drafter: its sizes.
        batch: rows, B.
        context: tokens before the round, C; for memory the prompt.
        new: tokens that each row may add.
        graphs: whether CUDA graphs are used.
    """

    target: Target
    drafter: PlannedDrafter
    batch: int = 1
    context: int = 1024
    new: int = 1024
    graphs: bool = False

    def memory(self, shape: TreeShape) -> list[MemoryItem]:
        """Return what decoding holds on its devices."""
        target, drafter, sizes, b = self.target, self.drafter, sizes_of(self.target), self.batch
        h, v, nodes, kv = target.hidden_size, target.vocab_size, shape.nodes, target.cache_bytes_per_token
        inner, layers, chunk = sizes.intermediate_size, sizes.layers, min(PREFILL_CHUNK, self.context)
        slots = self.context + self.new + nodes
        slots = shared_slots(slots) if self.graphs else slots
        beyond, features = (shape.depth - 1) * shape.width, drafter.features
        parts = [
            MemoryItem("target's weights", 2.0 * sizes.parameters, f"2 B x {sizes.parameters:,}", shared=True),
            drafter.held,
            MemoryItem("target's cache", float(b * slots * kv), f"{b} rows x {slots} slots x {kv} B", True),
            *([MemoryItem("target's states", float(b * target.state_bytes), f"{b} rows x {target.state_bytes} B", True)]
              if target.state_bytes else []),
            MemoryItem(f"{drafter.name}'s cache", float(b * (slots + beyond) * drafter.cache),
                 f"{b} x ({slots} + {beyond}) x {drafter.cache} B"),
            MemoryItem("reading the prompt",
                 2.0 * b * (chunk * ((layers + 3) * h + 3 * inner) + 2 * self.context * features),
                 f"2 B x {b} x ({chunk} x (({layers} + 3) x {h} + 3 x {inner}) + 2 x {self.context} x {features})"),
            MemoryItem("a round's logits", float(LOGITS * b * nodes * v), f"{LOGITS} B x {b} x {nodes} nodes x {v}"),
        ]  # fmt: skip
        if self.graphs:
            each = 2 * (2 * (v + features) + (layers + 3) * h + 3 * inner) + slots
            how = f"{b} x {nodes} nodes x (2 B x (2 x ({v} + {features}) + one forward's) + a mask of {slots})"
            parts.append(MemoryItem("graph's pool", float(b * nodes * each), how))
        return parts

    def forward(self, nodes: int) -> Work:
        """Return the work of the target over ``nodes`` nodes of each row."""
        sizes, b, c, read = sizes_of(self.target), self.batch, self.context, weights_read(self.target)
        used = weights_used(self.target)
        kv, seen = self.target.cache_bytes_per_token, 4 * sizes.layers * sizes.heads * sizes.head_dim * (c + nodes)
        states = self.target.state_bytes
        kept = f"({c} x {kv} + {states})" if states else f"{c} x {kv}"
        how = f"2 B x {read:,} + {b} x {kept} B; {b} x {nodes} x (2 x {used:,} + {seen:,})"
        moved = 2.0 * read + b * (c * kv + states)
        return Work("target", moved, float(b * nodes * (2 * used + seen)), how, shared=True)

    def round(self, shape: TreeShape, lossy: bool = False) -> list[Work]:
        """Return the work of drafting, verifying and judging once."""
        drafter, b, c, depth, width = self.drafter, self.batch, self.context, shape.depth, shape.width
        read, nodes, v, vd = drafter.weights + drafter.lm_rows, shape.nodes, self.target.vocab_size, drafter.vocabulary
        rows, once = max(depth, width), drafter.once
        how = (
            f"{depth} x ({drafter.depth_bytes / read:.3g} B x {read:,} + {b} x {c} x {drafter.cache} B + {LOGITS} B x "
            f"{b} x {width} x {vd}; 2 x {b} x {rows} x {read:,})"
        )
        each = drafter.depth_bytes + b * c * drafter.cache + LOGITS * b * width * vd
        logits = 2 * LOGITS if lossy else 2
        return [
            Work(drafter.name, each, 2.0 * b * rows * read, how, depth),
            Work("features", 2.0 * once, 2.0 * b * depth * once, f"2 B x {once:,}"),
            self.forward(nodes),
            Work("rule", float(b * nodes * logits * v), 0.0, f"{logits} B x {b} x {nodes} x {v}"),
        ]

    def plain(self) -> list[Work]:
        """Return the work of a token without a drafter."""
        return [self.forward(1), Work("rule", 2.0 * self.batch * self.target.vocab_size, 0.0, "2 B x rows x V")]

    def expected(self, parts: Sequence[Work], hardware: Hardware, devices: int = 1) -> float:
        """Return the seconds of these parts in sequence with what was measured beyond their bounds."""
        real = replace(hardware, bandwidth=MEASURED.share * hardware.bandwidth)
        steps = sum(part.times for part in parts if part.name == self.drafter.name)
        beyond = MEASURED.layer * sizes_of(self.target).layers + MEASURED.step * steps + MEASURED.judging * (steps > 0)
        return seconds(parts, real, devices) + beyond


MEASURED = FORWARD_GRAPHS
COLUMNS = ["device", "count", "plain ms", "bound", "tok/s", "exact ms", "bound", "break-even", "lossy ms", "bound",
           "break-even"]  # fmt: skip


def by_device(planned: Planned, exact: TreeShape, lossy: TreeShape) -> list[list[str]]:
    """Return :data:`COLUMNS` for each device: milliseconds of a plain token and of rounds, and their break-even τ.

    Expected milliseconds include :data:`MEASURED` overheads, bounds do not. The break-even is of the expected ones.
    """

    def cells(hardware: Hardware, count: int) -> list[str]:
        parts = [planned.plain(), planned.round(exact), planned.round(lossy, True)]
        bounds = [f"{1e3 * seconds(part, hardware, count):.2f}" for part in parts]
        plain, *rounds = [planned.expected(part, hardware, count) for part in parts]
        compared = [
            cell
            for part, bound in zip(rounds, bounds[1:])
            for cell in (f"{1e3 * part:.2f}", bound, f"{part / plain:.2f}")
        ]
        return [f"{1e3 * plain:.2f}", bounds[0], f"{planned.batch / plain:.0f}", *compared]

    return device_rows(planned.memory(exact), cells, COLUMNS)
