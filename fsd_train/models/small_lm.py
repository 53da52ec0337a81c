"""A small causal LM as a thing to train: its logits for any loss, its own answers, LoRA adapters in and out."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from fsd_infer.drafters.lm import check_same_vocabulary
from fsd_infer.errors import DataError, ModelLoadError
from fsd_infer.files import disk_errors, write_text
from fsd_infer.targets.loading import load_target
from fsd_infer.targets.target import Target
from fsd_infer.targets.token_ids import eos_ids, left_pad
from fsd_train.losses import LMHead

EXPORT_DTYPE = torch.bfloat16
LORA_DEFAULTS: dict[str, Any] = {"task_type": "CAUSAL_LM", "r": 16, "lora_alpha": 32, "target_modules": "all-linear"}


@dataclass(frozen=True)
class LogitsHead(LMHead):
    """The target's LM head for features [..., H], and nothing at all for a drafter's own logits [..., Vd].

    So a small model with an LM head of its own hands its logits to any loss as its estimates, and gradients reach all
    of its weights. Their last dimension distinguishes the two.
    """

    def __call__(self, hidden: Tensor) -> Tensor:
        if hidden.shape[-1] == self.weight.shape[0]:
            return hidden.to(torch.float32, copy=True)  # losses set requires_grad on what they get
        return super().__call__(hidden)

    def grad_hidden(self, logits: Tensor, grad: Tensor) -> Tensor:
        return grad


class SmallLM(nn.Module):
    """A causal LM in training, whole or by a LoRA adapter.

    Args:
        source: directory, hub id or built-in name.
        target: whose vocabulary it must share.
        lora: options of ``peft.LoraConfig`` on top of :data:`LORA_DEFAULTS`; None trains all weights.

    Raises:
        VocabularyMismatchError: the vocabularies differ.
        ModelLoadError: the model cannot be loaded, or peft is missing.
        DataError: an unknown LoRA option.
    """

    draft_ids: Tensor | None

    def __init__(self, source: str, target: Target, lora: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        model: Any
        model, self.tokenizer = load_target(source, dtype=torch.float32, device="cpu")
        self.name = source
        self.config = model.config.get_text_config(decoder=True)
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        common = self._common(target)
        if lora is None:
            self.model: Any = model.requires_grad_(True)
        else:
            self.model = _adapted(model, source, lora)
        self.model.train()
        # rows that padding added to one of the two vocabularies only are never drafted
        ids = torch.arange(common) if common < target.vocab_size else None
        self.register_buffer("draft_ids", ids, persistent=False)
        self.common = common
        self._check_lm_head()

    def _common(self, target: Target) -> int:
        """How many tokens both models know. Raises VocabularyMismatchError."""
        check_same_vocabulary(self, target)
        common = min(self.vocab_size, target.vocab_size)
        if common == target.hidden_size:
            raise ModelLoadError(
                f"{target.name} has as many tokens as hidden dimensions ({common}): logits and features have "
                "the same shape. Pad one of the two vocabularies."
            )
        return common

    @property
    def causal_lm(self) -> Any:
        """The transformers model itself, adapter layers inside."""
        return self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model

    @property
    def max_positions(self) -> int | None:
        return getattr(self.config, "max_position_embeddings", None) or getattr(self.config, "n_positions", None)

    def lm_head_rows(self, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """As :meth:`fsd_infer.targets.target.Target.lm_head_rows`."""
        head = self.causal_lm.get_output_embeddings()
        return head.weight, getattr(head, "bias", None)

    def forward(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Logits [N, Vd] of right-padded ids [B, M] at the flat positions rows [N] of [B, M-1], one further each."""
        return self.logits(self.hidden(ids)[:, 1:].flatten(0, 1).index_select(0, rows))

    def hidden(self, ids: Tensor) -> Tensor:
        """What enters the LM head: right-padded ids [B, M] -> [B, M, H']."""
        return self.causal_lm.get_decoder()(input_ids=ids, use_cache=False)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H'] -> [..., Vd] over ``draft_ids``, or all tokens that both models have; with scale and soft cap."""
        head = LMHead.of(self)  # type: ignore[arg-type]  # it asks for config and lm_head_rows only
        own = self.causal_lm.get_output_embeddings()
        if self.draft_ids is None or len(self.draft_ids) == self.common:
            return head.finish(own(hidden)[..., : self.common])
        bias = None if own.bias is None else own.bias[self.draft_ids]
        return head.finish(nn.functional.linear(hidden, own.weight[self.draft_ids], bias))

    def merged(self, dtype: torch.dtype) -> Any:
        """A copy as a plain transformers model, adapters merged into its weights."""
        model = copy.deepcopy(self.model)
        if hasattr(model, "peft_config"):
            model = model.merge_and_unload()
        return model.to(dtype).eval().requires_grad_(False)

    def trained(self) -> set[str]:
        """Names of the parameters in training: all, or the adapter's."""
        return {name for name, parameter in self.named_parameters() if parameter.requires_grad}

    def export(self, directory: Path, record: Mapping[str, Any]) -> Path:
        """Write what :func:`fsd_infer.targets.loading.load_target` loads, and ``record`` as training.json.

        All weights: a transformers directory in bf16, with the tokenizer if there is one. LoRA: an adapter directory
        in bf16, whose adapter_config.json records the base model as ``source`` named it.
        """
        directory.mkdir(parents=True, exist_ok=True)
        with disk_errors(directory):
            self._save(directory)
        write_text(directory / "training.json", json.dumps(record, indent=2, default=str) + "\n")
        return directory

    def _save(self, directory: Path) -> None:
        if not hasattr(self.model, "peft_config"):
            self.merged(EXPORT_DTYPE).save_pretrained(directory)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(directory)
        else:
            # peft would look the base model up on the hub to see whether its vocabulary grew
            state = {name: value.to(EXPORT_DTYPE) for name, value in self.model.state_dict().items() if "lora_" in name}
            self.model.save_pretrained(directory, save_embedding_layers=False, state_dict=state)
            (directory / "README.md").unlink(missing_ok=True)  # peft's empty model card

    @torch.no_grad()
    def sample(
        self, prompts: list[Tensor], max_new_tokens: int, temperature: float, eos_token_ids: list[int]
    ) -> list[Tensor]:
        """An answer of the model's own to each prompt [P], its end-of-sequence token included: [A] each, A ≥ 1.

        Prompts and answers are in host memory.

        Draws from torch's global generator.
        """
        device = self.causal_lm.device
        eos = sorted({*eos_token_ids, *eos_ids(self.causal_lm.generation_config)})
        pad = eos[0] if eos else 0
        ids, mask = left_pad([prompt.tolist() for prompt in prompts], pad, device)
        config = GenerationConfig(
            do_sample=True, temperature=temperature, top_k=0, top_p=1.0, max_new_tokens=max_new_tokens,
            pad_token_id=pad, eos_token_id=eos or None, use_cache=True,
        )  # fmt: skip
        was_training = self.model.training
        self.model.eval()
        try:
            out = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        finally:
            self.model.train(was_training)
        answers = []
        for row in out[:, ids.shape[1] :].cpu():
            ends = torch.isin(row, row.new_tensor(eos)).nonzero()
            answers.append(row[: int(ends[0]) + 1] if len(ends) else row)
        return answers

    @torch.no_grad()
    def _check_lm_head(self) -> None:
        """Raise ModelLoadError unless :meth:`logits` of :meth:`hidden` is what the model itself computes."""
        model = self.causal_lm
        was_training = model.training
        model.eval()
        probe = torch.arange(4, device=model.device)[None] % self.vocab_size
        theirs = model(input_ids=probe, use_cache=False).logits[..., : self.common].float()
        ours = self.logits(self.hidden(probe)).float()
        model.train(was_training)
        if not torch.allclose(ours, theirs, atol=1e-2 * float(theirs.abs().max()), rtol=1e-2):
            raise ModelLoadError(
                f"{self.name} ({self.config.model_type}): its LM head does more than a linear map, a scale and a soft "
                "cap, so it cannot be trained here. Use another small model."
            )


def _adapted(model: Any, source: str, lora: Mapping[str, Any]) -> Any:
    """The model with a fresh LoRA adapter, whose saved config names ``source`` as base model."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ModelLoadError("lora needs peft: pip install fsd-toolkit[train].") from error
    options = {**LORA_DEFAULTS, **lora}
    unknown = sorted(set(options) - set(inspect.signature(LoraConfig).parameters))
    if unknown:
        raise DataError(f"lora has no option {', '.join(unknown)}; see peft.LoraConfig.")
    adapted = get_peft_model(model, LoraConfig(**options))
    adapted.peft_config["default"].base_model_name_or_path = source
    return adapted
