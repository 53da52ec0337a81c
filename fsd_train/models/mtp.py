"""The training of an MTP layer as a LightningModule: the target's own, or a new one.

The layer drafts each depth by itself, so it is trained on its own outputs over ``unroll_steps`` with falling weights
(FastMTP, arXiv 2509.18362). Unlike there, later steps attend to the true pairs before their chain, as in decoding.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.optim import AdamW

from fsd_core.errors import DataError
from fsd_core.tensors import to_device
from fsd_infer.drafters import MtpDrafter, TreeShape
from fsd_infer.drafters.mtp import MtpHead, read_layers
from fsd_infer.heads.mtp import find_mtp, in_own_layout
from fsd_infer.heads.mtp_layouts import separate_layout
from fsd_infer.heads.weights import SINGLE
from fsd_infer.targets.target import Target
from fsd_train.data.packs import on_host
from fsd_train.losses import DraftBatch
from fsd_train.models.distillation import DistillationModule
from fsd_train.models.speculators import write_speculator
from fsd_train.models.unroll import plan_chains, unroll
from fsd_train.types import ChainSteps, Share

IN_TARGET = "in-target.safetensors"


class MtpModule(DistillationModule):
    """Trains an MTP layer on the features of a frozen target.

    Args:
        target: built-in name, directory or hub id. If its files have an MTP layer, training continues from it.
        unroll_steps: drafts per chain in the loss, 1 to 7.
        step_decay: base of the weight step_decay^s of step s.
        new: start from a copy of the target's last layer instead, even if the files have an MTP layer.
        optimizer: see :class:`DistillationModule`.
        training: further options of :class:`DistillationModule`.
    """

    head: MtpHead
    of_weights = ("unroll_steps", "new")

    def __init__(
        self,
        target: str,
        unroll_steps: ChainSteps = 3,
        step_decay: Share = 0.6,
        new: bool = False,
        optimizer: OptimizerCallable = lambda params: AdamW(params, lr=1e-4, weight_decay=0.0),
        **training: Any,
    ) -> None:
        super().__init__(target, optimizer=optimizer, unroll_steps=unroll_steps, step_decay=step_decay, **training)
        self.new = new
        self.save_hyperparameters()

    # setting up ----------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Load the target and read or build the layer (idempotent)."""
        if hasattr(self, "head"):
            return
        target = self.target
        if not self.new and find_mtp(target) is not None:
            head = read_layers(target)
            if len(head.layers) > 1 or head.tables[0]:
                raise DataError(
                    f"{self.target_name} has several MTP layers, or one with tables of its own. Set new to true."
                )
        else:
            head = self.new_head()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                self._initialise(head)
        self.head = head.float().requires_grad_(True)

    @torch.no_grad()
    def _initialise(self, head: MtpHead) -> None:
        """Start as the target's last layer on the sum of embedding and state."""
        layer: Any = head.layers[0]
        source = self.target
        if any(parameter.is_meta for parameter in source.decoder.parameters()):  # features come from a cache
            source = self.whole_target(source.dtype)
        last = source.decoder.layers[-1].state_dict()  # type: ignore[union-attr, index]
        block = layer.block.state_dict()
        fitting = {name: value for name, value in last.items() if name in block and block[name].shape == value.shape}
        layer.block.load_state_dict(fitting, strict=False)
        final_norm = self.target.final_norm
        weights: dict[str, Tensor] = {} if final_norm is None else final_norm.state_dict()
        if weights and weights.keys() == layer.norm.state_dict().keys():
            layer.norm.load_state_dict(weights)
        for half in layer.eh_proj.weight.chunk(2, 1):
            half.normal_(std=0.01).add_(0.5 * torch.eye(head.width))

    def new_head(self) -> MtpHead:
        """Build a layer with arbitrary weights. Raises DataError for targets whose last layer does not attend."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            head = MtpHead(self.target, separate_layout(self.target))
            block: Any = head.layers[0].block
            block.apply(self.target.decoder._init_weights)  # transformers makes experts of memory as it finds it
        if not hasattr(block, "self_attn"):
            raise DataError(f"{self.target_name}: its layers are not of a kind that an MTP layer can be made of.")
        return head

    # steps ---------------------------------------------------------------------------------------------------------

    def draft(self, batch: dict[str, Any], steps: int) -> DraftBatch:
        """Run the layer over a batch and return the supervised rows."""
        head: Any = self.head
        plan = plan_chains(
            on_host(batch, "loss_mask")[0], steps, self.step_decay,
            supervised_rows=batch.get("supervised") if self.training else None, static_shapes=self.is_compiled,
        )  # fmt: skip
        rows = plan.rows.to(self.device)
        features, mask = self._target_features(batch)  # [1, M, F]
        final = features[..., : self.target.hidden_size].to(head.layers[0].eh_proj.weight.dtype)  # [1, M, H]
        with torch.no_grad():  # x_{i+1} at position i: [1, M, H]; at the last position it is never read
            embeds = self.target.embed(batch["input_ids"].roll(-1, 1)).to(final.dtype)
        with self._running_compiled([layer.block for layer in head.layers]):
            by_step = unroll(head, embeds, final, mask, len(rows.chains), plan.roots)
        outputs = torch.cat(by_step, dim=1)[0]  # [M + (S-1)·K, H]
        return DraftBatch(
            estimates=outputs.index_select(0, to_device(plan.output, self.device)),  # [R, H]
            features=final[0].index_select(0, rows.position + 1),  # [N, H] f_{i+1}, see unroll
            rows=rows,
            target_lm_head=self.lm_head(),
            compiled=self.is_compiled,
        )

    def make_drafter(self, target: Target, tree: TreeShape | None = None) -> MtpDrafter:
        head: Any = copy.deepcopy(self.head).requires_grad_(False).eval()
        return MtpDrafter(head, target, tree)

    # checkpoints ---------------------------------------------------------------------------------------------------

    def export(self, directory: str | Path, extra: dict[str, Any] | None = None) -> Path:
        """Write the layer in speculators' layout, and as the tensors that go into the target's own checkpoint.

        Their file is :data:`IN_TARGET`, if the target's family has such layers.
        """
        layout, layer = separate_layout(self.target), self.head.layers[0]
        state = {name: value.detach().cpu() for name, value in layer.state_dict().items()}
        if layer.state_first:  # speculators' has [embedding ; state]
            state["eh_proj.weight"] = torch.cat(state["eh_proj.weight"].chunk(2, 1)[::-1], 1)
        state = {name: value.to(torch.bfloat16) for name, value in state.items()}
        files = {SINGLE: {layout.stored(name, 0): value for name, value in state.items()}}
        if (tensors := in_own_layout(self.target, state)) is not None:
            files[IN_TARGET] = tensors
        fields = {
            "architectures": ["MTPSpeculator"], "num_nextn_predict_layers": 1,
            "transformer_layer_config": self.target.config.to_diff_dict(), "training": self.record(extra),
        }  # fmt: skip
        return write_speculator(directory, "mtp", fields, files, self.target_name, self.unroll_steps)
