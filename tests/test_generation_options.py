"""Arguments of transformers' ``generate`` through both entries: each is honoured, or refused by name.

Every field of GenerationConfig has a value here. A field that a later version of transformers adds fails
``test_every_field_is_accounted_for`` until it has one, and the loop refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, WatermarkingConfig
from transformers.cache_utils import DynamicCache
from transformers.generation.logits_process import LogitsProcessor
from transformers.generation.stopping_criteria import MaxLengthCriteria

import fsd_infer
from fsd_infer import FsdError, FuzzyConfig, FuzzyDecoder, Target
from fsd_infer.device.cache import cache_argument
from fsd_infer.drafters import LookupDrafter
from tests.families import OracleDrafter, tiny_model
from tests.text_toys import tiny_tokenizer

PROMPT = [5, 6, 7, 5, 6]
LENGTH = 12

# honoured: our greedy answer equals that of generate
MEANINGFUL: dict[str, Any] = {
    "max_length": 9, "max_new_tokens": 7, "min_length": 10, "min_new_tokens": 8, "max_time": 1e-9,
    "repetition_penalty": 1.8, "encoder_repetition_penalty": 1.8, "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2, "bad_words_ids": [[5], [6, 7]], "sequence_bias": {(5,): -10.0, (6, 7): 3.0},
    "suppress_tokens": [5, 6, 7], "begin_suppress_tokens": list(range(1, 40)), "forced_bos_token_id": 3,
    "forced_eos_token_id": 9, "exponential_decay_length_penalty": (2, 1.5), "renormalize_logits": True,
    "remove_invalid_values": True, "watermarking_config": WatermarkingConfig(bias=5.0), "eos_token_id": [9, 52],
    "pad_token_id": 4, "bos_token_id": 1, "return_dict_in_generate": True, "do_sample": False,
    # without effect on an answer
    "use_cache": False, "disable_compile": True, "prefill_chunk_size": 2, "early_stopping": True,
    "length_penalty": 2.0, "decoder_start_token_id": 1, "transformers_version": "5.0.0",
}  # fmt: skip
SAMPLED: dict[str, Any] = {
    "temperature": 1e-4, "top_k": 1, "top_p": 1e-6, "min_p": 0.999999, "top_h": 1e-6, "typical_p": 1e-6,
    "epsilon_cutoff": 0.99999, "eta_cutoff": 0.99999,
}  # fmt: skip
REFUSED: dict[str, Any] = {
    "num_beam_groups": 2, "diversity_penalty": 0.5, "penalty_alpha": 0.6, "dola_layers": "high", "low_memory": True,
    "constraints": [1], "force_words_ids": [[5]], "guidance_scale": 2.0, "output_scores": True, "output_logits": True,
    "output_attentions": True, "output_hidden_states": True, "cache_implementation": "static",
    "cache_config": {"a": 1}, "max_cache_len": 99, "prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 3,
    "num_assistant_tokens": 3, "num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0.1,
    "assistant_lookbehind": 3, "target_lookbehind": 3, "assistant_early_exit": 1, "assistant_ensemble_weight": 0.5,
    "speculation_type": "dflash", "is_assistant": True, "use_mtp": True,
}  # fmt: skip
ELSEWHERE = {  # tested elsewhere, or without a public meaning
    "stop_strings", "token_healing", "num_return_sequences", "num_beams",
    "compile_config", "continuous_batching_config",
    "_from_model_config", "_commit_hash",
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def decoder(model: Any) -> FuzzyDecoder:
    target = Target(model)
    return FuzzyDecoder(target, OracleDrafter(target))


Ask = Callable[..., list[int]]


@pytest.fixture(params=["decoder", "hook"])
def ask(request: pytest.FixtureRequest, model: Any, decoder: FuzzyDecoder) -> Ask:
    """New tokens after PROMPT, through FuzzyDecoder.generate or through transformers' hook."""

    def through_decoder(**options: Any) -> list[int]:
        return decoder.generate(PROMPT, **options).sequences[0]

    def through_hook(**options: Any) -> list[int]:
        hook = dict(custom_generate=fsd_infer.generate, drafter=decoder.drafter)
        return theirs(model, **hook, **options)

    return through_decoder if request.param == "decoder" else through_hook


def theirs(model: Any, **options: Any) -> list[int]:
    made = model.generate(torch.tensor([PROMPT]), **options)
    return (made if isinstance(made, torch.Tensor) else made.sequences)[0, len(PROMPT) :].tolist()


def test_every_field_is_accounted_for() -> None:
    listed = MEANINGFUL.keys() | SAMPLED.keys() | REFUSED.keys() | ELSEWHERE
    assert vars(GenerationConfig()).keys() <= listed, "a field nobody has looked at: it is refused until then"
    assert not MEANINGFUL.keys() & REFUSED.keys()


@pytest.mark.parametrize("name", MEANINGFUL)
def test_honoured_fields_mean_what_they_mean_in_transformers(name: str, model: Any, ask: Ask) -> None:
    lengths = {} if name in ("max_length", "max_new_tokens") else {"max_new_tokens": LENGTH}
    options = {"do_sample": False, **lengths, name: MEANINGFUL[name]}
    if name in ("min_length", "min_new_tokens", "exponential_decay_length_penalty"):
        options["eos_token_id"] = theirs(model, do_sample=False, **lengths)[2]
    assert ask(**options) == theirs(model, **options)


@pytest.mark.parametrize("name", SAMPLED)
def test_honoured_fields_of_sampling(name: str, model: Any, ask: Ask) -> None:
    """Values so extreme that one token remains; eta_cutoff needs a low temperature for it."""
    options = {"do_sample": True, "max_new_tokens": LENGTH, "top_k": 0, name: SAMPLED[name]}
    if name == "eta_cutoff":
        options["temperature"] = 1e-3
    expected = theirs(model, **options)
    assert theirs(model, **options) == expected, "the case should be extreme enough"
    assert ask(seed=0, **options) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_other_fields_are_refused_by_name(name: str, ask: Ask) -> None:
    with pytest.raises(FsdError, match=rf"{name}|ClassifierFreeGuidance") as caught:
        ask(do_sample=False, max_new_tokens=4, **{name: REFUSED[name]})
    assert "\n" not in str(caught.value)


def test_inputs_beside_ids_are_refused(model: Any, decoder: FuzzyDecoder) -> None:
    ids, past, name = torch.tensor([PROMPT]), DynamicCache(), cache_argument(type(model))
    model(ids[:, :3], **{name: past})
    hook: dict[str, Any] = dict(custom_generate=fsd_infer.generate, drafter=decoder.drafter, max_new_tokens=4)
    for given, words in (
        (dict(inputs=ids, inputs_embeds=torch.zeros(1, 5, 32)), "inputs_embeds: give token ids"),
        (dict(inputs_embeds=torch.zeros(1, 5, 32)), "inputs_embeds: give token ids"),
        (dict(inputs=ids, position_ids=torch.arange(5)[None] + 3), "position_ids"),
        ({"inputs": ids, name: past}, f"{name}: give the whole text as ids"),
        (dict(inputs=ids[:0]), "no prompts: give at least one"),
        (dict(inputs=ids, assistant_model=model), "assistant_model: give the small model as drafter"),
        (dict(inputs=ids, streamer=(streamer := _Recorder())), "streamer: give it as stream_to"),
    ):
        with pytest.raises(FsdError, match=words):
            model.generate(**given, **hook)
    assert streamer.ended, "nobody waits for its end"

    def recipe(model: Any, ids: torch.Tensor, **given: Any) -> Any:  # another's loop, which hands it on
        return fsd_infer.generate(model, ids, drafter=decoder.drafter, stream_to=handed, **given)

    handed = _Recorder()
    model.generate(ids, custom_generate=recipe, streamer=handed, max_new_tokens=4)
    assert handed.ended
    made = model.generate(ids, **{name: DynamicCache()}, position_ids=torch.arange(5)[None], **hook)
    assert made[0, 5:].tolist() == theirs(model, do_sample=False, max_new_tokens=4)


@pytest.mark.parametrize(("options", "message"), [
    (dict(cache=DynamicCache()), "does not support cache: give the whole text as ids"),
    (dict(past_key_values=DynamicCache()), "does not support past_key_values: give the whole text as ids"),
    (dict(max_new_token=4), "unknown option 'max_new_token'. Did you mean 'max_new_tokens'"),
    (dict(inputs_embeds=torch.zeros(1, 5, 32)), "inputs_embeds"),
    (dict(custom_generate="owner/repository"), "custom_generate"),
    (dict(max_new_tokens=0), "max_new_tokens"),
    (dict(max_new_tokens="many"), "max_new_tokens must be a whole number, got 'many'"),
    (dict(generation_config=GenerationConfig(do_sample=True, num_return_sequences=10**6)), "num_return.* at most"),
    (dict(suppress_tokens="none"), "suppress_tokens of the generation config must be a token id"),
    (dict(eos_token_id=10**6), "eos_token_id: there is no token 1000000: .* Give None"),
    (dict(begin_suppress_tokens=[10**6]), "begin_suppress_tokens: there is no token"),
    (dict(do_sample="false"), "do_sample must be true or false, got 'false'"),
    (dict(callbacks=5), "callbacks is a list of fsd_infer.Callback objects, got 5"),
    (dict(callbacks=[print]), "callbacks lists objects of subclasses of fsd_infer.Callback, got <built-in"),
    (dict(temperature=-1.0), "temperature must be 0 or above, and finite, got -1.0"),
    (dict(temperature=1.0, top_p=1.5), "top_p must be from 0 to 1, got 1.5"),
    (dict(no_repeat_ngram_size=-1), "no_repeat_ngram_size must be 0 or above"),
    (dict(num_beams=0), "num_beams must be at least 1, got 0"),
    (dict(sequence_bias={(10**9,): 1.0}), "SequenceBiasLogitsProcessor fails"),
    (dict(do_sample=True, top_k=1.5), "top_k must be a whole number, got 1.5"),
    (dict(do_sample=True, top_k=-1), "transformers refuses these options"),
    (dict(do_sample=True, typical_p=math.nan), "typical_p must be a number, got nan"),
    (dict(stop_strings=[""]), "stop_strings"),
    (dict(token_healing=True), "token_healing|token healing"),
    (dict(generation_config={"max_new_tokens": 3}), "is a GenerationConfig, got dict"),
    (dict(stopping_criteria=[MaxLengthCriteria(5)]), "max_length is 5, but counts the prompt, which has 5 tokens"),
    (dict(seed="0"), "seed must be a whole number"),
])  # fmt: skip
def test_meaningless_options_are_refused(options: dict[str, Any], message: str, decoder: FuzzyDecoder) -> None:
    with pytest.raises(FsdError, match=message):
        decoder.generate(PROMPT, **{"max_new_tokens": 4, **options})


def test_numbers_of_numpy_and_torch_are_numbers(decoder: FuzzyDecoder) -> None:
    plain = dict(max_new_tokens=9, temperature=0.5, top_k=7, top_p=0.75, seed=3)
    found = decoder.generate(PROMPT, **plain).sequences
    assert found != decoder.generate(PROMPT, **{**plain, "seed": 4}).sequences
    of_numpy = dict(max_new_tokens=np.int32(9), temperature=np.float32(0.5), top_k=np.int64(7), top_p=np.float16(0.75))
    assert decoder.generate(PROMPT, **of_numpy, seed=np.int64(3)).sequences == found
    kept = FuzzyConfig(**of_numpy, seed=np.int64(3))
    assert decoder.generate(PROMPT, kept).sequences == found and '"seed": 3' in kept.to_json_string()
    of_torch = {name: torch.tensor(value) for name, value in plain.items() if name != "seed"}
    assert decoder.generate(PROMPT, **of_torch, seed=3).sequences == found


def test_no_eos_tokens_and_no_stop_strings_are_none(decoder: FuzzyDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    free = decoder.generate(PROMPT, max_new_tokens=LENGTH, eos_token_id=None).sequences
    assert decoder.generate(PROMPT, max_new_tokens=LENGTH, eos_token_id=None, stop_strings=[]).sequences == free
    own = decoder.target.model.generation_config
    monkeypatch.setattr(own, "pad_token_id", None)
    monkeypatch.setattr(own, "eos_token_id", free[0][3])
    assert decoder.generate(PROMPT, max_new_tokens=LENGTH).sequences == [free[0][: free[0].index(free[0][3]) + 1]]
    for none in ([], torch.tensor([], dtype=torch.long)):
        assert decoder.generate(PROMPT, max_new_tokens=LENGTH, eos_token_id=none).sequences == free
        config = FuzzyConfig(max_new_tokens=LENGTH, eos_token_id=none)
        assert decoder.generate(PROMPT, config).sequences == free


def test_padding_is_no_part_of_a_prompt(decoder: FuzzyDecoder) -> None:
    tokenizer = tiny_tokenizer()
    target = Target(tiny_model("llama", vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id), tokenizer)
    talker = FuzzyDecoder(target, LookupDrafter(target.vocab_size))
    options: dict[str, Any] = dict(do_sample=False, max_new_tokens=8)
    texts = ["the cat sat on the mat", "it is there"]
    padded = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    expected = target.model.generate(**padded, **options)[:, padded.input_ids.shape[1] :].tolist()
    right = tokenizer(texts, padding=True, padding_side="right")
    arrays = tokenizer(texts, return_tensors="np", padding=True)
    rows = [torch.tensor(row) for row in tokenizer(texts)["input_ids"]]
    for prompts in (padded, padded.input_ids, right, tokenizer(texts), arrays, rows):
        assert talker.generate(prompts, **options).sequences == expected
    for mask in (padded.attention_mask[:1], padded.attention_mask[:, 1:], padded.attention_mask[0]):
        with pytest.raises(FsdError, match="attention_mask has another shape than input_ids"):
            talker.generate(input_ids=padded.input_ids, attention_mask=mask, **options)
    other = padded.input_ids.masked_fill(padded.attention_mask == 0, 3)
    assert talker.generate(other, pad_token_id=np.int64(3), **options).sequences == expected
    config = FuzzyConfig(**options)  # names no special tokens: they are the model's
    assert talker.generate(padded.input_ids, config).sequences == expected
    assert talker.generate(tokenizer(texts[1]), **options).sequences == expected[1:]
    target.model.generation_config.eos_token_id = tokenizer.eos_token_id
    for given in (FuzzyConfig(guide={"regex": "the cat"}, max_new_tokens=8), GenerationConfig(max_new_tokens=8)):
        assert talker.generate(texts[0], given, guide={"regex": "the cat"}).texts == ["the cat"]


class _Recorder:
    def __init__(self, fail_at: int | None = None) -> None:
        self.pieces: list[list[Any]] = []
        self.ended, self.fail_at = 0, fail_at

    def put(self, value: torch.Tensor) -> None:
        assert not self.ended
        self.pieces.append(value.tolist())
        if len(self.pieces) == self.fail_at:
            raise RuntimeError("the reader has gone")

    def end(self) -> None:
        self.ended += 1


class _Fails(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > len(PROMPT) + 3:
            raise RuntimeError("a processor of the user's fails")
        return scores


def _one_row(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores[0].flip(-1)


@pytest.mark.parametrize("made", [_one_row, lambda ids, scores: scores[:1].flip(-1), lambda ids, scores: scores[:, :1]])
def test_a_processor_of_one_text_is_refused_at_several(made: Any, decoder: FuzzyDecoder) -> None:
    """Its scores would be taken for those of every text, where ``generate`` has one."""
    with pytest.raises(FsdError, match=r"made \[.*\] of scores \[\d, \d+\]: it returns scores of the shape"):
        decoder.generate(PROMPT, max_new_tokens=LENGTH, logits_processor=[made])


def test_a_processor_may_compute_in_double_precision(model: Any, ask: Ask) -> None:
    double = LogitsProcessorList([lambda ids, scores: scores.double().flip(-1)])
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": LENGTH, "logits_processor": double}
    assert ask(**options) == theirs(model, **options)


@pytest.mark.parametrize("door", ["decoder", "stream_to"])
def test_a_streamer_gets_prompt_tokens_and_an_end(door: str, model: Any, decoder: FuzzyDecoder) -> None:
    hook: dict[str, Any] = dict(custom_generate=fsd_infer.generate, drafter=decoder.drafter)

    def run(streamer: Any, **options: Any) -> list[int]:
        options = {"do_sample": False, "max_new_tokens": LENGTH, **options}
        if door == "decoder":
            return decoder.generate(PROMPT, streamer=streamer, **options).sequences[0]
        return model.generate(torch.tensor([PROMPT]), stream_to=streamer, **hook, **options)[0, len(PROMPT) :].tolist()

    streamer = _Recorder()
    tokens = run(streamer)
    assert streamer.pieces == [[PROMPT], *([token] for token in tokens)] and streamer.ended == 1
    for failing, options, error in (
        (_Recorder(), dict(logits_processor=LogitsProcessorList([_Fails()])), "a processor of the user's fails"),
        (_Recorder(fail_at=3), {}, "the reader has gone"),
        (_Recorder(), dict(penalty_alpha=0.5), "penalty_alpha"),
    ):
        with pytest.raises((RuntimeError, FsdError), match=error):
            run(failing, **options)
        assert failing.ended == 1, "whoever waits for the text must not wait for ever"
