"""The strategies of ``trainer.strategy``, and helpers for training on several devices."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from fsd_core.errors import CheckpointError, DataError
from fsd_infer.targets.target import Target
from fsd_train.checkpoints import callbacks_of, check_weights, read_checkpoint

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch.distributed.device_mesh import DeviceMesh

_MARK = "fsd_sharded_optimizer"  # in checkpoints of ShardedStrategy
DEEPSPEED_STAGES = {"deepspeed": 2, "deepspeed_stage_1": 1, "deepspeed_stage_2": 2, "deepspeed_stage_3": 3}


def named_strategy(name: str) -> str | Strategy:
    """Return the strategy of a name in a recipe, or the name itself for Lightning's own.

    - ``fsdp`` is :class:`ShardedStrategy`, because Lightning's refuses CPUs and clipping by norm.
    - ``deepspeed_stage_1`` to ``_3`` are Lightning's, with a batch size of 1 for DeepSpeed's throughput log, because
      our batches are budgets of tokens.

    Raises:
        DataError: DeepSpeed is not installed.
    """
    if name == "fsdp":
        return ShardedStrategy()
    if name in DEEPSPEED_STAGES:
        if importlib.util.find_spec("deepspeed") is None:
            raise DataError(f"strategy {name} needs DeepSpeed. Install it: pip install 'fsd-toolkit[deepspeed]'.")
        from lightning.pytorch.strategies import DeepSpeedStrategy

        return DeepSpeedStrategy(stage=DEEPSPEED_STAGES[name], logging_batch_size_per_gpu=1)
    return name


class ShardedStrategy(ModelParallelStrategy):
    """Strategy that shards head, gradients, optimizer state and the frozen target's layers by PyTorch's FSDP2.

    The target's embeddings, final norm and LM head stay whole on each device, because losses read their rows. A
    checkpoint is one file with whole tensors, which `fsd-train export` and other strategies read. Checkpoints of other
    strategies are refused, because their optimizer state orders parameters differently. Runs on CUDA (nccl) and on CPU
    (gloo).

    Args:
        options: options of Lightning's ModelParallelStrategy.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(save_distributed_checkpoint=False, **options)

    def setup(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        mesh = init_device_mesh(self.root_device.type, (self.world_size,))
        for child in module.children():
            if any(parameter.requires_grad for parameter in child.parameters()):
                fully_shard(child, mesh=mesh, reshard_after_forward=False)  # an unrolled step runs it many times
                if hasattr(child, "sample"):  # a small LM also runs outside its forward
                    register_fsdp_forward_method(child, "sample")
        target = getattr(module, "target", None)
        if isinstance(target, Target):
            shard_target(target, mesh)
        super().setup(trainer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        checkpoint[_MARK] = True
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None
        stored = read_checkpoint(checkpoint_path)
        if _MARK not in stored:
            raise CheckpointError(
                f"{checkpoint_path} was written by another strategy than fsdp. Resume it with that one, or start from "
                "its exported head as model.initial_head."
            )
        check_weights(module, stored, str(checkpoint_path))
        strict = module.strict_loading
        module.strict_loading = False  # otherwise Lightning misses frozen weights, which an adapter's state omits
        try:
            return super().load_checkpoint(checkpoint_path, weights_only)
        finally:
            module.strict_loading = strict


def shard_target(target: Target, mesh: DeviceMesh) -> None:
    """Shard each decoder layer of a frozen target over the mesh; a layer is whole only while it runs.

    All ranks must then run the target at the same time. A target without layers stays unchanged.
    """
    if any(parameter.is_meta for parameter in target.decoder.parameters()):
        return
    for layer in target.layers(range(int(target.config.num_hidden_layers))):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's state dict with gathered tensors. All ranks must call it, because they exchange shards."""
    zero3_parameters = [parameter for parameter in module.parameters() if hasattr(parameter, "ds_id")]
    if zero3_parameters:  # DeepSpeed, stage 3
        import deepspeed

        with deepspeed.zero.GatheredParameters(zero3_parameters):
            return {name: value.detach().clone() for name, value in module.state_dict().items()}
    if isinstance(module, FSDPModule):
        module.reshard()  # after a forward without a backward it stays whole
    state = module.state_dict()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def is_sharded(module: nn.Module) -> bool:
    """Return whether this process holds only shards of some weights."""
    sharded = any(isinstance(part, FSDPModule) for part in module.modules())
    return sharded or any(hasattr(parameter, "ds_id") for parameter in module.parameters())


@contextmanager
def whole_head(module: Any) -> Iterator[None]:
    """Replace a sharded ``module.head`` by a whole copy within the context. All ranks must enter it."""
    head = getattr(module, "head", None)
    if head is None or not is_sharded(head):
        yield
        return
    with torch.random.fork_rng(devices=[]):
        copy = module.new_head()
    copy.load_state_dict(whole_state(head))
    module.head = copy.to(module.device).train(head.training).requires_grad_(False)
    try:
        yield
    finally:
        module.head = head


def check_ranks(trainer: Trainer) -> None:
    """Raise DataError if the strategy does not support a callback, or starts processes that end in a hang."""
    if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        raise DataError(
            "trainer.strategy: processes that are forked or spawned wait forever where one should end. Use ddp."
        )
    if isinstance(trainer.strategy, ShardedStrategy) and callbacks_of(trainer, WeightAveraging):
        raise DataError("strategy fsdp does not support weight averaging. Omit the callback, or use ddp.")
