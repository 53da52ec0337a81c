"""Rows that cannot be used: each command skips a few, names and lists them, and stops for many or with --strict."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from fsd_core.errors import DataError
from fsd_core.text.encoding import read_prompts
from fsd_core.text.row_check import LISTING, RowCheck
from fsd_infer import Target
from fsd_infer.cli.main import main as fsd_infer
from fsd_infer.heads.head import EagleHead
from fsd_train.cli import main as fsd_train
from fsd_train.commands import regenerate
from fsd_train.commands.command_lines import PARSERS
from fsd_train.data import AnswersDataModule, read_answers
from fsd_train.data.answers import conclude
from tests.families import save_head, tiny_head
from tests.fuzzing import called
from tests.test_prompts import BOT, USER
from tests.text_toys import CHATML, save_tiny_chat_target, tiny_tokenizer

GOOD = {"messages": [USER, BOT]}
BAD: dict[str, tuple[Any, str]] = {
    "unknown role": ({"messages": [{"role": "x", "content": "a"}, BOT]}, "turn 0 has role 'x'"),
    "unknown speaker": ({"conversations": [{"from": "narrator", "value": "a"}]}, "turn 0 is from 'narrator'"),
    "no turns": ({"messages": []}, "messages must be a list of at least one turn"),
    "empty turn": ({"messages": [{"role": "user", "content": ""}, BOT]}, "is empty"),
    "no answer": ({"messages": [USER]}, "no answer"),
    "answers of weight 0": ({"messages": [USER, {**BOT, "weight": 0}]}, "every answer has weight 0"),
    "surrogate": ({"messages": [{"role": "user", "content": "\ud800"}, BOT]}, "half of a surrogate pair"),
    "nulls": ({"messages": None, "prompt": None, "response": None}, "no prompt"),
    "wrong type": ({"messages": {"role": "user"}}, "messages must be a list"),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "video"}]}, BOT]}, "of type text"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image"}]}, BOT]}, "turn 0 (user) has an image"),
    "images beside": ({**GOOD, "images": ["a.png"]}, "the row has an image"),
    "template options": ({**GOOD, "tools": "{"}, "`tools` is not JSON"),
    "deep template options": ({**GOOD, "tools": "[" * 99999}, "`tools` is not JSON (RecursionError"),
    "columns of other names": ({"Question": "a", "reply": "b"}, "text. It has 'Question', 'reply'."),
    "no ids": ({"prompt_ids": [], "response_ids": [1]}, "`prompt_ids` must be a list of token ids"),
    "id out of range": ({"prompt_ids": [1], "response_ids": [9999]}, "token id 9999 is outside"),
    "id of 33 bits": ({"prompt_ids": [1], "response_ids": [2**32]}, "whole numbers from 0 to 2147483647"),
    "ids with a fraction": ({"prompt_ids": [1], "response_ids": [1.5]}, "`response_ids` must be a list"),
    "ids of truth": ({"prompt_ids": [True], "response_ids": [1]}, "`prompt_ids` must be a list"),
    "turn without text": ({"prompt": [{"role": "user"}], "completion": "x"}, "turn 0 (user) must have `content`"),
    "answer no text": ({"messages": [USER], "response": 3}, "`response` must hold text"),
    "completion no text": ({"prompt": "x", "completion": 3}, "`completion` must hold text, found int"),
    "number": (3, "expected a JSON object, found int"),
    "not JSON": (b'{"messages": [', "not JSON"),
    "not UTF-8": (b'{"prompt": "\xff"}', "not UTF-8"),
    "deep": (b"[" * 99999, "nested too deep"),
    "a key twice": (b'{"messages": [{"role": "user", "role": "assistant"}]}', "('role' is there twice)"),
}  # fmt: skip


def write(path: Path, good: int, *bad: Any) -> Path:
    """Write good rows with bad ones in their middle, from line 3 on."""
    lines = [json.dumps(GOOD).encode()] * good
    lines[2:2] = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in bad]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.mark.parametrize("kind", BAD)
def test_one_row_of_many_is_skipped_and_one_of_few_ends_the_command(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row, problem = BAD[kind]
    path, listing = write(tmp_path / "rows.jsonl", 40, row), tmp_path / "out" / LISTING
    found, _ = read_answers([path], tiny_tokenizer(), vocab_size=300, check=(check := RowCheck()))
    conclude(check, tiny_tokenizer(), listing)
    said = capsys.readouterr().err.splitlines()
    assert len(found) == 40 and len(said) == 2 and problem in said[1] and str(listing) in said[0]
    assert said[0].startswith("warning: skipped 1 of 41 rows") and f"{path}:3" in said[1]
    [listed] = map(json.loads, listing.read_text().splitlines())
    assert listed["row"] == f"{path}:3" and problem in listed["reason"]
    for check, count in ((RowCheck(), 10), (RowCheck(strict=True), 40)):
        path = write(tmp_path / "rows.jsonl", count, row)
        with pytest.raises(DataError, match=f"^{path}:3: ") as caught:
            read_answers([path], tiny_tokenizer(), vocab_size=300, check=check)
            check.finish()
        assert problem in str(caught.value) and ("1 of 11 rows" in str(caught.value)) == (not check.strict)
    # ids are compared with the vocabulary once the target is there
    monkeypatch.setattr("fsd_train.data.module.load_tokenizer", lambda name, **options: tiny_tokenizer())
    file = str(write(path, 40, row))
    data = AnswersDataModule([file], validation_files=[file], tokenizer="toy")
    data.setup()
    data.check(300, None)
    assert len(data.train_set) == len(data.validation_set) == 40 and data.answer_counts(300).sum() > 0


def test_rows_are_counted_by_reason_and_a_hopeless_file_is_given_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roles = [{"messages": [{"role": f"r{number}", "content": "a"}]} for number in range(4)]
    path = write(tmp_path / "rows.jsonl", 200, *roles, BAD["no answer"][0])
    check = RowCheck()
    read_answers([path], tiny_tokenizer(), check=check)
    check.finish()
    first, roles_said, answer_said = capsys.readouterr().err.splitlines()
    assert first == "warning: skipped 5 of 205 rows, which cannot be used"
    assert roles_said.startswith(f"  4 x {path}:3: turn 0 has role 'r0'") and f"1 x {path}:7: no answer" in answer_said
    check.finish()
    assert not capsys.readouterr().err  # once
    path.write_text('{"body": "a"}\n' * 300)
    with pytest.raises(DataError, match="rows.jsonl:1: no prompt.*100 of 100 rows cannot be used, more than 5%"):
        read_answers([path], tiny_tokenizer(), check=RowCheck())
    with pytest.raises(DataError, match="paths is a list of files: give "):
        read_answers(str(path), tiny_tokenizer())
    with pytest.raises(DataError, match="train_files is a list of files: give "):
        AnswersDataModule(str(path))  # type: ignore[arg-type]
    for given in ({"max_length": -1}, {"validation_fraction": -0.1}, {"validation_fraction": float("nan")}):
        with pytest.raises(DataError, match=next(iter(given))):  # all rows would be cut, or none held out
            read_answers([path], tiny_tokenizer(), **given)  # type: ignore[arg-type]


# rows of a file whose first is bad, a limit, how many are read, and whether too many of those are bad
LIMITED: list[tuple[list[Any], int, range, bool]] = [
    ([GOOD] * 30, 4, range(20, 21), False), ([GOOD] * 10, 4, range(11, 12), True),
    ([*[GOOD] * 9, BAD["no turns"][0]] * 300, 4, range(1000, 1100), True),  # but no whole stream
    ([GOOD, *[BAD["no turns"][0]] * 3000], 1, range(1000, 1100), True),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "limit", "read", "fails"), LIMITED)
def test_a_limit_reads_on_until_few_of_the_rows_are_bad(
    rows: list[Any], limit: int, read: range, fails: bool, tmp_path: Path
) -> None:
    path, check = write(tmp_path / "rows.jsonl", 0, BAD["no turns"][0], *rows), RowCheck()
    with pytest.raises(DataError, match="rows.jsonl:1: .* rows cannot be used") if fails else nullcontext():
        assert len(check.first(read_prompts(path, check), limit)) == limit
        check.finish()
    assert check.read in read and check.too_many == fails


def test_fields_that_nothing_reads_are_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = {"type": "text", "text": USER["content"], "cache": 1}
    turns = [{**USER, "content": [part], "name": "Ann", "weight": 1}]
    turns.append({**BOT, "reasoning": "hm", "thinking": "so", "weight": 1, "loss": True})
    rows = [{"messages": turns, "mood": "fine", "empty": "", "id": f"{number}"} for number in range(3)]
    rows = [{**row, "tools": [{"type": "function", "function": {"name": "look"}}]} for row in rows]
    rows.append({"prompt": "a", "response": "b", "system": "s", "messages": None})  # type: ignore[dict-item]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    always = {"mood", *(f"messages[].{name}" for name in ("name", "loss", "content[].cache"))}
    always |= {"messages[].weight of turns of the role user", "messages[].thinking next to reasoning"}
    tools = "{% if tools %}{{ tools[0].function.name }}{% endif %}"
    for template, more in ((CHATML, {"messages[].reasoning", "tools"}), (tools + CHATML + "{# m.thinking #}", set())):
        tokenizer, check = tiny_tokenizer(template), RowCheck()
        read_answers([path], tokenizer, check=check)
        conclude(check, tokenizer)
        [said] = capsys.readouterr().err.splitlines()
        assert said.startswith("notice: nothing reads the fields `mood` (3 rows), ")
        named = said.removesuffix(" (docs/training.md)").split("fields ")[1].split(", ")
        assert {*named} == {f"`{name}` (3 rows)" for name in always | more}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target/ that has a tokenizer, rows.jsonl with a few bad rows of every kind, and a recipe."""
    root = tmp_path_factory.mktemp("chat")
    save_tiny_chat_target(root / "target")
    write(root / "rows.jsonl", 620, *(row for row, _ in BAD.values()))
    trainer = {
        "accelerator": "cpu", "max_steps": 1, "limit_val_batches": 1, "logger": False, "enable_checkpointing": False,
        "num_sanity_val_steps": 0, "default_root_dir": "run",
    }  # fmt: skip
    model = {"target": str(root / "target"), "head": {"num_layers": 1}}
    data = {
        "train_files": [str(root / "rows.jsonl")], "validation_files": [str(root / "rows.jsonl")],
        "tokenizer": str(root / "target"), "batch_tokens": 128, "max_length": 64,
    }  # fmt: skip
    (root / "recipe.yaml").write_text(json.dumps({"trainer": trainer, "model": model, "data": data}))
    return root


MODELS = "--target {target} --device cpu --dtype fp32 --drafter none --max-new-tokens 2 --prompts {rows}"
COMMANDS: dict[str, tuple[Callable[[list[str]], int], str, str | None]] = {
    "fit": (fsd_train, "fit --config {recipe}", f"run/{LISTING}"),
    "validate": (fsd_train, "validate --config {recipe}", f"run/{LISTING}"),
    "estimate": (fsd_train, "estimate --config {recipe}", None),
    "cache-features": (fsd_train, "cache-features --config {recipe} --output cache", f"cache/{LISTING}"),
    "regenerate": (
        fsd_train, "regenerate --target {target} --prompts {rows} --output a.jsonl --limit 2 --max-length 64 --quiet",
        f"a.jsonl.{LISTING}",
    ),
    "bench": (
        fsd_infer, f"bench --methods plain --no-warmup --every 100 --json r.json --overwrite {MODELS}",
        f"r.json.{LISTING}",
    ),
    "sweep": (fsd_infer, f"sweep --rules tilted:2 --limit 2 --output s.jsonl {MODELS}", f"s.jsonl.{LISTING}"),
    "skip-layers": (
        fsd_infer, "skip-layers --target {target} --dtype fp32 --prompts {rows} --layers 1 --max-new-tokens 2", None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_skip_name_and_list_bad_rows(name: str, chat: Path, here: Path) -> None:
    main, words, listing = COMMANDS[name]
    rows = chat / "rows.jsonl"
    argv = words.format(target=chat / "target", rows=rows, recipe=chat / "recipe.yaml").split()
    status, _, err = called(main, argv)
    assert status == 0 and "warning: skipped" in err and f"{rows}:3: turn 0 has role 'x'" in err, err
    if listing is not None:
        listed = [json.loads(line) for line in Path(listing).read_text().splitlines()]
        assert listed[0]["row"] == f"{rows}:3" and f"skipped {len(listed)} of" in err and len(listed) >= 10
    status, _, err = called(main, [*argv, "--strict"])
    assert status == 2 and f"{rows}:3: turn 0 has role 'x'" in err.splitlines()[-1], err


MEASURES = {
    "bench": "bench --methods plain --no-warmup --limit 2 --json r.json --overwrite",
    "sweep": "sweep --rules tilted:2 --limit 2 --output s.jsonl",
    "worth": "worth --limit 2 --tree 2,2,4",
    "calibrate": "calibrate --at-most-nats 9 --rules tilted:2 --limit 4 --output c",
}


@pytest.mark.parametrize("name", MEASURES)
def test_a_conversation_that_the_template_refuses_does_not_end_a_measurement(name: str, chat: Path, here: Path) -> None:
    """Nor one that is as long as the context."""
    shutil.copytree(chat / "target", "target")
    refuses = "{% if 'tea' in messages[0]['content'] %}{{ raise_exception('no tea') }}{% endif %}"
    Path("target/chat_template.jinja").write_text(refuses + CHATML)
    texts = [f"a cat {number}" for number in range(60)]
    texts[1:1], texts[3:3] = ["a tea"], ["the cat sat " * 100]
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    argv = [*MEASURES[name].split(), *MODELS.format(target="target", rows="rows.jsonl").split()]
    argv[argv.index("none")] = "target"
    status, _, err = called(fsd_infer, argv)
    assert "skipped 2 of " in err and "1 x rows.jsonl:2: the chat template refuses" in err and "no tea" in err, err
    assert "1 x rows.jsonl:4: the prompt has" in err and "has a context of 256 tokens: shorten or remove it" in err
    assert status == 0, err
    status, _, err = called(fsd_infer, [*argv, "--strict"])
    assert status == 2 and "rows.jsonl:2: the chat template refuses" in err.splitlines()[-1], err


def test_what_a_recipe_says_of_control_tokens_holds_for_all_of_its_commands(chat: Path, tmp_path: Path) -> None:
    """Names of special tokens inside messages: prompts of regenerate, and the ids that export counts."""
    recipe = json.loads((chat / "recipe.yaml").read_text())
    for allowed in (False, True):
        recipe["data"]["allow_control_tokens"] = allowed
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps(recipe))
        args = PARSERS["regenerate"]().parse_args(["--config", str(path), "--prompts", "x", "--output", "y"])
        regenerate.resolve(args)
        assert bool(args.target_kwargs.get("allow_control_tokens")) is allowed
    target = Target.from_pretrained(str(chat / "target"), dtype=torch.float32)
    save_head(
        tmp_path / "head", tiny_head(target).head, target.fingerprint(), {"hyperparameters": {"target": target.name}}
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": [USER, {"role": "assistant", "content": "<|start|>" * 50}]}) + "\n")
    command = ["export", str(tmp_path / "head"), str(tmp_path / "out"), "--draft-vocab-size", "4", "--data", str(rows)]
    for allowed in (False, True):
        given = ["--target-kwargs", json.dumps({"allow_control_tokens": allowed})]
        assert fsd_train([*command, *given, "--overwrite"]) == 0
        ids = EagleHead.from_pretrained(tmp_path / "out").draft_ids
        assert ids is not None and (target.tokenizer.convert_tokens_to_ids("<|start|>") in ids.tolist()) is allowed
