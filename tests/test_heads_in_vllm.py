"""`benchmarks.heads_in_vllm` without vLLM: what it counts, what it keeps, where answers part."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import heads_in_vllm
from fsd_infer import Target
from fsd_infer.errors import FsdError
from tests.families import tiny_model, tiny_prompts

FAKE = """
import json, pathlib, sys
job = json.loads(pathlib.Path(sys.argv[1]).read_text())
if job.get("fail"):
    sys.exit("no such head")
out = pathlib.Path(job["output"])
with open(out / "calls.txt", "a") as file:
    file.write("x")
(out / "answers.json").write_text(json.dumps({"answers": [[job["new"]]]}))
"""


def test_an_answer_that_is_kept_is_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    monkeypatch.setattr(heads_in_vllm, "SCRIPT", script)

    def run(**job: object) -> object:
        return heads_in_vllm.run_vllm(Path(sys.executable), {"output": str(tmp_path / "out"), **job})["answers"]

    assert run(new=3) == run(new=3) == [[3]] and run(new=4) == [[4]]
    assert (tmp_path / "out" / "calls.txt").read_text() == "xx"
    with pytest.raises(FsdError, match="vLLM failed: no such head"):
        run(new=4, fail=True)
    assert run(new=4) == [[4]] and (tmp_path / "out" / "calls.txt").read_text() == "xxx"  # nothing stale is taken


def test_where_two_answers_part() -> None:
    target = Target(tiny_model("llama"))
    (prompt,) = tiny_prompts((7,))
    same = [5, 9]
    logits = target.model(torch.tensor([[*prompt, *same]])).logits[0, -1]
    found = heads_in_vllm.gap(target, prompt, [*same, 3, 8], [*same, 4, 1])
    assert found["place"] == 2 and found["gap"] == pytest.approx(float((logits[3] - logits[4]).abs()), abs=1e-5)
    largest = torch.tensor(float(logits[[3, 4]].abs().max())).bfloat16()
    above = torch.nextafter(largest, torch.tensor(torch.inf, dtype=torch.bfloat16))
    assert found["step"] == float(above) - float(largest)
    json.dumps(found)


def test_shares_of_rounds_by_draft() -> None:
    # the prefill's token, then rounds that accept 2, 0 and 1 drafts
    assert heads_in_vllm.accepted_shares([[0, 1, 1, 0, 0, 1, 0]], 3) == ([2 / 3, 1 / 3, 0.0], 3)
