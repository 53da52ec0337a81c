"""What the methods of one benchmark run on: each model is loaded once, when it is first needed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.drafters import Drafter, TreeShape
from fsd_infer.errors import FsdError
from fsd_infer.targets.loading import load_config, load_target, load_tokenizer, parse_dtype
from fsd_infer.targets.target import Target


@dataclass
class Models:
    """What methods run on.

    ``decoder`` packs the linear layers of its model in place, so transformers' methods get ``reference``: a second,
    untouched copy of the same weights.

    Args:
        target, drafter, dtype, device, tree, cuda_graphs, quantize: as in ``FuzzyDecoder.from_pretrained``, dtype by
            name.
        first_drafter: name of the drafter to load together with the target; others follow through :meth:`load`.
    """

    target: str
    drafter: str | None = None
    dtype: str = "bf16"
    device: str | None = None
    tree: TreeShape | str | None = None
    cuda_graphs: bool = False
    quantize: bool = True
    first_drafter: str | None = "none"
    reference_loaded: bool = False
    decoder_loaded: bool = False
    _drafters: dict[tuple[str | None, TreeShape | None], Drafter] = field(default_factory=dict)

    @cached_property
    def decoder(self) -> FuzzyDecoder:
        self.decoder_loaded = True
        made = FuzzyDecoder.from_pretrained(
            self.target,
            self.first_drafter,
            dtype=parse_dtype(self.dtype),
            device=self.device,
            tree=self.tree,
            cuda_graphs=self.cuda_graphs,
            quantize=self.quantize,
        )
        self._drafters[self.first_drafter, None] = made.drafter
        return made

    def load(self, drafter: str | None, tree: TreeShape | None = None) -> Drafter:
        """The drafter of that name (see ``load_drafter``), loaded and packed once; None: with the run's tree."""
        decoder = self.decoder
        if (drafter, tree) not in self._drafters:
            self._drafters[drafter, tree] = decoder.load_drafter(drafter, tree or self.tree)
        return self._drafters[drafter, tree]

    @cached_property
    def reference(self) -> tuple[Any, Any]:
        """(model, tokenizer) as transformers loads them."""
        self.reference_loaded = True
        return load_target(self.target, dtype=self.dtype, device=self.device)

    def scorer(self) -> Target:
        """A target for teacher-forced forwards, whichever model is loaded."""
        if self.decoder_loaded or not self.reference_loaded:
            return self.decoder.target
        return Target(*self.reference, name=self.target)

    @cached_property
    def tokenizer(self) -> Any:
        """The target's. Loads no weights for it."""
        if self.decoder_loaded:
            found = self.decoder.tokenizer
        elif self.reference_loaded:
            found = self.reference[1]
        else:
            found = load_tokenizer(self.target)
        if found is None:
            raise FsdError(f"target {self.target} has no tokenizer: add its tokenizer files, prompts are text.")
        return found

    @cached_property
    def max_positions(self) -> int | None:
        """Tokens of the target's context, if its config says."""
        if self.decoder_loaded:
            return self.decoder.target.max_positions
        config = self.reference[0].config if self.reference_loaded else load_config(self.target)
        return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
