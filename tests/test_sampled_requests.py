"""Requests above temperature 0: tokens have the target's own distribution, whatever drafts and however one asks."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from transformers import GenerationConfig, GenerationMixin, LlamaConfig, LlamaForCausalLM

from fsd_bench.engine import EngineMethod
from fsd_bench.hf import GenerateMethod
from fsd_infer import Drafter, FuzzyDecoder, Target, TreeShape
from fsd_infer.cli.main import main as fsd_infer
from fsd_infer.decoder.requests import prepare
from fsd_infer.drafters import EagleDrafter, GraftedDrafter, LMDrafter
from fsd_infer.drafters.loading import choose_trees, load_drafter
from fsd_infer.heads.config import EagleConfig
from fsd_infer.heads.head import EagleHead
from fsd_infer.rules import parse_rule
from fsd_infer.serving.app import make_app
from fsd_train.cli import main as fsd_train
from fsd_train.data.backends import LocalBackend, RegenerationRequest
from tests.families import CUDA
from tests.rules_toy import ALARM, p_value
from tests.serve_toys import CHAT, COMPLETIONS, asked
from tests.text_toys import save_tiny_chat_target

SIZE, TOKENS, ANSWERS = 5, 3, 450
PROMPTS = [[1, 2, 3], [4, 4, 0]]


def llama(seed: int, context: int = 64) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=SIZE, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=context, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=1.0 if "embed" in name else 0.5 if "lm_head" in name else 0.3)
    return model


def drafter_of(kind: str, target: Target, shape: str) -> Drafter:
    """A drafter by "head", "reduced" (a head of three tokens), "lm" or "short lm" (with a context of five tokens), with
    "+recycle" for grafts.
    """
    main, _, side = kind.partition("+")
    made: Drafter
    if main.endswith("lm"):
        small = llama(7, context=5 if main == "short lm" else 64).to(target.device)
        made = LMDrafter(Target.of(small, None), target, TreeShape.parse(shape) if shape else None)
    else:
        torch.manual_seed(8)
        head = EagleHead(EagleConfig.for_target(target, draft_vocab_size=3 if main == "reduced" else None)).float()
        for parameter in head.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.4)
        if head.draft_ids is not None:
            head.draft_ids.copy_(torch.tensor([0, 1, 4]))
        made = EagleDrafter(head.to(target.device), target, TreeShape.parse(shape))
    return GraftedDrafter(made, load_drafter(side, target)) if side else made


def target_distribution(target: Target, prompt: list[int], options: dict[str, Any]) -> np.ndarray:
    """[SIZE**TOKENS] by transformers' own processors, text by text."""
    processors = prepare(target, [prompt], None, options)[0].processors
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for text, chance in distribution.items():
            ids = torch.tensor([[*prompt, *text]], device=target.device)
            with torch.no_grad():
                scores = target.model(ids).logits[:, -1]
            scores = processors(ids, scores) if processors else scores
            for token, p in enumerate(scores[0].double().softmax(-1).tolist()):
                further = (*text, token)
                longer[further] = chance * p
        distribution = longer
    return np.array([distribution[text] for text in itertools.product(range(SIZE), repeat=TOKENS)])


CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "head": ("head", "3x3x8", "exact", {}),
    "few places": ("head", "4x2x4", "exact", {"temperature": 0.6}),
    "stops early": ("head", "4x3x9x0.7", "exact", {"top_k": 3}),
    "chosen": ("lm", "auto", "exact", {"temperature": 1.4, "min_p": 0.05}),
    "reduced": ("reduced", "3x3x7", "exact", {"top_p": 0.8}),
    "grafts": ("lm+recycle", "2x4x12", "exact", {"top_k": 4, "repetition_penalty": 1.3}),
    "a chain that stops": ("lm", "3x1x4x0.3", "exact:block=true", {"repetition_penalty": 1.5}),
    "penalties": ("head", "3x2x6", "exact", {"repetition_penalty": 0.7, "suppress_tokens": [2]}),
    "block": ("head", "auto", "exact:block=true", {"no_repeat_ngram_size": 2}),
    "a small LM": ("lm", "", "exact", {"top_k": 4, "no_repeat_ngram_size": 2}),
    "a small LM's tree": ("lm", "auto", "exact:block=false", {}),
    "a context that ends": ("short lm", "", "exact", {"temperature": 0.8}),
    "its wide tree": ("short lm", "3x3x8", "exact", {"top_p": 0.9}),
    "no budget": ("head", "3x3x8", "tilted:1:budget=0:draw=true", {"typical_p": 0.9}),
}


@pytest.mark.usefixtures("read_together")
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("name", CASES)
def test_a_request_has_the_targets_distribution(name: str, device: str) -> None:
    kind, shape, rule, options = CASES[name]
    target = Target.of(llama(3).to(device), None)
    drafter = drafter_of(kind, target, "4x3x9" if shape == "auto" else shape)
    decoder = FuzzyDecoder(target, choose_trees(drafter, target) if shape == "auto" else drafter)
    if device == "cuda":
        decoder.use_graphs()
    options = {"do_sample": True, "temperature": 1.0, "max_new_tokens": TOKENS, **options}
    torch.manual_seed(5)
    found = decoder.generate([prompt for prompt in PROMPTS for _ in range(ANSWERS)], rule=rule, **options).sequences
    places = np.array(found) @ SIZE ** np.arange(TOKENS)[::-1]
    for number, prompt in enumerate(PROMPTS):
        own = places[number * ANSWERS : (number + 1) * ANSWERS]
        assert p_value(own, target_distribution(target, prompt, options)) > ALARM


# however one asks: no generation config shapes the distribution -------------------------------------------------------


OWN = {
    "repetition_penalty": 1.9, "no_repeat_ngram_size": 2, "min_p": 0.9, "typical_p": 0.1, "top_k": 1,
    "do_sample": True,
}  # fmt: skip
OWN |= {"temperature": 0.1, "suppress_tokens": [5, 6], "num_beams": 3}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> FuzzyDecoder:
    target = save_tiny_chat_target(tmp_path_factory.mktemp("plain"))
    return FuzzyDecoder.from_pretrained(str(target), "lookup", dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same target with a generation config that would change each of its answers."""
    target = save_tiny_chat_target(tmp_path_factory.mktemp("shaped"))
    config = json.loads((target / "generation_config.json").read_text())
    (target / "generation_config.json").write_text(json.dumps({**config, **OWN}))
    return target


def test_the_config_shapes_nothing_and_is_named(plain: FuzzyDecoder, shaped: Path, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        decoder = FuzzyDecoder.from_pretrained(str(shaped), "lookup", dtype=torch.float32, device="cpu")
    (said,) = [record.getMessage() for record in caplog.records if "generation config" in record.getMessage()]
    assert all(f"{name}=" in said for name in OWN)
    own = decoder.target.model.generation_config
    assert own.repetition_penalty == 1.9, "the toy should have its config"
    greedy = GenerationConfig(repetition_penalty=1.9, max_new_tokens=12)  # a request may name a configuration
    named = decoder.generate("the cat sat", generation_config=greedy).sequences
    assert named == decoder.generate("the cat sat", max_new_tokens=12, repetition_penalty=1.9).sequences
    with TestClient(make_app(decoder)) as client:
        body = {"prompt": "the cat", "max_tokens": 12, "temperature": 0, "repetition_penalty": 1.9}
        text = client.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
        assert text == plain.generate("the cat", chat=False, max_new_tokens=12, repetition_penalty=1.9).texts[0]
        for name, value in (("top_k", 1), ("min_p", 1.0), ("typical_p", 1e-6)):  # one token is left
            body = {**asked(temperature=2, seed=0, max_tokens=6), name: value}
            first = client.post(CHAT, json=body).json()["choices"]
            assert first == client.post(CHAT, json={**body, "seed": 1}).json()["choices"]


Warpers = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def warpers(monkeypatch: pytest.MonkeyPatch) -> list[Warpers]:
    """The name and the numbers of each logits processor of every request, also of those to transformers' generate."""
    found: list[Warpers] = []
    make = GenerationMixin._get_logits_processor

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = make(self, *args, **kwargs)
        numbers = [{k: v for k, v in vars(each).items() if isinstance(v, (int, float))} for each in made]
        found.append([(type(each).__name__, own) for each, own in zip(made, numbers, strict=True)])
        return made

    monkeypatch.setattr(GenerationMixin, "_get_logits_processor", noted)
    return found


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 7, "top_p": 0.9}])
def test_every_way_to_ask_has_the_same_distribution(
    sampling: dict[str, Any], shaped: Path, warpers: list[Warpers], tmp_path: Path
) -> None:
    """Beside the request's own options nothing counts: neither the model's config nor transformers' top-k of 50."""
    names = {"temperature": "TemperatureLogitsWarper", "top_k": "TopKLogitsWarper", "top_p": "TopPLogitsWarper"}
    right = [(names[name], value) for name, value in sampling.items()]
    rows, flags = tmp_path / "rows.jsonl", [f"--{name.replace('_', '-')}={value}" for name, value in sampling.items()]
    rows.write_text(json.dumps({"prompt": "the cat", "id": "a", **sampling}) + "\n")
    model = f"--target {shaped} --device cpu --dtype fp32 --max-new-tokens 2".split()
    decoder = FuzzyDecoder.from_pretrained(str(shaped), "lookup", dtype=torch.float32, device="cpu")
    bench = ["bench", "--methods", "plain,hf-generate", "--no-warmup", "--json", str(tmp_path / "r.json")]
    files = ["--prompts", str(rows), "--output", str(tmp_path / "a.jsonl")]
    with TestClient(make_app(decoder)) as client:
        ways: dict[str, Any] = {
            "python": lambda: decoder.generate("the cat", max_new_tokens=2, **sampling),
            "server": lambda: client.post(CHAT, json={**asked(max_tokens=2), "temperature": 0, **sampling}),
            "generate": lambda: fsd_infer(["generate", "--prompt", "the cat", "--drafter", "lookup", *model, *flags]),
            "bench": lambda: fsd_infer([*bench, "--prompts", str(rows), "--drafter", "none", *model, *flags[:1]]),
            "regenerate": lambda: fsd_train(["regenerate", "--drafter", "none", "--quiet", *files, *model]),
        }
        for way, ask in ways.items():
            warpers.clear()
            assert ask() not in (1, 2), way
            assert len(warpers) == (2 if way == "bench" else 1), way
            wanted = right[:1] if way == "bench" else right  # it has no other option that shapes answers
            for made in warpers:
                assert [name for name, _ in made] == [name for name, _ in wanted], way
                assert all(value in own.values() for (_, own), (_, value) in zip(made, wanted)), way


def test_every_way_to_ask_ends_at_the_tokens_of_the_config(shaped: Path, tmp_path: Path) -> None:
    """At each of them, and not at the tokenizer's eos beside them."""
    decoder = FuzzyDecoder.from_pretrained(str(shaped), "lookup", dtype=torch.float32, device="cpu")
    config, ids = decoder.target.model.generation_config, decoder.encode("the cat sat on the mat")
    config.eos_token_id = None
    ((*free,),) = decoder.generate([ids], max_new_tokens=40).sequences
    first = list(dict.fromkeys(free))  # distinct tokens, in the order of their first places
    assert len(first) > 3, "the toy's answer should have several tokens"
    decoder.tokenizer.eos_token_id, ends = first[1], [first[3], first[2]]
    config.eos_token_id = ends
    right = free[: free.index(first[2]) + 1]
    made = decoder.generate([ids], max_new_tokens=40)
    assert made.sequences == [right] and made.stats.rows[0].finish_reason == "stop"
    job = RegenerationRequest(id="a", messages=[], prompt_ids=ids, temperature=0.0, source="x")
    ((answer,),) = LocalBackend(decoder, 40, 0).answer([[job]], set())
    assert (answer.response_ids, answer.finish_reason) == (right, "stop")
    options = {"max_new_tokens": 40, "do_sample": False}
    for method in (
        EngineMethod("plain", decoder, parse_rule("exact"), decoder.drafter),
        GenerateMethod("hf", decoder.target.model),
    ):
        (found,) = method.answer([ids], options, 0).answers
        assert (found.tokens, found.finish_reason) == (right, "stop")
    with TestClient(make_app(decoder)) as client:
        reply = client.post(COMPLETIONS, json={"prompt": ids, "max_tokens": 40, "temperature": 0}).json()
        assert reply["choices"][0]["finish_reason"] == "stop"
        assert reply["usage"]["completion_tokens"] == len(right)


def test_a_length_of_the_request_is_instead_of_the_models(plain: FuzzyDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    own = plain.target.model.generation_config
    for name, value in (("max_new_tokens", 3), ("max_length", 4)):
        with monkeypatch.context() as patch:
            patch.setattr(own, name, value)
            for asked_for, right in (({}, 3), ({"max_length": 9}, 8), ({"max_new_tokens": 7}, 7)):
                assert prepare(plain.target, [[5]], None, asked_for)[0].max_new_tokens == right
                given = GenerationConfig(**asked_for) if asked_for else None
                assert prepare(plain.target, [[5]], given, {})[0].max_new_tokens == right
