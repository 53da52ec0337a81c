"""What new users get wrong: each works, or says in one line how it is meant."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import io
import itertools
import logging
import pickle
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsd_bench.cli import main as fsd_bench
from fsd_core.errors import DataError, UnknownNameError
from fsd_core.functional import register
from fsd_core.text.pieces import token_pieces
from fsd_infer import FsdError, FuzzyDecoder, Target
from fsd_infer.cli import report
from fsd_infer.cli.main import main as fsd_infer
from fsd_infer.drafters.loading import NAMES
from fsd_infer.request.options import NEW_TOKENS
from fsd_infer.rules import RULES, LossyRule, OutputDistribution, RuleInputs, parameter
from fsd_train.cli import main as fsd_train
from fsd_train.losses import LOSSES, LossOutput, row_loss
from fsd_train.losses.base import check_output
from fsd_train.losses.rows import Distributions
from tests.families import save_head, tiny_head
from tests.fuzzing import called
from tests.loss_toys import build_loss, make_batch
from tests.text_toys import save_tiny_chat_target
from tests.tree_rounds import tree_round

PROMPT = "the cat sat"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_target(tmp_path_factory.mktemp("forgiving") / "target")


@pytest.fixture(scope="module")
def decoder(target: Path) -> FuzzyDecoder:
    return FuzzyDecoder.from_pretrained(str(target), "none", dtype=torch.float32, device="cpu")


def test_a_model_and_its_tokenizer_are_given_as_to_transformers(target: Path, decoder: FuzzyDecoder) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(target), AutoTokenizer.from_pretrained(target)
    made = FuzzyDecoder.from_pretrained(model, tokenizer)
    assert made.generate(PROMPT, max_new_tokens=8).text == decoder.generate(PROMPT, max_new_tokens=8).text
    encoded = tokenizer(["the cat", PROMPT], padding=True, padding_side="left", return_tensors="pt")
    answers = made.generate(**encoded, max_new_tokens=8).sequences
    assert answers == made.generate(encoded, max_new_tokens=8).sequences and len(answers) == 2
    with pytest.raises(FsdError, match="unknown option 'ruel'. Did you mean 'rule'?"):
        made.generate(**encoded, ruel="exact")
    with pytest.raises(FsdError, match="there is no prompt: give text, messages, token ids or what a tokenizer"):
        made.generate(max_new_tokens=8)
    with pytest.raises(FsdError, match="has no tokenizer: give one as tokenizer=, add its files, or"):
        FuzzyDecoder.from_pretrained(model, "none").generate(PROMPT)


def test_a_temperature_samples_and_an_answer_is_as_long_as_on_the_command_line(decoder: FuzzyDecoder) -> None:
    asked = [decoder.generate(PROMPT, temperature=5.0, seed=seed, max_new_tokens=8).texts[0] for seed in range(4)]
    assert len(set(asked)) == 4
    greedy = decoder.generate(PROMPT, eos_token_id=None).sequences
    assert greedy == decoder.generate(PROMPT, temperature=0.0, eos_token_id=None).sequences
    assert greedy == decoder.generate(PROMPT, temperature=5.0, do_sample=False, eos_token_id=None).sequences
    assert len(greedy[0]) == NEW_TOKENS == 128
    assert len(decoder.generate(PROMPT, max_length=30, eos_token_id=None, chat=False).sequences[0]) < 30


def test_an_answer_prints_as_what_one_looks_for(decoder: FuzzyDecoder) -> None:
    answer = decoder.generate(PROMPT, max_new_tokens=8)
    assert repr(answer).startswith(f"GenerateOutput([{answer.text!r}], ") and len(repr(answer)) < 500
    assert repr(decoder).startswith(f"FuzzyDecoder({decoder.target.config.name_or_path!r}, none, ")


LOADS: list[tuple[dict[str, Any], str]] = [
    ({"load_in_4bit": True}, r'give quantization_config=\{"quant_method": "bitsandbytes", "load_in_4bit": True\}'),
    ({"load_in_8bit": True}, "load_in_8bit is not an argument for a target"),
    ({"device_map": "gpu"}, "device 'gpu' cannot be used here"),
    ({"device_map": {"": "gpu"}}, "device 'gpu' cannot be used here"),
    ({"device_map": "cpu", "device": "cpu"}, "device is cpu and device_map is cpu: give one of them"),
    ({"device_map": "auto"}, "pip install accelerate. For one device, give device instead"),
]


def test_arguments_of_other_days_are_named_with_what_to_give(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # without accelerate
    for options, message in LOADS:
        with pytest.raises(FsdError, match=message):
            FuzzyDecoder.from_pretrained(str(target), "none", **options)
    for one in ("cpu", {"": "cpu"}):
        assert FuzzyDecoder.from_pretrained(str(target), "none", device_map=one).target.device.type == "cpu"


def test_what_a_decoder_cannot_do_says_what_can(decoder: FuzzyDecoder) -> None:
    with pytest.raises(FsdError, match="'plain' is not a rule: to decode without drafts, name the drafter 'none'"):
        decoder.generate("a", rule="plain")
    with pytest.raises(FsdError, match=r"got str: decoder.load_drafter\(NAME\) loads one"):
        decoder.generate("a", drafter="none")  # type: ignore[arg-type]
    for doing in (pickle.dumps, copy.deepcopy):
        with pytest.raises(FsdError, match="call FuzzyDecoder.from_pretrained in each process"):
            doing(decoder)


def test_a_head_is_no_target(target: Path, decoder: FuzzyDecoder, tmp_path: Path) -> None:
    save_head(tmp_path / "head", tiny_head(Target(decoder.target.model)).head, decoder.target.fingerprint())
    with pytest.raises(FsdError, match="head is a draft head, not a target: give it as drafter"):
        FuzzyDecoder.from_pretrained(str(tmp_path / "head"))


def test_a_base_model_says_once_that_it_only_continues(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = None
    with caplog.at_level(logging.WARNING):
        made = FuzzyDecoder.from_pretrained(AutoModelForCausalLM.from_pretrained(target), "none", tokenizer)
        made.generate(PROMPT, chat=False, max_new_tokens=2)
        assert "chat template" not in caplog.text
        for prompt in ([{"role": "user", "content": PROMPT}], PROMPT):
            made.generate(prompt, max_new_tokens=2)
    with pytest.raises(FsdError, match="apply_chat_template: .* has no chat template"):
        made.generate(PROMPT, apply_chat_template=True, max_new_tokens=2)
    assert caplog.text.count("has no chat template: it continues prompts as they are") == 1


# Extensions ----------------------------------------------------------------------------------------------------------


def test_a_rule_that_is_put_together_wrongly_is_refused_when_it_is_registered() -> None:
    class Unfinished(LossyRule):
        pass

    class Undecorated(LossyRule):
        share: float = parameter(0.5)

        def output(self, inputs: RuleInputs) -> OutputDistribution:
            return OutputDistribution.target(inputs)

    for kind in (int, Unfinished):
        with pytest.raises(TypeError, match="'mine' must be a class that derives from LossyRule or Rule"):
            RULES.register("mine")(kind)  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"put @dataclass\(frozen=True\) between @RULES.register and the class"):
        RULES.register("mine")(Undecorated)
    with pytest.raises(UnknownNameError, match="For a rule of your own, import its module: --import MODULE"):
        RULES.get("mine")


@pytest.mark.parametrize("made", [OutputDistribution.passing, OutputDistribution.trusting])
def test_a_cutoff_is_a_number_or_one_for_each_context(made: Callable[..., OutputDistribution]) -> None:
    inputs = RuleInputs(tree_round(0, greedy=True))
    same = made(inputs, -1), made(inputs, -1.0)
    assert same[0].logit_bias is same[1].logit_bias is None or torch.equal(same[0].logit_bias, same[1].logit_bias)
    with pytest.raises(FsdError, match=r"cutoff is \(\) torch.float32: give a number, or ln p per context, \(\d"):
        made(inputs, torch.tensor(-1.0))


def test_a_loss_without_one_value_per_row_or_without_a_gradient_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOSSES, "_entries", {})
    wrong: dict[str, tuple[Distributions, str]] = {
        "None": (lambda log_p, log_q: None, r"returned None for \d+ rows"),
        "whole": (lambda log_p, log_q: (log_p - log_q).abs().sum(), r"returned \(\) for \d+ rows"),
        "each": (lambda log_p, log_q: (log_p - log_q).abs(), r"for example by .sum\(-1\)"),
        "fixed": (lambda log_p, log_q: log_p.sum(-1), "loss 'fixed' has no gradient: compute its values from log_q"),
    }
    for name, (function, message) in wrong.items():
        row_loss(name)(function)
        with pytest.raises(DataError, match=message):
            build_loss(name)(make_batch().batch())
    one, loss = torch.ones((), requires_grad=True), build_loss("fixed")
    check_output(LossOutput(one), loss, 3)
    outputs = (None, LossOutput(one[None]), LossOutput(one.detach()), LossOutput(one, [1]), LossOutput(one, {}, one))  # type: ignore
    for out in outputs:
        with pytest.raises(DataError, match="the loss .* (returned|has no gradient)"):
            check_output(out, loss, 3)


def test_a_kernel_of_an_unknown_function_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'row_max'. Known: .*topk_logprobs"):
        register("row_mx", "xpu", max)


# The command line ----------------------------------------------------------------------------------------------------

MAINS = {"fsd-infer": fsd_infer, "fsd-bench": fsd_bench, "fsd-train": fsd_train}


@pytest.mark.parametrize("program", MAINS)
def test_a_program_without_arguments_lists_its_commands_and_each_has_a_version(program: str) -> None:
    status, out, err = called(MAINS[program], [])
    some = {"fsd-infer": "generate", "fsd-bench": "calibrate", "fsd-train": "cache-features"}[program]
    assert status == 2 and not out and some in err and f"usage: {program}" in err
    status, out, err = called(MAINS[program], ["--version"])
    assert status == 0 and out.startswith(f"{program} 0.") and not err
    as_module = importlib.import_module(f"{program.replace('-', '_')}.__main__")  # `python -m fsd_infer`
    assert as_module.main is MAINS[program]


MISTAKES = [
    ("fsd-infer generatte --prompt x", "fsd-infer: unknown command 'generatte'. Did you mean 'generate'? Known: "),
    ("fsd-infer bnch", "Did you mean 'bench'?"),
    ("fsd-bench calibrat", "Did you mean 'calibrate'?"),
    ("fsd-train fitt", "fsd-train: unknown command 'fitt'. Did you mean 'fit'?"),
    ("fsd-infer generate --promt x", "fsd-infer generate: unknown option --promt. Did you mean '--prompt'?"),
    ("fsd-train doctor runs --target {target} --data a", "unexpected argument 'runs'. Did you mean --head runs?"),
    ("fsd-infer generate {target} --prompt x", "Did you mean --target {target}?"),
    ("fsd-infer generate --prompt x --target {target} lookup", "Did you mean --drafter lookup?"),
    ("fsd-train new-recipe --target {target} rows.jsonl", "Did you mean --data rows.jsonl?"),
    ("fsd-infer generate --prompt x --color alwayss", "invalid choice 'alwayss'. Did you mean 'always'?"),
    ("fsd-infer generate --prompt x --target {target} --drafter lokup", "'lokup'. Did you mean 'lookup'?"),
    ("fsd-infer generate --prompt x --target runs/mytraget", "runs/mytraget: no such directory, though runs is one."),
    ("fsd-infer generate --prompt x --target {target} --drafter runs/mytraget", "Did you mean 'mytarget'?"),
]


@pytest.mark.parametrize(("line", "said"), MISTAKES)
def test_mistakes_on_the_command_line_name_what_was_meant(line: str, said: str, target: Path, here: Path) -> None:
    (here / "runs" / "mytarget").mkdir(parents=True)
    program, *words = line.format(target=target).split()
    status, _, err = called(MAINS[program], words)
    assert status == 2 and said.format(target=target) in err and err.count("\n") == 1, err


def test_the_list_of_rules_says_once_what_all_take_and_names_what_can_be_given() -> None:
    status, said, _ = called(fsd_infer, ["rules"])
    assert status == 0 and said.count("only_in=None") == 1 and "mars(margin=1.0): " in said and "asd(budget=8.0" in said
    assert all(f"\n  {name}: " in said for name in NAMES) and "eagle:" not in said


def test_an_answer_ends_with_two_lines_all_figures_or_none(target: Path) -> None:
    words = ["generate", "--prompt", PROMPT, "--target", str(target), "--dtype", "fp32", "--max-new-tokens", "8"]
    _, answer, said = called(fsd_infer, words)
    assert len(said.splitlines()[-2:]) == 2 and said.endswith("(--stats says more)\n")
    for option, figures in (("--stats", "prefill"), ("--quiet", "")):
        _, again, said = called(fsd_infer, [*words, option])
        assert again == answer and figures in said and bool(said) == bool(figures)


def test_tokens_come_in_the_colours_of_who_wrote_them_with_their_rate(decoder: FuzzyDecoder) -> None:
    drafter, prompt = decoder.load_drafter("lookup"), "the cat sat on the mat the cat sat on the mat"
    for width, colour in ((400, True), (400, False), (4, True)):
        stream, ticks = io.StringIO(), itertools.count(0.0)
        live = report.LiveTokens(decoder.tokenizer, stream, colour, width, clock=partial(next, ticks))
        made = decoder.generate(prompt, "tilted:4", drafter=drafter, callbacks=[live], max_new_tokens=32)
        live.end()
        pieces, sources = token_pieces(decoder.tokenizer, made.sequences[0]), made.records[0].sources
        assert set(sources) > {0}
        figures = re.findall(r"\x1b\[2m  (\S+) tok/s(?:, tau (\S+))?\x1b\[0m\x1b\[\d+D", stream.getvalue())
        shown = re.sub(r"\x1b\[2m[^\x1b]*\x1b\[0m\x1b\[\d+D|\x1b\[K", "", stream.getvalue())
        assert shown == report.show_accepted(pieces, sources, colour) + "\n"
        assert bool(figures) == (width > 4)
        if figures:
            rounds = 1 + made.stats.target_forwards
            assert figures[-1] == (f"{made.stats.new_tokens / rounds:.1f}", f"{made.stats.acceptance_length:.2f}")
    assert report.columns("a漢e\u0301") == 4


OWN_RULE = """
from dataclasses import dataclass

from fsd_infer.drafters import DRAFTERS
from fsd_infer.drafters.memory import LookupDrafter
from fsd_infer.rules import RULES, Exact


@DRAFTERS.register("own-{name}-drafter")
class OwnDrafter(LookupDrafter):
    pass


@RULES.register("own-{name}")
@dataclass(frozen=True)
class Own(Exact):
    pass
"""


def test_a_rule_and_a_drafter_of_ones_own_are_imported_by_name(
    target: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    (here / "own_rules_here.py").write_text(OWN_RULE.format(name="rule"))
    words = ["generate", "--prompt", PROMPT, "--target", str(target), "--dtype", "fp32", "--max-new-tokens", "4"]
    status, answer, said = called(fsd_infer, [*words, "--import", "own_rules_here", "--rule", "own-rule"])
    assert status == 0 and answer == called(fsd_infer, words)[1], said
    for drafter in ("own-rule-drafter", "recycle+own-rule-drafter"):
        status, again, said = called(fsd_infer, [*words, "--import", "own_rules_here", "--drafter", drafter])
        assert status == 0 and again == answer and f"drafter {drafter}," in said, said
    status, _, said = called(fsd_infer, [*words, "--import", "no_such_rules"])
    assert status == 2 and "--import no_such_rules: ModuleNotFoundError: No module named" in said.splitlines()[-1]
