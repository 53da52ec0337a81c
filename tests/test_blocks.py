"""Weights in blocks of quantised files: the file's own values, products as near as bf16's, models without expansion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor, nn
from torch.nn import functional as F

from fsd_core.errors import ModelLoadError
from fsd_infer import FuzzyDecoder, Target, TreeShape
from fsd_infer.backends.cpu.kernels import FEW_TOKENS
from fsd_infer.backends.cpu.packing import Packed, holds_blocks, pack_stored, packed_of, packed_products
from fsd_infer.backends.cpu.stack import CpuStack
from fsd_infer.drafters import EagleDrafter, NoDrafter
from fsd_infer.heads.head import EagleConfig, EagleHead
from fsd_infer.targets.gguf_file import read_gguf
from fsd_infer.targets.loading import load_target
from fsd_infer.targets.weights import QuantizedWeight, keep_quantized
from fsd_train.models.start import initialise_from
from tests.gguf_toys import FITTING, family_model, tiny_llama, write_gguf
from tests.kernel_toys import CPU, in_each_set, prepare, restore

pytestmark = in_each_set
SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2)}
SCALES |= {"Q2_K": (80, 82), "Q6_K": (208,), "IQ2_XXS": (0,)}  # where a block's fp16 numbers lie
KINDS = [GGMLQuantizationType[name] for name in SCALES]


def random_rows(kind: GGMLQuantizationType, rows: int, depth: int, scale: float = 0.01) -> np.ndarray:
    """Rows of any codes, with scales of one order."""
    block, size = GGML_QUANT_SIZES[kind]
    made = torch.randint(0, 256, (rows, depth // block, size), dtype=torch.uint8).numpy()
    for at in SCALES[kind.name]:
        numbers = ((torch.rand(rows, depth // block) + 0.5) * scale).numpy().astype("<f2")
        made[:, :, at : at + 2] = numbers[..., None].view(np.uint8)
    return made.reshape(rows, -1)


def made_of(kind: GGMLQuantizationType, rows: int, depth: int, bias: bool = False) -> tuple[Packed, Tensor]:
    """A layer that computes by random blocks in another order of rows, and its weight in fp32."""
    stored, order = random_rows(kind, rows, depth), torch.randperm(rows)
    with torch.device("meta"):
        layer = nn.Linear(depth, rows, bias=False, dtype=torch.bfloat16)
    if bias:
        layer.bias = nn.Parameter(torch.randn(rows).bfloat16(), requires_grad=False)
    keep_quantized(layer, QuantizedWeight(int(kind), stored, order))
    assert pack_stored(layer) == 1
    made = packed_of(layer)
    assert made is not None and layer.weight.is_meta
    return made, torch.from_numpy(dequantize(stored, kind))[order]


@pytest.mark.usefixtures("several_threads")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_values_are_the_files_own(kind: GGMLQuantizationType) -> None:
    made, expected = made_of(kind, 192, 512)
    found = made.kernels.rows(made.native, torch.arange(192), torch.float32)
    assert torch.equal(found, expected)
    assert torch.equal(made.dense(), expected.bfloat16())
    some = torch.tensor([[191, 0], [17, 64]])
    assert torch.equal(made.rows(some), expected[some].bfloat16())
    with pytest.raises(IndexError, match="the vocabulary has 192"):
        made.rows(torch.tensor([192]))
    block, size = GGML_QUANT_SIZES[kind]
    bits = {"IQ2_XXS": 4.3, "Q2_K": 5.25}.get(kind.name, 8 * size / block)  # their codes get four bits
    assert made.weight.nbytes <= 1.04 * 192 * 512 * bits / 8, "no more memory than the file takes"


@pytest.mark.usefixtures("several_threads")
@pytest.mark.parametrize(("kind", "bias"), [(kind, not number % 2) for number, kind in enumerate(KINDS)])
def test_products_are_closer_than_those_of_bf16_and_rows_stand_alone(kind: GGMLQuantizationType, bias: bool) -> None:
    made, weight = made_of(kind, 192, 768, bias)
    x = torch.randn(40, 768).bfloat16()
    x[:, 5] *= 50  # as features have outliers
    own = None if made.bias is None else made.bias.double()
    expected = F.linear(x.double(), weight.double(), own)
    plain = nn.Linear(768, 192, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    plain.weight.copy_(weight)
    if bias:
        plain.bias.copy_(made.bias)
    expanded = Packed(plain)
    errors = [float((packed(x).double() - expected).norm() / expected.norm()) for packed in (made, expanded)]
    assert errors[0] <= errors[1] < 5e-3
    assert errors[0] < 2.0e-3, "little beside the rounding of what comes out"
    for rows in range(1, 20):
        some = made(x[:rows])
        assert torch.equal(some, made(x)[:rows]), "a row does not depend on how many there are"
        assert torch.equal(some[-1:], made(x[rows - 1 : rows])), "nor on the others"
    assert torch.equal(made(x.expand(3, 40, 768))[2], made(x)), "nor on the batch"
    many = torch.randn(FEW_TOKENS + 1, 768).bfloat16()
    if made.kernels.name == "avx2":
        assert torch.equal(made(many)[:7], made(many[:7])), "many tokens are multiplied as few are"
    else:
        assert torch.equal(made(many), expanded(many)), "of many tokens: the bf16 product of the expanded weight"
    assert torch.equal(made(x.float()), F.linear(x.float(), made.dense().float(), None if own is None else own.float()))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_what_cannot_be_held(kind: GGMLQuantizationType) -> None:
    block, _ = GGML_QUANT_SIZES[kind]
    assert holds_blocks(kind, 64, 2 * block)
    assert not holds_blocks(kind, 72, block) and not holds_blocks(kind, 64, block + 16)
    assert not holds_blocks(GGMLQuantizationType.Q3_K, 64, 256)
    for bits in (0x7C00, 0xFE01):  # infinity, NaN
        stored = random_rows(kind, 64, block)
        stored[7, SCALES[kind.name][-1] : SCALES[kind.name][-1] + 2] = (bits & 255, bits >> 8)
        with torch.device("meta"):
            layer = nn.Linear(block, 64, bias=False, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="1 scales that are not finite numbers"):
            Packed(layer, QuantizedWeight(int(kind), stored))
    with torch.device("meta"):
        other = nn.Linear(16, 64, bias=False, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="do not take"):
        Packed(other, QuantizedWeight(int(kind), stored))


# models -----------------------------------------------------------------------------------------------------------


def save_model(path: Path, tied: bool = True, family: str = "llama", **kinds: GGMLQuantizationType) -> Path:
    """A GGUF file of a tiny model that the kernels know; its matrices in Q4_1 but for those that are named."""
    sizes: dict[str, Any] = {**FITTING, "scale": 1.0, "head_dim": 64}
    model = tiny_llama(tied, **FITTING) if family == "llama" else family_model(family, **sizes)

    def quantized(name: str, matrix: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
        kind = kinds.get(name.rpartition(".")[2], GGMLQuantizationType.Q4_1)
        if kind.name.endswith("_K"):  # gguf-py only reads them
            return random_rows(kind, *matrix.shape, scale=1e-4), kind
        return quantize(matrix, kind), kind

    return write_gguf(path, model, family, quantized=quantized, facts={"key_length": 64})


def greedy(target: Target, prompt: list[int], drafter: Any = None) -> tuple[list[int], float]:
    decoder = FuzzyDecoder(target, drafter or NoDrafter(target.vocab_size))
    out = decoder.generate([prompt], max_new_tokens=24, do_sample=False)
    return out.sequences[0], out.stats.acceptance_length


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("qwen2", False), ("qwen3", False)])
def test_a_model_decodes_from_its_file(tmp_path: Path, family: str, tied: bool) -> None:
    names = {"token_embd": "Q8_0", "attn_v": "Q5_0", "attn_q": "Q4_K", "attn_k": "Q6_K", "ffn_down": "F16"}
    kinds = {name: GGMLQuantizationType[kind] for name, kind in names.items()}
    path = save_model(tmp_path / "tiny.gguf", tied, family, **kinds)
    expanded, tokenizer = load_target(path, device="cpu", dtype="fp32")
    held, its = load_target(path, device="cpu", reads_blocks=CPU.reads_blocks)
    target, whole = Target(held), Target(expanded)
    assert isinstance(prepare(target, release=True), CpuStack) and target.device == torch.device("cpu")
    assert tokenizer is not None and its is not None and its.get_vocab() == tokenizer.get_vocab()
    packed = packed_products(held)
    assert [weight.ggml_type for weight in packed].count(0) == held.config.num_hidden_layers, (
        "what was not quantised is packed"
    )
    ids = torch.tensor([[3, 9, 200, 40, 41, 7, 7, 100]])
    assert torch.equal(target.embed(ids), whole.embed(ids).bfloat16())
    assert torch.equal(target.lm_head_rows(ids[0])[0], whole.lm_head_rows(ids[0])[0].bfloat16())
    assert target.weights_digest() == whole.weights_digest() and target.vocab_size == whole.vocab_size
    logits, exact = target.features(ids).float(), whole.features(ids)
    rounded = Target(load_target(path, device="cpu")[0]).features(ids).float()
    assert float((logits - exact).norm()) <= 1.1 * float((rounded - exact).norm()) < 0.05 * float(exact.norm())
    torch.manual_seed(1)
    head = EagleHead(EagleConfig.for_target(target, final_norm=True)).bfloat16()
    initialise_from(head, target)
    for prompt in (ids[0].tolist(), torch.randint(3, 200, (FEW_TOKENS + 9,)).tolist()):
        plain, _ = greedy(target, prompt)
        drafted, _ = greedy(target, prompt, EagleDrafter(head, target, TreeShape(3, 3, 8)))
        assert drafted == plain
    restore(target)
    state, expected = held.state_dict(), expanded.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(value, expected[name].bfloat16()) for name, value in state.items()), "restore expands"
    assert (held.lm_head.weight is held.model.embed_tokens.weight) == tied


def test_what_is_expanded_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kinds = {"attn_q": GGMLQuantizationType.Q3_K, "ffn_down": GGMLQuantizationType.F16}
    SCALES["Q3_K"] = (108,)
    path = save_model(tmp_path / "tiny.gguf", **kinds)
    for reads_blocks in (None, CPU.reads_blocks, CPU.reads_blocks):
        load_target(path, device="cpu", reads_blocks=reads_blocks)
    [said] = [record.message for record in caplog.records if record.name == "fsd_infer.targets.weights"]
    assert said.startswith("tiny.gguf: weights are expanded to bf16") and "(2 in Q3_K). A file in Q4_0, " in said


def test_files_that_are_cut_or_wrong(tmp_path: Path) -> None:
    path = save_model(tmp_path / "tiny.gguf")
    content = path.read_bytes()
    broken = tmp_path / "broken.gguf"
    for size in {0, 3, 20, 200, len(content) // 3, len(content) - 1}:
        broken.write_bytes(content[:size])
        with pytest.raises(ModelLoadError, match="broken.gguf is not a readable GGUF file"):
            load_target(broken, device="cpu", reads_blocks=CPU.reads_blocks)
    for old, new, message in (
        (b"blk.1.attn_q", b"blk.9.attn_q", "has no place"),
        (b"blk.1.attn_q", b"blk.0.attn_q", "is there twice"),
        (b"llama.block_count", b"llama.block_cound", "incomplete or invalid"),
        (b"token_embd", b"token_embx", "incomplete or invalid"),
    ):
        broken.write_bytes(content.replace(old, new))
        with pytest.raises(ModelLoadError, match=message) as error:
            load_target(broken, device="cpu", reads_blocks=CPU.reads_blocks)
        assert "\n" not in str(error.value)
    row = bytes(read_gguf(path)[1]["blk.1.ffn_up.weight"].data[3])
    broken.write_bytes(content.replace(row, b"\xff" * len(row)))
    with pytest.raises(ModelLoadError, match="1.mlp.up_proj.weight of the GGUF file has 16 scales that are not fin"):
        FuzzyDecoder.from_pretrained(broken, "none", device="cpu")
