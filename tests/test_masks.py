"""Conversations for training: what is supervised under templates of many forms, and how long it takes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from fsd_core.errors import DataError
from fsd_core.text import encoding
from fsd_core.text.conversations import row_conversation, row_messages
from fsd_core.text.encoding import encode_chat, end_of_turn
from fsd_core.text.masks import encode_conversation
from tests.test_prompts import BOT, LAST, MORE, USER, marked
from tests.text_toys import CHATML, THINKING, tiny_tokenizer

Turns = list[dict[str, Any]]


def said(tokenizer: Any, sequence: tuple[list[int], list[int]]) -> str:
    """The text under the mask."""
    return str(tokenizer.decode([token for token, wanted in zip(*sequence) if wanted]))


def talk(count: int, seed: int = 0) -> Turns:
    rng = random.Random(seed)
    words = ["the cat", " sat", "\n\n", "\n", " ", "it is", "é🙂", "<|start|>", "answer", "<|end|>"]
    texts = ["".join(rng.choices(words, k=rng.randint(1, 4))) for _ in range(count)]
    return [
        {"role": ("user", "assistant")[n % 2], "content": "a" * (n % 2 == 0) + text} for n, text in enumerate(texts)
    ]


MARKED = marked("{% generation %}{{ m['content'] + '<|end|>' }}{% endgeneration %}")

# shortens all answers but the last, which a prompt shows whole, as LFM2.5's does with thoughts
SHORTENING = (
    "{% set last = namespace(at=-1) %}{% for m in messages if m['role'] == 'assistant' %}"
    "{% set last.at = m %}{% endfor %}"
)
SHORTENED = [
    SHORTENING + form.replace("m['content']", "(m['content'] if m == last.at or m['role'] == 'user' else 'x')")
    for form in (CHATML, MARKED)
]


@pytest.mark.parametrize("template", [CHATML, THINKING, CHATML.replace("<|end|>", ""), MARKED, *SHORTENED])
def test_every_answer_follows_the_ids_that_decoding_sees(template: str) -> None:
    tokenizer = tiny_tokenizer(template)
    for seed, count in enumerate([2, 4, 6, 10, 18, 30, 44]):
        turns = talk(count, seed)
        prompts = [encode_chat(tokenizer, turns[:place]) for place in range(1, count, 2)]
        ends = []
        for ids, mask in encode_conversation(tokenizer, turns):
            ends += [ids[:place] for place in range(1, len(ids)) if mask[place] > mask[place - 1]]
        assert sorted(ends) == sorted(prompts)


def test_marked_answers_that_do_not_continue_their_prompts_are_trained_as_marked() -> None:
    """As with a template that opens a thought which earlier answers do not have."""
    opening, turns = MARKED + "{% if add_generation_prompt %}?{% endif %}", talk(6)
    wanted, found = (encode_conversation(tiny_tokenizer(template), turns) for template in (MARKED, opening))
    assert found == wanted and len(found) == 1


def test_the_work_is_linear_in_the_number_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    write = encoding.turns_for

    def counted(tokenizer: Any, turns: Turns, options: Any) -> Any:
        written.append(len(turns))
        return write(tokenizer, turns, options)  # type: ignore[arg-type]

    monkeypatch.setattr(encoding, "turns_for", counted)
    tokenizer, work = tiny_tokenizer(), []
    for count in (100, 400):
        [(ids, mask)] = encode_conversation(tokenizer, [USER, BOT, MORE, LAST] * (count // 4))
        assert said(tokenizer, (ids, mask)) == "it is there<|end|>sat on the mat<|end|>" * (count // 4)
        work.append(sum(written))
        written.clear()
    assert work[1] < 4.5 * work[0]
    # answers beyond the length to train on are not encoded one by one
    encode_conversation(tiny_tokenizer(THINKING), [USER, BOT] * 200, max_length=40)
    assert len(written) < 20


ASKED = "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"

ENDED = CHATML.replace("<|end|>\n", "<|pad|>")


@pytest.mark.parametrize("eos", ["<|end|>", "<|pad|>"])
@pytest.mark.parametrize(("template", "end"), [
    (CHATML.replace(ASKED, "{{ '<|start|>assistant\n' }}"), "<|end|>"),  # opens the next turn unasked
    (CHATML.replace(ASKED, "{{ '<|start|>assistant\n' }}").replace("<|end|>\n", "<|end|>"), "<|end|>"),
    (CHATML.replace("{% endif %}", "{% else %}{{ '<|pad|>' }}{% endif %}"), "<|end|>"),  # closes the whole text
    (ENDED.replace("{% endif %}", "{% else %}{{ '<|end|>' }}{% endif %}"), "<|pad|>"),  # by eos: Phi-4-mini
    (CHATML.replace("<|end|>", "<|pad|><|end|>"), "<|pad|><|end|>"),  # ends turns by two tokens
])  # fmt: skip
def test_what_a_template_writes_after_the_end_of_a_turn_is_not_supervised(template: str, end: str, eos: str) -> None:
    tokenizer = tiny_tokenizer(template)
    tokenizer.eos_token = eos
    end = eos if end.startswith(eos) else end  # what eos ends, ends there
    for turns in ([USER, BOT], [USER, BOT, MORE, LAST]):
        texts = [said(tokenizer, sequence) for sequence in encode_conversation(tokenizer, turns)]
        assert "".join(texts) == "".join(turn["content"] + end for turn in turns[1::2])
    [cut] = encode_conversation(tokenizer, [USER, BOT], complete=False)
    assert said(tokenizer, cut) == BOT["content"]
    assert end == tokenizer.decode(end_of_turn(tokenizer))


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_answers_of_weight_0_are_not_supervised(template: str) -> None:
    tokenizer = tiny_tokenizer(template)
    turns = [USER, BOT, MORE, LAST]
    [(ids, _)] = encode_conversation(tokenizer, turns)
    [sequence] = encode_conversation(tokenizer, [USER, {**BOT, "weight": 0}, MORE, {**LAST, "weight": 1}])
    assert said(tokenizer, sequence) == "sat on the mat<|end|>" and sequence[0] == ids
    [sequence] = encode_conversation(tokenizer, [USER, BOT, MORE, {**LAST, "weight": 0.0}])
    assert said(tokenizer, sequence) == "it is there<|end|>"
    with pytest.raises(DataError, match="every answer has weight 0"):
        encode_conversation(tokenizer, [USER, {**BOT, "weight": 0}])
    with pytest.raises(DataError, match="has weight 0.5"):
        encode_conversation(tokenizer, [USER, {**BOT, "weight": 0.5}])
    human = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 0}]}
    assert row_conversation(human)[1] == {"role": "assistant", "content": "b", "weight": 0}


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("name", ["reasoning_content", "thinking"])
def test_thoughts_are_written_as_the_template_writes_them(field: str, name: str) -> None:
    thought = f"{{% if m.{name} %}}{{{{ '<think>' + m.{name} + '</think>' }}}}{{% endif %}}"
    template = CHATML.replace("m['content']", "body").replace(
        "{{ '<|start|>' + m['role'] + '\n' + body + '<|end|>\n' }}",
        "{{ '<|start|>' + m['role'] + '\n' }}" + thought + "{{ m['content'] + '<|end|>\n' }}",
    )
    tokenizer = tiny_tokenizer(template)
    [sequence] = encode_conversation(tokenizer, [USER, {**BOT, field: "hm"}])
    assert said(tokenizer, sequence) == "<think>hm</think>it is there<|end|>"
    [sequence] = encode_conversation(tiny_tokenizer(), [USER, {**BOT, field: "hm"}])
    assert said(tokenizer, sequence) == "it is there<|end|>"  # a notice says so, see tests/test_bad_rows.py


PARTS = "{% for part in m['content'] %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
PARTED = CHATML.replace(
    "{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}",
    "{{ '<|start|>' + m['role'] + '\n' }}" + PARTS + "{{ '<|end|>\n' }}",
)
MIXED = PARTED.replace(PARTS, "{% if m['role'] == 'assistant' %}{{ m['content'] }}{% else %}" + PARTS + "{% endif %}")


@pytest.mark.parametrize("template", [PARTED, MIXED])
def test_contents_have_the_form_that_the_template_reads(template: str) -> None:
    in_parts = {
        "role": "user",
        "content": [{"type": "text", "text": "what is "}, {"type": "text", "text": "the answer"}],
    }
    expected = encode_conversation(tiny_tokenizer(), [USER, BOT])
    for turns in ([USER, BOT], [in_parts, BOT]):
        for tokenizer in (tiny_tokenizer(template), tiny_tokenizer()):
            assert encode_conversation(tokenizer, turns) == expected
            assert encode_chat(tokenizer, turns[:1]) == encode_chat(tiny_tokenizer(), [USER])
    silent = tiny_tokenizer(CHATML.replace("m['content']", "''"))
    with pytest.raises(DataError, match="writes no text of a user turn"):
        encode_chat(silent, [USER])
    for role, turns in (("system", [{"role": "system", "content": "be brief"}, USER]), ("tool", [USER, TOOL])):
        for form in (CHATML, PARTED):
            loop = "{% for m in messages %}"
            deaf = tiny_tokenizer(form.replace(loop, loop.replace("messages", f"messages if m['role'] != '{role}'")))
            assert encode_chat(deaf, [USER]) == encode_chat(tiny_tokenizer(), [USER])
            with pytest.raises(DataError, match=f"writes no text of a {role} turn"):
                encode_chat(deaf, turns)


def test_calls_that_the_template_would_drop_are_refused() -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    writes = CHATML.replace("m['content']", "m['content'] + (m.tool_calls[0].function.name if m.tool_calls else '')")
    assert said(tiny_tokenizer(writes), *encode_conversation(tiny_tokenizer(writes), [USER, called])) == "look<|end|>"
    loop = "{% for m in messages %}"  # Idefics3's template reads the type of a first part
    parts = PARTED.replace(loop, loop + "{% if m['content'][0]['type'] == 'image' %}{% endif %}")
    for form in (CHATML, parts):
        with pytest.raises(DataError, match="the chat template writes no tool calls"):
            encode_conversation(tiny_tokenizer(form), [USER, called])
    assert encode_chat(tiny_tokenizer(parts), [USER, TOOL]) == encode_chat(tiny_tokenizer(), [USER, TOOL])


TOOL = {"role": "tool", "content": "12 degrees", "name": "look", "tool_call_id": "call00000"}


def test_templates_that_write_no_unicode_are_refused() -> None:
    for tokenizer in (tiny_tokenizer("{{ '\ud800' }}" + CHATML), tiny_tokenizer(CHATML + "{{ '\\udc00' }}")):
        with pytest.raises(DataError, match="surrogate"):
            encode_chat(tokenizer, [USER])


@pytest.mark.parametrize("name", ["system", "system_prompt"])
@pytest.mark.parametrize("form", ["conversations", "messages", "prompt", "turns"])
def test_a_system_column_goes_before_the_conversation(name: str, form: str) -> None:
    forms: dict[str, Any] = {
        "conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}],
        "messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}],
        "prompt": "u", "turns": ["u", "later"],
    }  # fmt: skip
    row = {form: forms[form], name: "be kind"}
    system = {"role": "system", "content": "be kind"}
    assert row_messages(row) == [system, {"role": "user", "content": "u"}]
    assert row_messages({**row, name: ""}) == row_messages({**row, name: None}) == [{"role": "user", "content": "u"}]
    own = {"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "u"}], name: "be kind"}
    assert row_messages(own)[0]["content"] == "own"
    with pytest.raises(DataError, match=f"`{name}` must hold text"):
        row_messages({**row, name: ["x"]})


def test_without_an_end_token_the_whole_answer_is_supervised() -> None:
    tokenizer = tiny_tokenizer(CHATML.replace("<|end|>", ""))
    inside = {"role": "assistant", "content": "it is <|start|> there"}
    [sequence] = encode_conversation(tokenizer, [USER, inside, MORE, inside])
    assert said(tokenizer, sequence) == "it is <|start|> there\n" * 2
    [sequence] = encode_conversation(tiny_tokenizer(), [USER, inside], complete=False)
    assert said(tokenizer, sequence) == "it is <|start|> there"
