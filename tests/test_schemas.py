"""Schemas of a public suite: supported ones give answers that parse and validate, others are refused by reason."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from benchmarks.serving import Closing, faults_of
from fsd_infer import FsdError, FuzzyDecoder
from fsd_infer.request.guide import Guide
from fsd_infer.serving.app import make_app
from tests.serve_toys import COMPLETIONS


@pytest.fixture(scope="module")
def suite() -> tuple[list[Any], list[Any]]:
    """Schemas that the guide supports, and others."""
    lines = (Path(__file__).parent / "data" / "json_schemas.jsonl").read_text(encoding="utf-8").splitlines()
    found: tuple[list[Any], list[Any]] = ([], [])
    for line in lines:
        schema = json.loads(line)["schema"]
        try:
            Guide.json_schema(json.dumps(schema))
        except FsdError as error:
            assert str(error).startswith("the schema cannot be followed: ") and "\n" not in str(error)
            found[1].append(schema)
        else:
            found[0].append(schema)
    return found


@pytest.mark.parametrize("count", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_answers_of_public_schemas_parse(
    toy_decoder: FuzzyDecoder, suite: tuple[list[Any], list[Any]], count: int
) -> None:
    """The slow one takes 200. `python -m benchmarks.serving schemas` asks the built-in model."""
    supported = suite[0]
    assert len(supported) >= 200
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": None, "max_new_tokens": 160}
    closing, ended = [Closing(toy_decoder.tokenizer)], 0
    for place in range(count):
        schema = supported[place * 200 // count]
        guide = Guide.json_schema(json.dumps(schema))
        made = toy_decoder.generate("the cat", guide=guide, seed=place, logits_processor=list(closing), **options)
        if made.stats.rows[0].finish_reason == "stop":
            ended += 1
            assert not faults_of(made.texts[0], schema, Counter()), schema
    assert ended >= 0.95 * count


def test_unsupported_schemas_are_refused_with_the_reason(
    toy_decoder: FuzzyDecoder, suite: tuple[list[Any], list[Any]]
) -> None:
    schemas = [schema for schema in suite[1] if isinstance(schema, dict)]
    with TestClient(make_app(toy_decoder)) as client:
        for schema in schemas:
            found = client.post(COMPLETIONS, json={"prompt": "the cat", "max_tokens": 2, "guided_json": schema})
            assert found.status_code == 400 and "the schema cannot be followed: " in found.json()["error"]["message"]
    assert len(schemas) > 100
