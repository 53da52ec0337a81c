"""Compile for a GPU, without one, what our Triton wrappers would launch: `python -m tests.triton_builds 90`.

Prints a JSON object per launch: kernel, bytes of shared memory, registers and bytes of spilled registers (stack).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from benchmarks.few_rows import TILES, product
from fsd_core.divergence import divergence
from fsd_core.sampling import Rest
from fsd_infer.backends.cuda import attention, clipped, compare, draws, functions, kernels, layer, mixed, trees, walk
from fsd_infer.rules import RoundInput, RuleInputs, TokenHistory
from fsd_infer.rules.vocab_rows import VocabRows
from fsd_infer.trees.tree import DraftTree

TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages")


class Compiler:
    """Stands in for every launch: compiles the kernel for the arguments that it would be launched with."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self.label, self.known = "", set[Any]()

    def __call__(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **others: Any) -> None:
        options = {name: others.pop(name) for name in OPTIONS if name in others}
        given = dict(zip(kernel.arg_names, args, strict=False)) | others
        constants = {p.name: given[p.name] for p in kernel.params if p.is_constexpr}
        fixed = {p.name for p in kernel.params if not p.do_not_specialize}
        constants |= {name: 1 for name, value in given.items() if name in fixed and type(value) is int and value == 1}
        signature = {name: "constexpr" if name in constants else _type(given[name]) for name in kernel.arg_names}
        aligned = [name for name, value in given.items() if name in fixed - {*constants} and _is_aligned(value)]
        key = kernel.__name__, *signature.values(), *constants.values(), *aligned, *options.values()
        if key in self.known:
            return
        self.known.add(key)
        attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        built = triton.compile(source, target=self.target, options=options)
        registers, stack = _resources(built.asm["cubin"])
        print(json.dumps({
            "kernel": kernel.__name__, "of": self.label, "shared": built.metadata.shared, "registers": registers,
            "stack": stack,
        }), flush=True)  # fmt: skip


def _type(value: Any) -> str:
    return TYPES[value.dtype] if isinstance(value, Tensor) else "fp32" if isinstance(value, float) else "i32"


def _is_aligned(value: Any) -> bool:
    return isinstance(value, Tensor) or type(value) is int and value % 16 == 0


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with TemporaryDirectory() as directory:
        file = Path(directory, "kernel.cubin")
        file.write_bytes(cubin)
        said = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


def launch_all(compiler: Compiler, widths: list[int], dtypes: list[torch.dtype], most: bool) -> None:
    """Call each wrapper with the shapes of a round: a chain's node, and 60 nodes."""
    lengths = torch.tensor([600])
    for tile in TILES:
        compiler.label = str(tile)
        product(*torch.empty(2, 1, 4096, dtype=torch.bfloat16), tile)
    for dtype in dtypes:
        for width in widths:
            pool = torch.empty(2, 1, 8, 1024, width, dtype=dtype)
            for count in (1, 60):
                query = torch.empty(1, count, 32, width, dtype=dtype)
                visible_after, positions = torch.ones(1, count, count, dtype=torch.bool), torch.arange(count)[None]
                for window, softcap in ((0, 0.0), (128, 30.0))[: 1 + most]:
                    compiler.label = f"{dtype} width {width} nodes {count} window {window}"
                    attention.tree_attention(
                        query,
                        pool[0],
                        pool[1],
                        lengths,
                        visible_after,
                        0.1,
                        positions,
                        window,
                        softcap,
                        8 if count == 1 else 2,
                    )
        compiler.label = str(dtype)
        pool, angles = torch.empty(2, 1, 8, 1024, 128, dtype=dtype), torch.empty(1, 60, 128, dtype=dtype)
        qkv, slots = torch.empty(1, 60, 48 * 128, dtype=dtype), torch.arange(60)[None]
        for norms in (None, (angles[0, 0], angles[0, 0])):
            layer.rotate_and_store(qkv, (angles, angles), norms, 1e-5, pool[0], pool[1], slots)
        x = torch.empty(60, 4096, dtype=dtype)
        for delta in (None, x):
            layer.add_norm(x, delta, x[0], 1e-5)
        layer.silu_mul(torch.empty(60, 2 * 14336, dtype=dtype))
        layer.rotary_angles(slots, torch.empty(64), 1.0, dtype)
        trees.slot_masks(lengths, trees.ancestors(slots), 1024)
        kernels.topk_logprobs(torch.empty(10, 32000, dtype=dtype), 10)
        kernels.row_stats(torch.empty(60, 128256, dtype=dtype), torch.ones(60, dtype=torch.bool))
        for count in (60, 128):
            walk.exact_walk(logits := torch.empty(1, count, 128256, dtype=dtype), sampled_inputs(logits))
        draft = torch.empty(1, 10, 32000, dtype=dtype)
        accept, ancestors, free = torch.empty(1, 10), torch.ones(1, 10, 50, dtype=torch.bool), torch.tensor([60])
        mixed.mixed_children(draft, 10, accept, ancestors, ancestors[:, 0], free, (1.0, 1.0), -4.0)
        draws.sample_rows(draft, accept, ancestors[..., 0])
    clipped.search_clipped(*torch.empty(3, 60, 128256), 24, 1e-5)
    inputs = sampled_inputs(torch.empty(1, 60, 128256))
    none, tree, wide = torch.tensor([0]), inputs.tree, torch.empty(1, 60, dtype=torch.double)
    inputs.logprob_gap = inputs.log_p = inputs.log_q = tree.scores
    inputs.is_drawn = tree.drawn
    functions.accept_prob_under(wide, wide, wide, inputs)
    functions.accepted_path(wide, wide, tree.drawn, wide, tree.drawn[:, :1], inputs)
    functions.biased_sampled(wide, inputs, tree.drawn)
    tree.fixed, at = torch.zeros(1, 51, 9, dtype=torch.long), VocabRows.every(inputs).reduced()
    functions.emitted(at.p, at)
    functions.not_above_p(at.p, at.p, at.fixed)
    functions.reduced_drafts(at.p, tree.parents, at)
    functions.reduced_rows(inputs.round.scores, at)
    for inputs.greedy in (False, True):
        inputs.accept_prob, given = tree.drawn, (tree.drawn, tree.drawn, tree.drawn, 1.0, inputs)
        functions.tilted_bias(wide, wide[:, :1], *given)
    functions.accepted_path(tree.drawn, tree.drawn, tree.drawn, wide, tree.drawn[:, :1], inputs)
    texts, contexts = TokenHistory([[1] * 600]), slots[0]
    functions.completes_ngram(tree.tokens, texts, tree, 4)
    functions.repeating_tokens(0 * contexts, contexts, texts, tree, 4, 32001, contexts)
    for count, columns in ((1, 32000), (10, 64)):
        draft = torch.empty(1, count, columns)
        accept, ancestors = torch.empty(1, count), torch.ones(1, count, 0, dtype=torch.bool)
        mixed.mixed_children(draft, 10, accept, ancestors, ancestors[:, 0], none, (1.0, 1.0), -4.0)
        draws.sample_rows(draft, accept, accept > 0)
    functions.keep_nodes(tree.tokens, tree.parents, tree.scores, tree.q_index, tree.tokens, tree.drawn, slots)
    for kind in compare.KINDS[:-3] + compare.KINDS[-2:]:  # residuals are compared above
        functions.divergence_rows(torch.empty(60, 128256), torch.empty(60, 128256), divergence(kind))
    draws.draw_rest(Rest(torch.empty(1, 1, 128256), none, torch.ones(1), slots), torch.empty(1))


def sampled_inputs(logits: Tensor) -> RuleInputs:
    """A tree of some nodes [1, N], of which some may be drawn from 32,000 ids."""
    numbers = torch.zeros(logits.shape[:2], dtype=torch.long)
    q, scores = torch.empty(1, 51, 32000), torch.empty(logits.shape[:2])
    tree = DraftTree(numbers, numbers, scores, q.bfloat16(), numbers, torch.arange(32000), q, drawn=numbers > 0)
    tree.depth_bound = 6
    return RuleInputs(RoundInput(tree, logits, logits, False, torch.empty(*numbers.shape, 3)))


def main(capability: str, *names: str) -> None:
    compiler = Compiler(int(capability))
    JITFunction.run = lambda self, *args, **others: compiler(self, *args, **others)
    if names:  # of dtypes: everything
        launch_all(compiler, [64, 96, 128, 256], [getattr(torch, name) for name in names], most=True)
    else:
        launch_all(compiler, [128], [torch.bfloat16], most=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
