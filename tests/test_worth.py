"""The forecast: what it says of exact and of first rounds is what decoding says."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fsd_bench.cli import main
from fsd_bench.sweep.candidates import forecast_rules
from fsd_bench.sweep.settings import SweepOptions
from fsd_bench.trials import decoding
from fsd_bench.worth import Forecast, forecast
from fsd_bench.worth.forecasts import fixed_coefs, learned
from fsd_bench.worth.replay import ExactRound, Replay, walk
from fsd_bench.worth.result import RuleOnShape
from fsd_bench.worth.run import WorthOptions, brief_text, recommended, verdict, worth_text
from fsd_bench.worth.watch import Watch
from fsd_infer import Drafter, FsdError, FuzzyDecoder, Rule, Target, TreeShape
from fsd_infer.drafters import LMDrafter
from fsd_infer.rules import parse_rule
from tests.bench_toys import Toy
from tests.families import noisy_model, tiny_head, tiny_model

PROMPTS = [[5, 17, 3, 44], [60, 2, 9], [33, 8, 71, 71, 15]]
NEW = 10


FEW = (
    "exact", "tilted:2", "tilted:1:min_p=0", "typical:exact_ngram_size=3", "fuzzy:js:0.3:exact_ngram_size=3",
    "fly:2:0.1", "draft-only",
)  # fmt: skip


@pytest.fixture(scope="module")
def decoders() -> dict[str, FuzzyDecoder]:
    target = Target(tiny_model("llama"))
    torch.manual_seed(1)
    small = LMDrafter(Target(noisy_model("llama")), target, TreeShape.chain(6))
    head = tiny_head(target, TreeShape(3, 3, 9))
    return {"lm": FuzzyDecoder(target, small), "head": FuzzyDecoder(target, head)}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rules and shapes, for speed."""
    monkeypatch.setattr("fsd_bench.worth.forecasts.RULES", FEW[1:-1])
    monkeypatch.setattr("fsd_bench.worth.forecasts.MATCHING", ("tilted:match_temperature=0.5",))
    monkeypatch.setattr("fsd_bench.worth.forecasts.LENGTHS", (1, 4))
    monkeypatch.setattr("fsd_bench.worth.forecasts.TREES", ((8, 24),))


def decoded(decoder: FuzzyDecoder, drafter: Drafter, rule: str | Rule, temperature: float = 0.0) -> tuple[float, int]:
    """(tokens per forward, forwards) of decoding."""
    emitted = forwards = 0
    for number, prompt in enumerate(PROMPTS):
        made = decoder.generate([prompt], rule=rule, drafter=drafter, seed=number, **decoding(temperature, NEW)).stats
        emitted, forwards = emitted + made.new_tokens - 1, forwards + made.target_forwards
    return emitted / forwards, forwards


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("kind", "temperature"), [
    ("lm", 0.8), ("head", 0.0),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("lm", 0.0), ("head", 0.8))),
])  # fmt: skip
def test_the_forecast_of_exact_is_measured(kind: str, temperature: float, decoders: dict[str, FuzzyDecoder]) -> None:
    decoder = decoders[kind]
    found = forecast(decoder, PROMPTS, ["tilted:3"], temperature=temperature, max_new_tokens=NEW)
    tau, forwards = decoded(decoder, decoder.drafter, "exact", temperature)
    assert (found.tau, found.rounds) == (pytest.approx(tau), forwards)
    own = next(each for each in found.exact.shapes if each.shape == found.decoded)
    if temperature == 0:  # else other draws are replayed
        assert own.tau == pytest.approx(tau) and own.nats == own.lossy == 0
    assert found.exact.tokens == found.exact.speed == 1.0
    assert found.row("tilted:3").best.tau > 0
    assert all(row.best.seconds > 0 and row.best.tau > 0.99 for row in found.rows)
    assert found.yardsticks["0.3"] < found.yardsticks["0.5"] < found.yardsticks["0.8"]
    assert json.dumps(found.to_dict()) and verdict(found) in worth_text(found)
    brief = brief_text(found, WorthOptions(target="T dir", drafter="D", prompts="p.jsonl"))
    assert brief.startswith(verdict(found)) and "fsd-infer generate --target 'T dir' --drafter D" in brief
    assert ("--rule" in brief) == (recommended(found) is not None)
    assert "of other rules nothing is known" in worth_text(found) and "\ntilted: by default" in worth_text(found)


@cache
def seen_rounds(decoder: FuzzyDecoder, number: int) -> list[ExactRound]:
    """Of exact greedy decoding from that prompt."""
    rounds: list[ExactRound] = []
    watch = Watch(rounds.append, 0.0, NEW, torch.Generator().manual_seed(0), {})
    decoder.generate([PROMPTS[number]], rule="exact", callbacks=[watch], **decoding(0.0, NEW))
    return rounds


@pytest.mark.parametrize("spec", FEW)
@pytest.mark.parametrize("length", [2, 6])
def test_a_replayed_first_round_is_decodings(spec: str, length: int, decoders: dict[str, FuzzyDecoder]) -> None:
    decoder, rule, shape = decoders["lm"], parse_rule(spec), TreeShape(length, 1, length + 1)
    for number, prompt in enumerate(PROMPTS):
        seen = seen_rounds(decoder, number)[0]
        nodes = seen.cut(shape, rule.draft_bonus(True))
        part = rule, seen.walked(rule, nodes)
        steps = Replay([rule], [shape], frozenset()).steps(seen, nodes, walk(seen, [part])[part])
        drafter = decoder.drafter.with_shape(shape)
        made, longer = (
            decoder.generate([prompt], rule=rule, drafter=drafter, **decoding(0.0, len(steps) + more))
            for more in (1, 2)
        )
        assert made.stats.target_forwards == 1 and len(made.sequences[0]) == len(steps) + 1
        assert made.stats.divergence_spent == pytest.approx(sum(nats for nats, _ in steps), abs=1e-4)
        assert longer.stats.target_forwards == 2  # the round ended there
        assert longer.sequences[0][: len(steps) + 1] == made.sequences[0]


@pytest.mark.parametrize("kind", ["lm", "head"])
def test_a_narrow_vocabulary_changes_no_verdict(kind: str, decoders: dict[str, FuzzyDecoder]) -> None:
    rules = [
        parse_rule(spec)
        for spec in ("tilted:1", "tilted:0.3:min_p=0:exact_ngram_size=2", "tilted:8:exact_ngram_size=0")
    ]
    for seen in seen_rounds(decoders[kind], 2)[:4]:
        parts = [tuple(seen.cut(shape, 0.5)) for shape in (TreeShape(2, 3, 5), TreeShape(6, 3, 9))]
        asked = [(rule, nodes) for rule in rules for nodes in parts]
        walks = walk(seen, asked)
        for rule, nodes in asked:
            whole = rule(seen.part(nodes))
            count = int(whole.accepted[0]) + 1
            assert [step[1] for step in walks[rule, nodes]] == whole.tokens[0, :count].tolist()
            assert [step[2] for step in walks[rule, nodes]] == pytest.approx(whole.spent[0, :count].tolist(), abs=1e-5)


# the command ----------------------------------------------------------------------------------------------------------


def command(toy: Toy, *more: str) -> int:
    return main(["worth", *toy.models, "--prompts", str(toy.prompts), "--max-new-tokens", "8", *more])


@pytest.mark.usefixtures("few")
def test_the_command_prints_and_records_the_forecast(toy: Toy, tmp_path: Path, capsys: Any) -> None:
    record = tmp_path / "worth.json"
    assert command(toy, "--limit", "2", "--details", "--rules", "relaxed:3:0.5", "--json", str(record)) == 0
    text = capsys.readouterr().out
    assert "x speed" in text and "first drafts are the target's likeliest token" in text and "yardstick" in text
    found = json.loads(record.read_text())
    rows = found["forecast"]["rows"]
    assert rows[0]["rule"] == "exact" and {"relaxed:3:0.5", "tilted:2"} <= {row["rule"] for row in rows}
    assert found["forecast"]["drafts"]["count"] > 0 and found["environment"]
    assert found["options"]["max_new_tokens"] == 8
    assert command(toy, "--raw", "--temperature", "0.7", "--limit", "2") == 0
    text = capsys.readouterr().out
    assert "yardstick" not in text and "fsd-infer generate --target" in text and "x speed" not in text


@pytest.mark.usefixtures("few")
def test_a_killed_forecast_continues(
    tmp_path: Path, decoders: dict[str, FuzzyDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, kept, asked = decoders["lm"], tmp_path / "kept.json", list[Any]()
    options: dict[str, Any] = dict(temperature=0.8, max_new_tokens=NEW)
    right, real = forecast(decoder, PROMPTS, **options), decoder.generate

    def generate(prompts: Any, **more: Any) -> Any:
        asked.append(prompts)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(prompts, **more)

    monkeypatch.setattr(decoder, "generate", generate)
    with pytest.raises(KeyboardInterrupt):
        forecast(decoder, PROMPTS, kept=kept, **options)
    found = forecast(decoder, PROMPTS, kept=kept, **options)
    assert asked.count([PROMPTS[0]]) == asked.count([PROMPTS[2]]) and found.drafts == right.drafts
    taus = [{row.rule: [shape.tau for shape in row.shapes] for row in made.rows} for made in (found, right)]
    assert taus[0] == taus[1]
    with pytest.raises(FsdError, match="was made with other settings or weights"):
        forecast(decoder, PROMPTS, kept=kept, seed=1, **options)
    drafter: Any = decoder.drafter
    weights = drafter.model.model.get_input_embeddings().weight.data
    with monkeypatch.context() as patch:
        patch.setattr(drafter.model.model.get_input_embeddings().weight, "data", 2 * weights)
        with pytest.raises(FsdError, match="was made with other settings or weights"):
            forecast(decoder, PROMPTS, kept=kept, **options)


@pytest.mark.usefixtures("few")
def test_a_calibration_that_names_no_rules_gets_the_forecasts(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    options = SweepOptions(prompts=[toy.prompts], rules=["auto"], max_new_tokens=8, **toy.options)
    kept: list[Forecast] = []

    def watched(*arguments: Any, **more: Any) -> Forecast:
        kept.append(forecast(*arguments, **more))
        kept[0].rows[1:] = [row.__class__(**{**vars(row), "speed": 1.0 + n}) for n, row in enumerate(kept[0].rows[1:])]
        return kept[0]

    monkeypatch.setattr("fsd_bench.sweep.candidates.forecast", watched)
    rules = forecast_rules(options)
    assert 1 < len(rules) <= 4
    assert {rule.partition("@")[0] for rule in rules} <= {row.rule for row in kept[0].rows}
    assert all(TreeShape.parse(rule.partition("@")[2]) for rule in rules)
    monkeypatch.setattr(Forecast, "frontier", lambda *arguments: [])
    with pytest.raises(FsdError, match="nothing to calibrate"):
        forecast_rules(options)


def test_a_learned_price_lies_between_fixed_ones() -> None:
    """It spends what is allowed, or what the smallest coefficient can; exact is where nothing is."""

    def shaped(nats: float, tau: float) -> RuleOnShape:
        return RuleOnShape(TreeShape.chain(4), tau, nats, nats, 4.0, 5.0, 1.0)

    rule = parse_rule("tilted:match_temperature=0.5")
    exact, *fixed = fixed_coefs(rule)
    assert exact == parse_rule("exact") and fixed[0] == parse_rule("tilted:8:min_p=0.1"), "with the rule's own min_p"
    found = {each: [shaped(0.1 * n, 2.0 + 0.4 * n)] for n, each in enumerate([exact, *fixed])}
    for allowed, tau in ((0.0, 2.0), (0.05, 2.2), (0.15, 2.6), (9.0, 4.8)):
        assert learned(rule, allowed, found)[0].tau == pytest.approx(tau)
