"""`fsd-infer estimate`: memory and the least time of a round, from a target's config alone.

Model and head are made without values (on torch's "meta" device), so their weights are counted, not assumed. A round's
parts run one after the other; each takes at least what :mod:`fsd_bench.roofline` says. N nodes, B rows, context
C, vocabulary V, draft vocabulary Vd, depth D, width w:

* target: weights without the input embeddings (all experts of a mixture), and B·C tokens of keys and values, are read
  once; 2 operations per weight and node, and 4·L·heads·head width per node and token that it sees;
* head: read D times, over D tokens of the text and then over w nodes; so are the D sets of logits, of which each is
  read in bf16, and written and read in fp32; a small LM in its place likewise, of weights that were rounded b bits each
  and 4 bytes for 64 of them;
* rule: p at all nodes is read once (exact); lossy rules also write and read p and q in fp32.

How long an accepted path is cannot be known on paper. ``break-even`` is the τ (tokens per round) at which drafting is
as fast as plain decoding; above it, it is faster by the ratio. Several devices hold the target by ``tp_plan``: each has
its part of every layer and of the caches, and a whole head; what they exchange is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from fsd_bench.planned import Sizes, count_weights, planned_target, sizes_of
from fsd_bench.roofline import Hardware, Part, Work, device_rows, seconds
from fsd_infer.device.cuda_graphs import SLOTS, TOKENS
from fsd_infer.drafters.itself import PREFIX, Itself
from fsd_infer.drafters.shape import TreeShape
from fsd_infer.heads.config import EagleConfig
from fsd_infer.heads.head import EagleHead
from fsd_infer.request.prompts import PREFILL_CHUNK
from fsd_infer.targets.rounding import GROUP
from fsd_infer.targets.target import Target

LOGITS = 2 + 4 + 4  # bytes that a log-probability costs: bf16 read, fp32 written and read


def planned_head(target: Target, **options: Any) -> EagleHead:
    """A head without values. Options as of :meth:`EagleConfig.for_target`, whose errors it raises."""
    config = EagleConfig.for_target(target, **options)
    with torch.device("meta"):
        return EagleHead(config).to(torch.bfloat16)


@dataclass(frozen=True)
class Planned:
    """A request, and what answers it.

    Attributes:
        target, head: without values.
        batch: rows, B.
        context: tokens before the round, C; for memory the prompt.
        new: tokens that each row may add.
        graphs: with CUDA graphs.
        head_weight: bytes of a head's weight: 2, and 1 on a CPU whose kernels read fp8.
    """

    name = "head"

    target: Target
    head: EagleHead
    batch: int = 1
    context: int = 1024
    new: int = 1024
    graphs: bool = False
    head_weight: int = 2

    @cached_property
    def sizes(self) -> Sizes:
        """Of the target."""
        return sizes_of(self.target)

    @property
    def weights(self) -> int:
        """Of the target, tied ones once."""
        return self.sizes.parameters

    @cached_property
    def read_weights(self) -> int:
        """Of the target in a forward: of embeddings that are no LM head too, a row per token is next to nothing."""
        model = self.target.model
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        return self.weights - (0 if table is head else table.numel())

    @property
    def drafted(self) -> int:
        """Vd."""
        return self.head.config.draft_vocab_size or self.target.vocab_size

    @cached_property
    def head_rows(self) -> int:
        """Weights of the target's LM head that the head reads, which has none of its own: Vd rows."""
        return 0 if self.head.lm_head is not None else self.drafted * self.target.hidden_size

    @cached_property
    def own_weights(self) -> int:
        """Of the head, but for the projections of the target's features, read once a round."""
        once = [self.head.fc] if self.head.eagle3 else [self.head.fusion] if self.head.fusion is not None else []
        return count_weights(self.head) - sum(map(count_weights, once))

    @cached_property
    def drafter_bytes(self) -> float:
        """Of weights that a depth reads."""
        return float(self.head_weight * (self.own_weights + self.head_rows))

    @cached_property
    def once(self) -> int:
        """Weights of the head that are read once a round."""
        return count_weights(self.head) - self.own_weights

    @property
    def held(self) -> Part:
        """The drafter's weights, as far as they are not the target's."""
        own, copied = count_weights(self.head), self.head_rows if self.head.config.draft_vocab_size else 0
        return Part("head's weights", 2.0 * (own + copied), f"2 B x ({own:,} + {copied:,} of the LM head's rows)")

    @property
    def feature_width(self) -> int:
        return self.head.config.feature_width

    @cached_property
    def head_cache(self) -> int:
        """Bytes of a token's keys and values in the drafter."""
        layer = self.head.config.layer
        heads = int(layer.get("num_key_value_heads") or layer["num_attention_heads"])
        width = int(layer.get("head_dim") or self.head.config.hidden_size // layer["num_attention_heads"])
        return 2 * self.head.config.num_layers * heads * width * 2

    def memory(self, shape: TreeShape) -> list[Part]:
        """What decoding holds on its devices."""
        target, b = self.target, self.batch
        h, v, nodes, kv = target.hidden_size, target.vocab_size, shape.nodes, target.cache_bytes_per_token
        inner, layers, chunk = self.sizes.intermediate_size, self.sizes.layers, min(PREFILL_CHUNK, self.context)
        slots = self.context + self.new + nodes
        slots = -(-slots // SLOTS) * SLOTS if self.graphs else slots
        beyond = (shape.depth - 1) * shape.width
        features = self.feature_width
        parts = [
            Part("target's weights", 2.0 * self.weights, f"2 B x {self.weights:,}", shared=True),
            self.held,
            Part("target's cache", float(b * slots * kv), f"{b} rows x {slots} slots x {kv} B", True),
            Part(f"{self.name}'s cache", float(b * (slots + beyond) * self.head_cache),
                 f"{b} x ({slots} + {beyond}) x {self.head_cache} B"),
            Part("reading the prompt", 2.0 * b * (chunk * ((layers + 3) * h + 3 * inner) + 2 * self.context * features),
                 f"2 B x {b} x ({chunk} x (({layers} + 3) x {h} + 3 x {inner}) + 2 x {self.context} x {features})"),
            Part("a round's logits", float(LOGITS * b * nodes * v), f"{LOGITS} B x {b} x {nodes} nodes x {v}"),
        ]  # fmt: skip
        if self.graphs:
            padded = next((count for count in TOKENS if count >= nodes), nodes)
            spans = [span for k in range(20) if (span := SLOTS * 2**k) < slots] + [slots]
            each = 2 * (v + features + (layers + 3) * h + 3 * inner)
            pool = b * sum(padded * (2 * (v + features) + span) for span in spans) + b * padded * each
            how = f"{b} x {padded} nodes x ((2 B x ({v} + {features}) + mask) x {len(spans)} spans + one forward's)"
            parts.append(Part("graphs' pool", float(pool), how))
        return parts

    def forward(self, nodes: int) -> Work:
        """The target over so many nodes of each row."""
        sizes, b, c, read = self.sizes, self.batch, self.context, self.read_weights
        kv, seen = self.target.cache_bytes_per_token, 4 * sizes.layers * sizes.heads * sizes.head_dim * (c + nodes)
        how = f"2 B x {read:,} + {b} x {c} x {kv} B; {b} x {nodes} x (2 x {read:,} + {seen:,})"
        return Work("target", 2.0 * read + b * c * kv, float(b * nodes * (2 * read + seen)), how, shared=True)

    def round(self, shape: TreeShape, lossy: bool = False) -> list[Work]:
        """Drafting, verifying and judging once."""
        b, c, depth, width = self.batch, self.context, shape.depth, shape.width
        read, nodes, v, vd = self.own_weights + self.head_rows, shape.nodes, self.target.vocab_size, self.drafted
        once, weight = self.once, self.head_weight
        rows, each_weight = max(depth, width), self.drafter_bytes / read
        each = self.drafter_bytes + b * c * self.head_cache + LOGITS * b * width * vd
        how = (
            f"{depth} x ({each_weight:.3g} B x {read:,} + {b} x {c} x {self.head_cache} B + {LOGITS} B x {b} x {width} "
            f"x {vd}; 2 x {b} x {rows} x {read:,})"
        )
        drafting = Work(self.name, each, 2.0 * b * rows * read, how, depth)
        fusing = Work("features", float(weight * once), 2.0 * b * depth * once, f"{weight} B x {once:,}")
        judged = b * nodes * (2 * LOGITS * v if lossy else 2 * v)
        rule = f"{2 * LOGITS if lossy else 2} B x {b} x {nodes} x {v}"
        return [drafting, fusing, self.forward(nodes), Work("rule", float(judged), 0.0, rule)]

    def plain(self) -> list[Work]:
        """A token without a drafter."""
        return [self.forward(1), Work("rule", 2.0 * self.batch * self.target.vocab_size, 0.0, "2 B x rows x V")]


@dataclass(frozen=True)
class PlannedLM(Planned):
    """The same with a small LM in place of the head.

    Attributes:
        head: the small LM, without values.
        bits: of the weights in its layers, None: 16.
        is_part: its other weights are the target's own.
    """

    name = "small LM"

    head: Target  # type: ignore[assignment]
    bits: int | None = None
    is_part: bool = False
    head_rows = once = 0

    @property
    def drafted(self) -> int:
        return self.head.vocab_size

    @property
    def feature_width(self) -> int:
        return self.target.hidden_size

    @cached_property
    def own_weights(self) -> int:
        return Planned(self.head, self.head).read_weights  # type: ignore[arg-type]

    @cached_property
    def _rounded(self) -> int:
        """Weights of the layers' matrices, if they are rounded."""
        layers = self.head.layers(range(int(self.head.config.num_hidden_layers))) if self.bits else []
        return sum(weight.numel() for layer in layers for weight in layer.parameters() if weight.dim() > 1)

    @cached_property
    def drafter_bytes(self) -> float:
        return 2.0 * (self.own_weights - self._rounded) + self._rounded_bytes

    @property
    def _rounded_bytes(self) -> float:
        return self._rounded * ((self.bits or 0) / 8 + 4 / GROUP)

    @property
    def held(self) -> Part:
        others = 0 if self.is_part else count_weights(self.head.model) - self._rounded
        how = f"2 B x {others:,} + {(self.bits or 0) / 8 + 4 / GROUP:.3g} B x {self._rounded:,}"
        return Part("small LM's weights", 2.0 * others + self._rounded_bytes, how)

    @property
    def head_cache(self) -> int:
        return self.head.cache_bytes_per_token


def planned_lm(target: Target, name: str, **request: Any) -> PlannedLM:
    """With a small LM of a name: "self:..." or as of :func:`planned_target`.

    Args:
        target: without values.
        name: of the drafter.
        request: of :class:`Planned`.

    Raises:
        FsdError: there is no such drafter.
    """
    if not name.startswith(PREFIX):
        return PlannedLM(target, planned_target(name), **request)
    what = Itself.parse(name)
    return PlannedLM(target, replace(what, bits=None).of(target, name), bits=what.bits, is_part=True, **request)


COLUMNS = ["device", "count", "plain ms", "tok/s", "exact ms", "break-even", "lossy ms", "break-even"]


def by_device(planned: Planned, exact: TreeShape, lossy: TreeShape) -> list[list[str]]:
    """:data:`COLUMNS` for each device: milliseconds of a plain token and of the rounds, and their break-even τ."""

    def cells(hardware: Hardware, count: int) -> list[str]:
        plain = seconds(planned.plain(), hardware, count)
        rounds = [seconds(planned.round(exact), hardware, count), seconds(planned.round(lossy, True), hardware, count)]
        compared = [cell for each in rounds for cell in (f"{1e3 * each:.2f}", f"{each / plain:.2f}")]
        return [f"{1e3 * plain:.2f}", f"{planned.batch / plain:.0f}", *compared]

    return device_rows(planned.memory(exact), cells, COLUMNS)
