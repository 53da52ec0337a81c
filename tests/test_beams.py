"""Beam search with drafts finds what transformers' beam search finds: sequences, scores and order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

import fsd_infer
from fsd_core.errors import CacheMemoryError
from fsd_infer import Drafter, FsdError, FuzzyDecoder, Target
from fsd_infer.drafters import LMDrafter, LookupDrafter, NoDrafter, RecycleDrafter
from fsd_infer.engine.beams import BeamOptions
from fsd_infer.engine.beams.engine import MANY
from tests.beam_toys import doubled, drafters_for
from tests.covering import covering, fast_only
from tests.families import FAMILIES, VOCAB, EndsIn, drafter_of, tiny_model, tiny_prompts


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(doubled("llama"))


FOUND: dict[tuple[Any, str], tuple[list[list[int]], list[float]]] = {}  # by model, prompts and options


def expected_beams(model: Any, prompts: list[list[int]], **options: Any) -> tuple[list[list[int]], list[float]]:
    """transformers' answers, prompt by prompt, cut after the token that ends them, and their scores."""
    key = model, f"{prompts} {options}"
    if key in FOUND:
        return FOUND[key]
    sequences, scores = list[list[int]](), list[float]()
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, return_dict_in_generate=True, output_scores=True, do_sample=False, **options)
        eos = options.get("eos_token_id", model.generation_config.eos_token_id)
        ends = {eos} if isinstance(eos, int) else set(eos or ())
        for row in out.sequences[:, len(prompt) :].tolist():
            end = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
            sequences.append(row[:end])
        scores += out.sequences_scores.tolist()
    return FOUND.setdefault(key, (sequences, scores))


def check(decoder: FuzzyDecoder, prompts: list[list[int]], drafter: Drafter | None = None, **options: Any) -> Any:
    """Answers, scores and order are transformers', alone and in a ragged batch. Returns the batch's Generation."""
    theirs = {name: value for name, value in options.items() if name != "beam_options"}
    sequences, scores = expected_beams(decoder.target.model, prompts, **theirs)
    made = decoder.generate(prompts, drafter=drafter, do_sample=False, **options)
    assert made.sequences == sequences
    assert made.scores == pytest.approx(scores, abs=1e-4)
    alone = decoder.generate(prompts[:1], drafter=drafter, do_sample=False, **options)
    assert alone.sequences == sequences[: len(alone.sequences)]
    return made


WIDE = BeamOptions(depth=4, spread=1.5)  # so many drafts that they are of use to any number of beams


# families and drafters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers(family: str) -> None:
    """Windows shorter than the text, scaled and capped logits, eager attention: four beams of every family."""
    target = Target(doubled(family))
    decoder = FuzzyDecoder(target, drafter_of("lm", target))
    options = dict(max_new_tokens=12, num_beams=4, num_return_sequences=4)
    made = check(decoder, tiny_prompts((5, 21)), beam_options=WIDE, **options)
    assert len({tuple(answer) for answer in made.sequences}) > 5
    assert made.stats.acceptance_length > 1.3, "no drafted beam was of use: the comparison would be hollow"


@pytest.mark.parametrize("beams", fast_only([2, 8], [8]))
@pytest.mark.parametrize("family", fast_only(FAMILIES, ["llama"]))
def test_every_drafter_equals_transformers(family: str, beams: int) -> None:
    target = Target(doubled(family))
    options: dict[str, Any] = dict(max_new_tokens=16, num_beams=beams, num_return_sequences=beams, beam_options=WIDE)
    for name, drafter in drafters_for(target).items():
        made = check(FuzzyDecoder(target, drafter), tiny_prompts(), **options)
        if beams == 8:  # more beams than the first texts' tokens
            check(FuzzyDecoder(target, drafter), [[5], [7, 8, 9]], **options)
        if family == "llama" and name in ("lm", "lookup", "recycle"):  # a random head is of no use
            assert made.stats.acceptance_length > 1.05


# what a request may ask -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("early_stopping", "length_penalty"), covering([False, True, "never"], [-1.0, 0.0, 2.0]))
def test_early_stopping_and_length_penalty(target: Target, early_stopping: Any, length_penalty: float) -> None:
    """Answers of different lengths end among the beams; when the search may stop is up to three rules."""
    decoder = FuzzyDecoder(target, RecycleDrafter(VOCAB))
    options: dict[str, Any] = dict(num_beams=4, num_return_sequences=3, max_new_tokens=20)
    prompts = tiny_prompts((5, 13, 9))
    endless = decoder.generate(prompts, do_sample=False, **options).sequences
    made = check(
        decoder, prompts, early_stopping=early_stopping, length_penalty=length_penalty,
        eos_token_id=sorted({answer[place] for answer in endless for place in (6, 11)}), **options,
    )  # fmt: skip
    if length_penalty < 2.0:  # which prefers long answers
        assert min(len(answer) for answer in made.sequences) < 20, "no answer ended early"


class Forbid(LogitsProcessor):
    """Looks at the text: no token twice in a row."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return scores.scatter(1, input_ids[:, -1:], float("-inf"))


class Lift(LogitsProcessor):
    """Makes a log-probability positive: a beam's score is no bound for what follows it any more."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        lifted = scores.clone()
        lifted[:, 7] += 0.02 * (input_ids[:, -1] % 5 == 0) * 60
        return lifted


@pytest.mark.parametrize(
    "options",
    [
        dict(repetition_penalty=1.4), dict(no_repeat_ngram_size=2), dict(bad_words_ids=[[20], [50, 65]]),
        dict(sequence_bias=[[[20], -2.0], [[50, 65], 3.0]]), dict(min_new_tokens=6, eos_token_id=20),
        dict(forced_eos_token_id=3, eos_token_id=3), dict(suppress_tokens=[20, 50], renormalize_logits=True),
        dict(exponential_decay_length_penalty=(3, 1.2), eos_token_id=20),
        dict(prefix_allowed_tokens_fn=lambda row, text: [1 + int(text[-1]) % 7, 20, 30, 50 + int(text[-2]) % 9]),
        dict(prefix_allowed_tokens_fn=lambda row, text: [20]), dict(logits_processor=LogitsProcessorList([Forbid()])),
        dict(logits_processor=LogitsProcessorList([Lift()])),
    ],
    ids=lambda options: "-".join(options),
)  # fmt: skip
def test_processors(target: Target, options: dict[str, Any]) -> None:
    decoder = FuzzyDecoder(target, drafter_of("lm", target))
    returned = 1 if "prefix_allowed_tokens_fn" in options else 4  # transformers fills up with answers of no sense
    check(decoder, tiny_prompts((5, 13)), max_new_tokens=12, num_beams=4, num_return_sequences=returned, **options)


def test_stopping_criteria(target: Target) -> None:
    """They see every candidate's whole text, and may end so many that fewer beams go on than were asked for."""
    decoder = FuzzyDecoder(target, RecycleDrafter(VOCAB))
    for tokens in ([50, 65], list(range(0, VOCAB, 2))):
        criteria = StoppingCriteriaList([EndsIn(tokens)])
        prompts = tiny_prompts()
        options: dict[str, Any] = dict(max_new_tokens=16, num_beams=4, stopping_criteria=criteria)
        made = decoder.generate(prompts, do_sample=False, **options)
        for prompt, answer in zip(prompts, made.sequences):
            out = target.model.generate(torch.tensor([prompt]), do_sample=False, **options)
            assert out[0, len(prompt) :].tolist()[: len(answer)] == answer
            assert answer[-1] in tokens or len(answer) == 16


def test_custom_generate_returns_what_generate_returns(target: Target) -> None:
    """A left-padded batch, answers of different lengths, two of each prompt: the very tensor, padding and scores."""
    prompts = tiny_prompts()
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    options: dict[str, Any] = dict(
        attention_mask=(ids != 0).long(), max_new_tokens=16, num_beams=4, num_return_sequences=2, do_sample=False,
        eos_token_id=20, pad_token_id=1, return_dict_in_generate=True,
    )  # fmt: skip
    expected = target.model.generate(ids, output_scores=True, **options)
    made = target.model.generate(ids, custom_generate=fsd_infer.generate, drafter=LookupDrafter(VOCAB), **options)
    assert torch.equal(made.sequences, expected.sequences)
    assert torch.allclose(made.sequences_scores, expected.sequences_scores, atol=1e-4)
    assert len(made.stats.rows) == len(prompts)


def test_context_ends_the_answers() -> None:
    """Near the context's end, with a drafter whose own context ends before, nothing is read out of bounds."""
    model = tiny_model("llama", max_position_embeddings=32).double()
    small = tiny_model("llama", max_position_embeddings=27).double()
    target = Target(model)
    prompt = tiny_prompts((22,))[0]
    expected, _ = expected_beams(model, [prompt], max_new_tokens=10, num_beams=4)
    with pytest.warns(UserWarning, match="context of 27 tokens"):
        drafter = LMDrafter(Target(small, name="small"), target)
        made = FuzzyDecoder(target, drafter).generate([prompt], max_new_tokens=20, num_beams=4, do_sample=False)
    assert made.sequences == expected and len(expected[0]) == 10
    short = tiny_prompts((31,))[0]  # the small model cannot even read the prompt; one token fits
    made = FuzzyDecoder(target, drafter).generate([short], max_new_tokens=20, num_beams=4, do_sample=False)
    assert made.sequences == expected_beams(model, [short], max_new_tokens=1, num_beams=4)[0]


# refusals -------------------------------------------------------------------------------------------------------------


def test_memory_is_bounded_and_refused_before_it_is_taken(target: Target) -> None:
    decoder = FuzzyDecoder(target, LookupDrafter(VOCAB))
    prompts = tiny_prompts((9,))
    options: dict[str, Any] = dict(max_new_tokens=40, num_beams=4, do_sample=False)
    made = decoder.generate(prompts, **options)
    # prompt, four answers, twice a round's nodes, and the spare slot
    slots = 9 + 4 * 40 + 2 * (8 + 4) + 1
    assert made.stats.cache_bytes == slots * target.cache_bytes_per_token
    with pytest.raises(CacheMemoryError, match=f"take {made.stats.cache_bytes} bytes"):
        decoder.generate(prompts, max_cache_bytes=made.stats.cache_bytes - 1, **options)
    decoder.generate(prompts, max_cache_bytes=made.stats.cache_bytes, **options)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (dict(rule="fuzzy:js:0.3"), "rule 'fuzzy' has no meaning with num_beams > 1"),
    (dict(streamer=type("Shown", (), {"put": print, "end": lambda self: None})()), "beams change places"),
    (dict(num_beams=1, beam_options=BeamOptions()), "beams are options of beam search"),
    (dict(beam_options=BeamOptions(join_every=4)), "but beam search keeps transformers' beams: sample"),
    (dict(beam_options=BeamOptions(confidence=0.5), do_sample=True), "nothing is drafted: leave it out"),
    (dict(beam_options=BeamOptions(confidence=0.5, min_width=5), do_sample=True, drafter=RecycleDrafter(VOCAB)),
     "min_width 5 is more than the 4 beams"),
    (dict(num_return_sequences=5), "transformers refuses these options"),
    (dict(measure_log_likelihood=True, repetition_penalty=2.0), "no log-likelihoods"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_refused(target: Target, arguments: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = dict(max_new_tokens=4, num_beams=4, do_sample=False)
    with pytest.raises(FsdError, match=message):
        FuzzyDecoder(target, NoDrafter(VOCAB)).generate([[1, 2, 3]], **{**options, **arguments})


def test_many_beams_say_what_they_cost(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    decoder = FuzzyDecoder(target, NoDrafter(VOCAB))
    for beams, said in ((4, ""), (MANY + 1, f"each of {MANY + 1} beams costs")):
        decoder.generate([[1, 2, 3]], max_new_tokens=1, num_beams=beams, do_sample=False)
        assert said in caplog.text and bool(caplog.text) == bool(said)


def test_options_of_beams() -> None:
    assert BeamOptions.parse("depth=4,spread=1.5") == BeamOptions(depth=4, spread=1.5)
    made = BeamOptions.parse("confidence=0.8:min_width=2:join_every=6")
    assert made.given() == dict(confidence=0.8, min_width=2, join_every=6)
    for text, words in {
        "depth=-1": "depth must be a number from 0", "spread=0.5": "spread must be a number from 1",
        "spread=inf": "spread must be", "nodes=-1": "nodes must", "confidence=0": "number from 1e-06 to 1",
        "min_width=2": "set confidence as well", "confidence=0.5,min_width=0": "min_width must be a number from 1",
        "join_every=1": "join_every must be a number from 2", "": "beam option",
        "depth=two": "beam option", "depth=1.5": "beam option", "depth=1,depth=2": "beam option",
        "wide=3": "beam option", "spread=1e999": "beam option",
    }.items():  # fmt: skip
        with pytest.raises(FsdError, match=words):
            BeamOptions.parse(text)
    for value in ({"depth": "4"}, {"depth": 2.5}, {"nodes": True}, {"spread": "1"}, {"join_every": [2]}):
        with pytest.raises(FsdError, match="must be a number from"):
            BeamOptions.of(value)
