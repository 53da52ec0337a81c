"""SafeAILab/EAGLE's own training step (EAGLE-1 and -2), run from a checkout of its repository.

Nothing of it is copied here. The model is imported from ``eagle/model/cnets1.py``. ``eagle/train/main.py`` is a script
that trains when it is imported, so the statements of its step (loss, optimiser, forward to ``optimizer.step()``) are
taken out of its syntax tree and executed as they stand. What stands in for the rest of that script:

- ``accelerator``: on one device accelerate's ``accumulate`` does nothing at every step, ``backward`` is the loss's and
  ``clip_grad_value_`` torch's.
- bf16 as accelerate does it: the forwards of model and LM head run under autocast and give fp32. The frozen LM head is
  stored in bf16, which spares them converting it twice a step and changes no number.
- the configuration, as plain attributes: the model reads nothing else of it.
- the batch, in the form of their dataset and collator (:func:`eagle_batch`).
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, get_linear_schedule_with_warmup

from fsd_infer.errors import FsdError
from fsd_infer.heads.head import EagleHead
from fsd_train.unroll import supervised

REPOSITORY = "https://github.com/SafeAILab/EAGLE"
COMMIT = "cb7e0841fe0c206c6ed74a197ad5e2a1f13f5a2b"  # what this file was written for
MODEL, SCRIPT = "eagle/model/cnets1.py", "eagle/train/main.py"
_TAKEN = (
    "train_config", "top_accuracy", "compute_loss", "criterion", "optimizer",
    "num_warmup_steps", "total_steps", "is_warmup",
)  # fmt: skip


class _Accelerator:
    """What their step calls of accelerate; ``clip`` False keeps the raw gradients."""

    clip = True

    def accumulate(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip_grad_value_(self, parameters: Any, value: float) -> None:
        if self.clip:
            nn.utils.clip_grad_value_(parameters, value)


def checkout_facts(checkout: str | Path) -> dict[str, Any]:
    """Repository, commit (None without git) and checksums of the files used. Raises FsdError if they are not there."""
    root = Path(checkout)
    for name in (MODEL, SCRIPT):
        if not (root / name).is_file():
            raise FsdError(
                f"{root} has no {name}: give a checkout of EAGLE, `git clone {REPOSITORY}` and `git checkout {COMMIT}`."
            )
    commit = None
    if (root / ".git").exists():
        done = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True)
        commit = done.stdout.strip() or None
    digests = {name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in (MODEL, SCRIPT)}
    return {"repository": REPOSITORY, "commit": commit, "sha256": digests}


def _load_model_class(root: Path) -> type[nn.Module]:
    """Their ``Model``, from a package of its own name so that nothing installed is mistaken for it."""
    package = f"_eagle_{zlib.crc32(str(root.resolve()).encode()):08x}"
    if package not in sys.modules:
        folder = root / "eagle" / "model"
        spec = importlib.util.spec_from_file_location(
            package, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules[package] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[package])
    found: type[nn.Module] = importlib.import_module(f"{package}.cnets1").Model
    return found


def _take(path: Path) -> tuple[list[Any], Any, Any]:
    """Of their script: (code of the definitions _TAKEN, code of the step, code of the accuracies logged behind it)."""
    tree = ast.parse(path.read_text(), str(path))

    def code(*nodes: ast.stmt) -> Any:
        return compile(ast.Module(list(nodes), []), str(path), "exec")

    taken: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            taken[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            taken[node.targets[0].id] = node
    loops = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.For) and any(getattr(part, "id", "") == "train_loader" for part in ast.walk(node.iter))
    ]
    body = loops[0].body if loops else []
    missing = [name for name in _TAKEN if name not in taken]
    if missing or len(body) < 2 or not all(isinstance(node, ast.With) for node in body[:2]):
        raise FsdError(f"{path} is not the script this benchmark knows: check out commit {COMMIT} of {REPOSITORY}.")
    return [code(taken[name]) for name in _TAKEN], code(body[0]), code(body[1])


def _autocast(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: Any, **options: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = forward(*args, **options)
        return out.float()

    return run


def eagle_batch(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Our batch in the form of their collator: the same predictions are supervised.

    Position i has token i+1 and feature i and estimates feature i+1. It counts where ours does (see
    :mod:`fsd_train.unroll`); theirs leaves that to whoever makes the data. Their sequences keep a last position
    without a target, which never counts.

    Args:
        batch: ``input_ids``, ``attention_mask``, ``loss_mask`` [B, M] and ``features`` [B, M, H].
    """
    pad = nn.functional.pad
    features = batch["features"].float()
    return {
        "input_ids": pad(batch["input_ids"][:, 1:], (0, 1)),
        "hidden_states": features,
        "target": pad(features[:, 1:], (0, 0, 0, 1)),
        "attention_mask": batch["attention_mask"],
        "loss_mask": pad(supervised(batch["loss_mask"], 1)[0].long(), (0, 1)),
    }


class EagleStep:
    """One optimiser step of theirs on a batch of :func:`eagle_batch`.

    Args:
        checkout: directory of the repository.
        head: ours, in the public layout with ``fc_bias``; the weights are copied.
        embedding: [V, H] of the target.
        lm_head: [V, H] (or the rows of a reduced vocabulary) of the target.
        lr: learning rate at the end of their warm-up.
        half: bf16 mixed precision.
        recompute: their gradient checkpointing, which they always train with.
        accuracies: also run what their loop computes for its log after every step (top-3 accuracies).
    """

    def __init__(
        self,
        checkout: str | Path,
        head: EagleHead,
        embedding: Tensor,
        lm_head: Tensor,
        lr: float = 3e-5,
        half: bool = False,
        recompute: bool = True,
        accuracies: bool = False,
    ) -> None:
        root = Path(checkout)
        checkout_facts(root)
        definitions, self._step, self._log = _take(root / SCRIPT)
        model = self._model(_load_model_class(root), head, embedding)
        model.gradient_checkpointing = recompute
        projection = nn.Linear(lm_head.shape[1], lm_head.shape[0], bias=False, device="meta")
        projection.weight = nn.Parameter(lm_head.to(torch.bfloat16 if half else torch.float32), requires_grad=False)
        if half:
            model.forward, projection.forward = _autocast(model.forward), _autocast(projection.forward)  # type: ignore[method-assign]
        self.model, self.accuracies, self.accelerator = model, accuracies, _Accelerator()
        args = SimpleNamespace(lr=lr, bs=1, gradient_accumulation_steps=1, tmpdir="", cpdir="", configpath="")
        # their script's globals; like there, a step's logits live until the next step makes new ones
        names: dict[str, Any] = {
            "torch": torch, "nn": nn, "optim": torch.optim, "args": args, "accelerator": self.accelerator,
            "model": model.train(), "head": projection, "top_3acc": [0, 0, 0], "correct": 0, "total": 0,
        }  # fmt: skip
        for definition in definitions:
            exec(definition, names)
        names["scheduler"] = get_linear_schedule_with_warmup(
            names["optimizer"], names["num_warmup_steps"], names["total_steps"]
        )
        self._names = names

    @staticmethod
    def _model(kind: type[nn.Module], head: EagleHead, embedding: Tensor) -> nn.Module:
        values = dict(head.config.layer)
        layer = AutoConfig.for_model(values.pop("model_type"), **values)
        config = SimpleNamespace(
            vocab_size=len(embedding),
            hidden_size=head.config.hidden_size,
            num_hidden_layers=head.config.num_layers,
            rope_theta=layer.rope_parameters["rope_theta"],
            rope_scaling=None,
            pretraining_tp=1,
            pad_token_id=None,
            **{
                name: getattr(layer, name)
                for name in (
                    "intermediate_size", "num_attention_heads", "num_key_value_heads", "hidden_act",
                    "max_position_embeddings", "rms_norm_eps",
                )
            },
        )  # fmt: skip
        model: nn.Module = kind(config)
        found = model.load_state_dict(dict(head.named_parameters()), strict=False)
        if found.unexpected_keys or found.missing_keys != ["embed_tokens.weight"]:
            raise FsdError(f"EAGLE's model and ours have different weights: {found}. Check out commit {COMMIT}.")
        model.get_parameter("embed_tokens.weight").data = embedding.float()
        return model

    def __call__(self, data: dict[str, Tensor]) -> Tensor:
        """Forward, loss, backward, clipping, optimiser; returns the loss."""
        self._names["data"] = data
        exec(self._step, self._names)
        if self.accuracies:
            exec(self._log, self._names)
        loss: Tensor = self._names["loss"]
        return loss.detach()

    def gradients(self, data: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        """(loss, gradient of each weight before clipping). This is a step, too: use a fresh instance."""
        self.accelerator.clip = False
        loss = float(self(data))
        return loss, {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
