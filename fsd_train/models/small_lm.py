"""A small causal LM as a thing to train: its logits for any loss, its own answers, LoRA adapters in and out."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from fsd_core.errors import DataError, ModelLoadError, NonFiniteLogitsError, foreign_errors, imported
from fsd_core.files import disk_errors, write_text
from fsd_infer.drafters.from_target import PREFIX, FromTarget
from fsd_infer.drafters.lm import check_same_vocabulary
from fsd_infer.heads.formats import read_config
from fsd_infer.heads.kinds import kind_of
from fsd_infer.heads.stored_parts import CONFIG
from fsd_infer.recurrent.mixers import recurrent_layers
from fsd_infer.targets.loading import load_target
from fsd_infer.targets.masks import fixed_positions
from fsd_infer.targets.stack import layer_list
from fsd_infer.targets.target import Target
from fsd_infer.targets.token_ids import eos_ids, left_pad
from fsd_train.checkpoints import RECORD
from fsd_train.losses import LMHead
from fsd_train.packed import TextMask, forward_packed, supports_packing

EXPORT_DTYPE = torch.bfloat16
LORA_DEFAULTS: dict[str, Any] = {"task_type": "CAUSAL_LM", "r": 16, "lora_alpha": 32, "target_modules": "all-linear"}


@dataclass(frozen=True)
class LogitsHead(LMHead):
    """The target's LM head for features [..., H], and the identity for a drafter's logits [..., Vd].

    A small LM passes its logits to any loss as estimates, so that gradients reach all of its weights. The last
    dimension distinguishes features from logits.
    """

    def __call__(self, hidden: Tensor) -> Tensor:
        if hidden.shape[-1] == self.weight.shape[0]:
            return hidden.to(torch.float32, copy=True)  # losses set requires_grad on it
        return super().__call__(hidden)

    def grad_hidden(self, logits: Tensor, grad: Tensor) -> Tensor:
        return grad


class SmallLM(nn.Module):
    """A causal LM in training, with all weights or with a LoRA adapter.

    Args:
        source: directory, hub id or built-in name, or "self:layers=..." for layers of ``load_target_copy``.
        target: target with the same vocabulary.
        lora: options of ``peft.LoraConfig`` in addition to :data:`LORA_DEFAULTS`; None: train all weights.
        load_target_copy: loads another copy of the target in a dtype, with its layers.

    Raises:
        VocabularyMismatchError: the vocabularies differ.
        ModelLoadError: the model cannot be loaded, cannot draft, or peft is missing.
        DataError: an unknown LoRA option, or a part of the target that cannot be trained.
    """

    draft_ids: Tensor | None

    def __init__(
        self,
        source: str,
        target: Target,
        lora: Mapping[str, Any] | None,
        load_target_copy: Callable[[torch.dtype], Target],
    ) -> None:
        super().__init__()
        model: Any
        if source.startswith(PREFIX):
            pruned = _part_of(source, lora, load_target_copy)
            model, self.tokenizer = pruned.model, pruned.tokenizer
        else:
            _check_kind(source)
            model, self.tokenizer = load_target(source, dtype=torch.float32, device="cpu")
        if recurrent_layers(model):
            raise ModelLoadError(
                f"model.drafter {source} has recurrent layers, with which a small LM does not draft. Train one without "
                "such layers, or a head."
            )
        self.name = source
        self.config = model.config.get_text_config(decoder=True)
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        common = self._common(target)
        if lora is None:
            self.model: Any = model.requires_grad_(True)
        else:
            self.model = _adapted(model, source, lora)
        self.model.train()
        # padding rows of only one of the two vocabularies are never drafted
        ids = torch.arange(common) if common < target.vocab_size else None
        self.register_buffer("draft_ids", ids, persistent=False)
        self.common = common
        self._check_lm_head()
        supports_packing(self.hidden, self.causal_lm)  # found before the weights are sharded

    def _common(self, target: Target) -> int:
        """Return the number of tokens in both vocabularies. Raises VocabularyMismatchError."""
        check_same_vocabulary(self, target)
        common = min(self.vocab_size, target.vocab_size)
        if common == target.hidden_size:
            raise ModelLoadError(
                f"{target.name} has as many tokens as hidden dimensions ({common}), so logits and features have "
                "the same shape. Pad one of the two vocabularies."
            )
        return common

    @property
    def causal_lm(self) -> Any:
        """The transformers model, with adapter layers inside."""
        return self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers."""
        return list(layer_list(self.causal_lm.get_decoder(), int(self.config.num_hidden_layers)) or ())

    @property
    def fixed_positions(self) -> int | None:
        return fixed_positions(self.config)

    def lm_head_rows(self, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias, like :meth:`fsd_infer.targets.target.Target.lm_head_rows`."""
        head = self.causal_lm.get_output_embeddings()
        return head.weight, getattr(head, "bias", None)

    def forward(self, ids: Tensor, mask: TextMask, positions: Tensor) -> Tensor:
        """Return logits [N, Vd] at positions [N] of a packed sequence of ids [1, M] with its mask."""
        hidden = forward_packed(self.hidden, self.causal_lm, ids, mask)[0]  # [M, H']
        return self.logits(hidden.index_select(0, positions))

    def hidden(self, ids: Tensor, **inputs: Any) -> Tensor:
        """Return the inputs of the LM head [B, M, H'] for ids [B, M]; other ``inputs`` go to the model's forward."""
        return self.causal_lm.get_decoder()(input_ids=ids, use_cache=False, **inputs)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., Vd] of hidden [..., H'] over ``draft_ids`` or the common vocabulary."""
        scaling = LMHead.of(self)  # type: ignore[arg-type]  # it uses only config and lm_head_rows
        lm_head = self.causal_lm.get_output_embeddings()
        if self.draft_ids is None or len(self.draft_ids) == self.common:
            return scaling.scale_and_cap(lm_head(hidden)[..., : self.common])
        bias = None if lm_head.bias is None else lm_head.bias[self.draft_ids]
        return scaling.scale_and_cap(nn.functional.linear(hidden, lm_head.weight[self.draft_ids], bias))

    def merged(self, dtype: torch.dtype) -> Any:
        """Copy as a plain transformers model, with adapters merged into the weights."""
        model = copy.deepcopy(self.model)
        if hasattr(model, "peft_config"):
            model = model.merge_and_unload()
        return model.to(dtype).eval().requires_grad_(False)

    def trained(self) -> set[str]:
        """Return the names of the trained parameters: all, or the adapter's."""
        return {name for name, parameter in self.named_parameters() if parameter.requires_grad}

    def export(self, directory: Path, record: Mapping[str, Any]) -> Path:
        """Write a directory for :func:`fsd_infer.targets.loading.load_target`, with ``record`` as training.json.

        Without LoRA it is a transformers directory in bf16, with the tokenizer if there is one. With LoRA it is an
        adapter directory in bf16 whose adapter_config.json names the base model like ``source``.
        """
        directory.mkdir(parents=True, exist_ok=True)
        with disk_errors(directory):
            self._save(directory)
        write_text(directory / RECORD, json.dumps(record, indent=2, default=str) + "\n")
        return directory

    def _save(self, directory: Path) -> None:
        if not hasattr(self.model, "peft_config"):
            self.merged(EXPORT_DTYPE).save_pretrained(directory)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(directory)
        else:
            # otherwise peft looks up the base model on the hub, to see whether its vocabulary grew
            state = {name: value.to(EXPORT_DTYPE) for name, value in self.model.state_dict().items() if "lora_" in name}
            self.model.save_pretrained(directory, save_embedding_layers=False, state_dict=state)
            (directory / "README.md").unlink(missing_ok=True)  # peft's empty model card

    @torch.no_grad()
    def sample(
        self, prompts: list[Tensor], max_new_tokens: int, temperature: float, eos_token_ids: list[int]
    ) -> list[Tensor]:
        """Sample an answer [A] to each prompt [P], with its end-of-sequence token, A ≥ 1.

        Prompts and answers are in host memory. Draws come from torch's global generator.
        """
        device = self.causal_lm.device
        eos = sorted({*eos_token_ids, *eos_ids(self.causal_lm.generation_config)})
        pad_id = eos[0] if eos else 0
        ids, mask = left_pad([prompt.tolist() for prompt in prompts], pad_id, device)
        config = GenerationConfig(
            do_sample=True, temperature=temperature, top_k=0, top_p=1.0, max_new_tokens=max_new_tokens,
            pad_token_id=pad_id, eos_token_id=eos or None, use_cache=True,
        )  # fmt: skip
        was_training = self.model.training
        self.model.eval()
        try:
            output = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        finally:
            self.model.train(was_training)
        answers = []
        for row in output[:, ids.shape[1] :].cpu():
            ends = torch.isin(row, row.new_tensor(eos)).nonzero()
            answers.append(row[: int(ends[0]) + 1] if len(ends) else row)
        return answers

    @torch.no_grad()
    def _check_lm_head(self) -> None:
        """Raise ModelLoadError unless :meth:`logits` of :meth:`hidden` equals the model's own logits, and not NaN."""
        model = self.causal_lm
        was_training = model.training
        model.eval()
        probe = torch.arange(4, device=model.device)[None] % self.vocab_size
        theirs = model(input_ids=probe, use_cache=False).logits[..., : self.common].float()
        ours = self.logits(self.hidden(probe)).float()
        model.train(was_training)
        if theirs.isnan().any():
            raise NonFiniteLogitsError(f"model.drafter {self.name} computes NaN. Check its weights, or use another.")
        if not torch.allclose(ours, theirs, atol=1e-2 * float(theirs.abs().max()), rtol=1e-2):
            raise ModelLoadError(
                f"the LM head of {self.name} ({self.config.model_type}) is more than a linear map, a scale and a soft "
                "cap. Use another small LM."
            )


def _check_kind(source: str) -> None:
    """Raise ModelLoadError if ``source`` is the directory of a draft head."""
    if (Path(source) / CONFIG).is_file() and kind_of(read_config(Path(source))) is not None:
        raise ModelLoadError(
            f"model.drafter {source} is a draft head. Start from it with fsd_train.models.EagleModule and "
            "model.initial_head, or give a small LM."
        )


def _part_of(source: str, lora: Mapping[str, Any] | None, load_target_copy: Callable[[torch.dtype], Target]) -> Target:
    """Return some layers of another copy of the target, with tensors of their own."""
    from_target = FromTarget.parse(source)
    if from_target.bits is not None:
        raise DataError(f"model.drafter {source}: training does not keep weights of a few bits. Leave bits out.")
    if lora is not None:
        raise DataError(f"model.drafter {source} is not a model that an adapter can name. Leave model.lora out.")
    return from_target.of(load_target_copy(torch.float32), source)


def _adapted(model: Any, source: str, lora: Mapping[str, Any]) -> Any:
    """Add a new LoRA adapter, whose saved config names ``source`` as base model."""
    peft = imported("peft", "model.lora", "train", ModelLoadError)
    options = {**LORA_DEFAULTS, **lora}
    unknown = sorted(set(options) - set(inspect.signature(peft.LoraConfig).parameters))
    if unknown:
        raise DataError(f"model.lora has no option {', '.join(unknown)}. See peft.LoraConfig.")
    with foreign_errors(DataError, "model.lora: {why}"):
        adapted = peft.get_peft_model(model, peft.LoraConfig(**options))
    adapted.peft_config["default"].base_model_name_or_path = source
    return adapted
