"""What `fsd-train regenerate` asks: which prompts, in which order, with what sampling and template."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fsd_infer.errors import FsdError
from fsd_train.data.backends import Answer
from fsd_train.data.plan import answer_line, plan_jobs
from tests.test_regenerate import prompts_file
from tests.text_toys import CHATML, tiny_tokenizer, write_rows


def test_plan_limits_lengths_and_order(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    first, second = prompts_file(tmp_path / "a.jsonl", 30), prompts_file(tmp_path / "b.jsonl", 20)
    options: dict[str, Any] = {"max_prompt_tokens": 18, "batch_size": 4, "seed": 3}
    full = plan_jobs([first, second], tokenizer, **options)
    lengths = [len(job.prompt_ids) for batch in full.batches for job in batch]
    assert full.read == 50 and full.too_long == 50 - len(lengths) > 0 and max(lengths) <= 18
    assert all(len(batch) <= 4 for batch in full.batches)
    limited = plan_jobs([first, second], tokenizer, limit=10, **options)
    assert sum(map(len, limited.batches)) == 10
    assert limited.ids < full.ids
    assert plan_jobs([first, first], tokenizer, **options).ids == plan_jobs([first], tokenizer, **options).ids
    assert plan_jobs([first, second], tokenizer, **{**options, "seed": 4}).batches != full.batches


def test_rows_keep_their_ids_sampling_and_template(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "prompt": "the cat", "temperature": 0.7, "top_p": 0.5, "top_k": 3, "answer": [1, 2]},
        {"id": "a", "prompt": "the mat"},
        {"prompt": "it is", "tools": [{"name": "look"}], "chat_template_kwargs": {"loud": True}},
    ]
    prompts = write_rows(tmp_path / "p.jsonl", rows)
    template = CHATML + "{% if loud %} what{% endif %}{% if tools %} {{ tools[0].name }}{% endif %}"
    tokenizer = tiny_tokenizer(template)
    plan = plan_jobs([prompts], tokenizer, temperatures=[(0.0, 1.0)], template={"loud": False})
    by_text = {job.messages[0]["content"]: job for job in plan.jobs}
    first, second, third = (by_text[row["prompt"]] for row in rows)
    assert first.sampling == (0.7, 3, 0.5) and second.sampling == (0.0, 0, 1.0)
    assert len({first.id, second.id}) == 2 and "a" in {first.id, second.id}
    kept = json.loads(answer_line(Answer(first, "", [3], "stop")))
    assert all(kept[name] == rows[0][name] for name in ("temperature", "top_p", "top_k", "answer"))
    said = tokenizer.decode(third.prompt_ids)
    assert "what" in said and "look" in said and "what" not in tokenizer.decode(first.prompt_ids)


@pytest.mark.parametrize(
    "more, problem",
    [
        ({"temperature": -1}, "`temperature` must be a number, 0 or more"),
        ({"temperature": "hot"}, "`temperature` must be"),
        ({"top_p": 0}, "`top_p` must be"),
        ({"top_k": 2.5}, "`top_k` must be"),
        ({"tools": "{"}, "`tools` is no JSON"),
        ({"tools": {}}, "`tools` must be a list"),
        ({"chat_template_kwargs": [1]}, "`chat_template_kwargs` must be an object"),
        ({"chat_template_kwargs": {"conversation": 1, "chat_template": "{{"}}, "the chat template refuses"),
    ],
)
def test_rows_of_no_sense_are_named(more: dict[str, Any], problem: str, tmp_path: Path) -> None:
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": "the cat", **more}])
    with pytest.raises(FsdError, match=f"p.jsonl:1: .*{re.escape(problem)}"):
        plan_jobs([prompts], tiny_tokenizer())
