"""Training on rows with images: ids, features and drafts are those of decoding, and a trained head decodes."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from fsd_core.errors import DataError
from fsd_core.text.row_check import LISTING, RowCheck
from fsd_infer import FuzzyDecoder, TreeShape
from fsd_infer.decoder.prompts import encode_with_images
from fsd_infer.drafters.eagle import EagleSession
from fsd_infer.drafters.mtp import MtpSession
from fsd_infer.engine import Callback
from fsd_train.cli import main as cli
from fsd_train.data import FeatureStore, collate, read_answers
from fsd_train.data.images import ImageReader
from fsd_train.data.plan import next_turns, plan_jobs
from fsd_train.models import MtpModule
from fsd_train.models.unroll import supervised
from tests.covering import fast_only
from tests.families import recorded_drafts
from tests.seeing_toys import an_image, save_seeing, seeing_decoder
from tests.test_seeing import LIMITS, decoder_of, expected_of
from tests.text_toys import tiny_tokenizer, write_rows
from tests.train_toys import eagle_module, fit_command, in_recipe, logged, ready

FAMILIES = ["qwen2_5_vl", "qwen3_vl", "smolvlm", "llava", "gemma3", "gemma4", "internvl", "mistral3", "glm4v"]
SMALL, TALL = "small.png", "pictures/tall.png"
TEXT = {"messages": [{"role": "user", "content": "is there an answer"}, {"role": "assistant", "content": "the end"}]}
END = {"role": "assistant", "content": "the end"}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def asked(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def pictures(place: Path) -> Path:
    """The folder with two images, and one that is cut off."""
    (place / "pictures").mkdir(parents=True, exist_ok=True)
    an_image(1).save(place / SMALL)
    an_image(2, 16, 32).save(place / TALL)
    (place / "cut.png").write_bytes((place / SMALL).read_bytes()[:-300])
    return place


def layouts(place: Path) -> dict[str, tuple[dict[str, Any], list[Any]]]:
    """Rows by layout, and the messages that decoding would be asked with before the last answer."""
    url = "data:image/png;base64," + base64.b64encode((place / SMALL).read_bytes()).decode()
    small, tall = ({"type": "image", "image": str(place / name)} for name in (SMALL, TALL))
    openai = {"type": "image_url", "image_url": {"url": url}}
    what, mat = [asked(small, text("what is it"))], {"role": "assistant", "content": "it is the mat"}
    then = [asked(text("the cat "), small, text(" what")), mat, asked(tall, text("and that <image>"))]
    said = [{"from": "human", "value": "<image>\nwhat is it"}, {"from": "gpt", "value": "the end"}]
    return {
        "OpenAI's parts": ({"messages": [asked(openai, text("what is it")), END]}, what),
        "LLaVA's": ({"image": SMALL, "conversations": said}, what),
        "`datasets`'": (
            {"images": [{"bytes": None, "path": SMALL}], "prompt": [{"role": "user", "content": "what is it"}],
             "completion": "the end"}, what,
        ),
        "a question": ({"image": str(place / SMALL), "question": "what is it", "response": "the end"}, what),
        "paths in two turns": (
            {"messages": [
                asked(text("the cat "), openai, text(" what")), mat,
                asked({"type": "image", "path": TALL}, text("and that <image>")), END]}, then,
        ),
        "parts that name none": (
            {"images": [SMALL, TALL], "messages": [
                asked(text("the cat "), {"type": "image", "path": None}, text(" what")), mat,
                asked({"type": "image"}, text("and that <image>")), END]}, then,
        ),
    }  # fmt: skip


def read(reader: ImageReader, place: Path, rows: Any, **options: Any) -> Any:
    return read_answers([write_rows(place / "rows.jsonl", rows)], reader.tokenizer, reader=reader, **options)[0]


@pytest.mark.parametrize("family", fast_only(FAMILIES, ["qwen2_5_vl", "smolvlm", "gemma3"]))
def test_rows_are_read_as_decoding_reads_prompts(family: str, tmp_path: Path) -> None:
    """In each layout: ids up to the last answer, and what the target gets beside them; answers alone are supervised."""
    decoder, made = decoder_of(family), layouts(pictures(tmp_path))
    rows = read(ImageReader.of(decoder.target), tmp_path, [row for row, _ in made.values()])
    for number, (_, messages) in enumerate(made.values()):
        item, whole = rows[number], rows.texts[number].tolist()
        ids, image_input = encode_with_images(decoder.target, messages)
        assert whole[: len(ids)] == ids and image_input is not None
        said = decoder.tokenizer.decode(item["input_ids"][item["loss_mask"].bool()])
        assert said == "it is the mat<|end|>" * (len(messages) > 1) + "the end<|end|>"
        found = rows.prompt_images(number, len(ids)).inputs
        assert found.keys() == image_input.inputs.keys()
        assert all(torch.equal(found[name], value) for name, value in image_input.inputs.items())
    two = rows.texts[4].tolist()
    first = two.index(decoder.tokenizer.eos_token_id, rows.prompt_length(4)) + 1  # the end of the first answer
    short = read(ImageReader.of(decoder.target), tmp_path, [made["paths in two turns"][0]], max_length=first + 9)
    assert short.texts[0].tolist() == two[:first], "a row that is cut within its second image ends before it"
    assert len(short.images[0].sources) == 1 and short.keys[0] != rows.keys[4]


@pytest.mark.parametrize("marked", [False, True], ids=["plain", "generation markers"])
def test_a_processor_begins_texts_with_special_tokens(marked: bool, tmp_path: Path) -> None:
    """As LLaVA's does, whose template writes no bos and marks answers; users' names of special tokens stay text."""
    decoder = seeing_decoder("llava")
    tokenizer = decoder.tokenizer
    says = "{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}" if marked else "{{ m['content'] }}<|end|>"
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}:\n{% if m['content'] is string %}{% if m['role'] == 'assistant' %}"
        + says
        + "{% else %}{{ m['content'] }}{% endif %}{% else %}{% for p in m['content'] if p['type'] == 'image' %}<image>"
        "\n{% endfor %}{% for p in m['content'] if p['type'] == 'text' %}{{ p['text'] }} {% endfor %}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}"
    )
    bos = ("<|start|>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|start|> $A", special_tokens=[bos])
    [*_, (row, messages)] = layouts(pictures(tmp_path)).values()
    rows = read(ImageReader.of(decoder.target), tmp_path, [row])
    whole, (ids, _) = rows.texts[0].tolist(), encode_with_images(decoder.target, messages)
    assert ids[0] == bos[1] and ids.count(bos[1]) == 1 and whole[: len(ids)] == ids
    item = rows[0]
    said = tokenizer.decode(item["input_ids"][item["loss_mask"].bool()])
    assert said == "it is the mat<|end|>the end<|end|>"


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"messages": [asked({"type": "image", "path": "no.png"}), END]}, "no.png' of at most 64 MiB"),
    "cut off": ({"image": "cut.png", **TEXT}, "cut.png holds no image that can be read"),
    "no image": ({"image": "rows.jsonl", **TEXT}, "rows.jsonl holds no image that can be read"),
    "remote": ({"image": "http://127.0.0.1/a.png", **TEXT}, "is a remote URL, and images are not fetched"),
    "no base64": ({"image": "data:image/png;base64,?", **TEXT}, "the image is not base64"),
    "number": ({"image": 3, **TEXT}, "an image is a path, a data: URL or a PIL image, got int"),
    "of an assistant": (
        {"messages": [*TEXT["messages"][:1], {"role": "assistant", "content": [{"type": "image", "path": SMALL}]}]},
        "turn 1 (assistant) has an image",
    ),
    "too few": ({"image": SMALL, "messages": [asked({"type": "image"}, {"type": "image"}), END]}, "more image parts"),
    "too many": ({"images": [SMALL] * 2, "messages": [asked({"type": "image"}), END]}, "1 images more than places"),
    "places": (
        {"images": [SMALL] * 2, "messages": [{"role": "user", "content": "<image> what"}, END]},
        "have <image> 1 times, and the row has 2 images",
    ),
    "no turn": ({"image": SMALL, "data": ["a", "b"]}, "images go with messages, conversations or the text of a prompt"),
    "unread": ({"messages": [*TEXT["messages"], asked({"type": "image", "path": SMALL})]}, "none in the turns"),
    "private": ({"image": SMALL, "prompt": "\uf8fd", "response": "a"}, "the private character U+F8FD"),
    "ids of text": ({"image": SMALL, **TEXT, "prompt_ids": [5, 6], "response_ids": [7]}, "0 tokens that stand for"),
    "video": ({"messages": [asked({"type": "image", "path": SMALL}, {"type": "video"}), END]}, "of the type 'video'"),
}  # fmt: skip


def test_rows_with_bad_images_are_skipped_with_their_reasons(tmp_path: Path, capsys: Any) -> None:
    reader = ImageReader.of(seeing_decoder("smolvlm").target)
    good = [TEXT, {"image": SMALL, **TEXT}] * 20 * len(BAD)
    rows = [*good[:4], *(row for row, _ in BAD.values()), *good[4:]]
    found = read(reader, pictures(tmp_path), rows, check=(check := RowCheck()))
    check.finish(tmp_path / LISTING)
    listed = [json.loads(line) for line in (tmp_path / LISTING).read_text().splitlines()]
    assert len(found) == len(good) and len(listed) == len(BAD)
    for number, (line, (kind, (row, problem))) in enumerate(zip(listed, BAD.items(), strict=True), start=5):
        assert line["row"] == f"{tmp_path / 'rows.jsonl'}:{number}" and problem in line["reason"], kind
        with pytest.raises(DataError):
            read(reader, tmp_path, [row])
    with pytest.raises(DataError, match="the row has an image, and rows are read as text"):
        read_answers([write_rows(tmp_path / "rows.jsonl", [{"image": SMALL, **TEXT}])], tiny_tokenizer())
    rows = read(reader, tmp_path, [{"image": SMALL, **TEXT}])
    an_image(7).save(tmp_path / SMALL)
    for use in (lambda: rows[0], lambda: rows.prompt_images(0, rows.lengths[0])):
        with pytest.raises(DataError, match="an image has changed since the rows were read"):
            use()


def test_later_turns_show_the_images_so_far(tmp_path: Path) -> None:
    """After the target's own answers, as decoding reads the conversation."""
    decoder = seeing_decoder("qwen2_5_vl")
    reader, place = ImageReader.of(decoder.target), pictures(tmp_path)
    small, tall = ({"type": "image", "path": str(place / name)} for name in (SMALL, TALL))
    first, then = asked(text("the cat "), small, text(" what")), asked(tall, text("and that"))
    rows = [{"messages": [first, END, then, END, {"role": "user", "content": "is it"}]}]
    plan = plan_jobs([write_rows(place / "rows.jsonl", rows)], decoder.tokenizer, reader=reader)
    said = [first]
    for turn in (then, {"role": "user", "content": "is it"}):
        plan = next_turns(plan, {plan.jobs[0].id: ("it is the mat", "stop")}, decoder.tokenizer, reader)
        said += [{"role": "assistant", "content": "it is the mat"}, turn]
        (job,) = plan.jobs
        ids, expected = encode_with_images(decoder.target, said)
        assert job.images is not None and expected is not None and job.prompt_ids == ids
        found = reader.image_input(job.prompt_ids, job.images)
        assert found is not None and all(torch.equal(found.inputs[name], x) for name, x in expected.inputs.items())


class Prefilled(Callback):
    """Keeps the features that decoding has of a prompt."""

    def on_round(self, report: Any) -> None:
        if report.phase == "prefill":
            self.features: Tensor = report.tensors.features.clone()


@pytest.mark.parametrize(("family", "layout"), [
    ("qwen2_5_vl", "eagle"), ("qwen2_5_vl", "eagle3"), ("qwen3_5", "mtp"), ("smolvlm", "eagle3"), ("gemma3", "eagle"),
])  # fmt: skip
def test_features_and_drafts_are_those_of_decoding(family: str, layout: str, tmp_path: Path, monkeypatch: Any) -> None:
    """In a batch beside text: features of a row as of a prefill, the head's chain as of a draft tree, the loss by hand.

    The row's answer is the target's token, and a path of the tree that decoding drafts after it.
    """
    save_seeing(tmp_path / "target", family, with_processor=True)
    options: dict[str, Any] = {"unroll_steps": 3, "loss": "kl_pq"}
    if layout == "mtp":
        module = ready(MtpModule(str(tmp_path / "target"), new=True, **options)).eval()
    else:
        head = {"layout": layout, **({"own_lm_head": False} if layout == "eagle3" else {})}
        module = ready(eagle_module(tmp_path, head=head, **options)).eval()
    with torch.no_grad():
        for parameter in module.head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    target = module.target
    decoder = FuzzyDecoder(target, module.make_drafter(target, TreeShape(3, 2, 6)))
    [*_, (row, messages)] = layouts(pictures(tmp_path)).values()
    seen = recorded_drafts(
        MtpSession if layout == "mtp" else EagleSession, lambda session: session.cache.offsets is not None, monkeypatch
    )
    made = decoder.generate(messages, callbacks=[prefilled := Prefilled()], **LIMITS)
    assert made.sequences == [expected_of(decoder, messages)]
    turns, tree = seen[0]
    assert turns == (family.startswith("qwen") and layout != "eagle3")  # new EAGLE-3 heads count tokens
    node = int(tree.is_draft[0].nonzero()[-1])
    path = tree.ancestors[0, node].nonzero()[:, 0].tolist()  # the root, and nodes below it
    ids = encode_with_images(target, messages)[0]
    answer = [made.sequences[0][0], *tree.tokens[0, path[1:]].tolist(), 7]
    row |= {"prompt_ids": ids, "response_ids": answer}
    rows = read(ImageReader.of(target), tmp_path, [TEXT, row])
    batch: Any = collate([rows[0], rows[1]])
    drafts = module.draft(batch, 3)
    features, first = module._target_features(batch)[0][0], rows.lengths[0]
    torch.testing.assert_close(
        features[first : first + len(ids)], prefilled.features[0, : len(ids)], rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(features[:first], target.features(rows.texts[0].long()[None])[0], rtol=1e-5, atol=1e-5)
    # step s at the position of the prompt's last token plus s drafts what the s-th node of the path does
    at, logits = first + len(ids) - 1, module.lm_head()(drafts.estimates)
    position = drafts.rows.position[drafts.rows.position_index]
    for step, place in enumerate(path[:-1]):
        [number] = ((position == at + step) & (drafts.rows.step == step)).nonzero()[:, 0].tolist()
        drafted = tree.q_logits[0, tree.q_index[0, place]]
        torch.testing.assert_close(logits[number], drafted, rtol=1e-4, atol=1e-4)
    assert len(path) > 2
    log_q, p = logits.log_softmax(-1), module.lm_head()(features[position + 1, : target.hidden_size]).softmax(-1)
    kl = (p * (p.log() - log_q)).sum(-1)
    weights = module.step_decay**drafts.rows.step
    torch.testing.assert_close(module.loss(drafts).loss, (kl * weights).sum() / weights.sum(), rtol=1e-5, atol=1e-6)
    wanted = [int(each.sum()) for each in supervised(batch["loss_mask"][0], 3)]
    assert drafts.rows.step.bincount().tolist() == wanted


def test_a_run_on_images_ends_in_a_head_that_decodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """regenerate, fit with recorded features and decoded validation, resume, cache-features, fit on them, decode."""
    save_seeing(tmp_path / "target", "qwen2_5_vl", with_processor=True)
    pictures(tmp_path)
    rows = [
        *({"image": name, "prompt": f"what is {number}"} for number in range(9) for name in (SMALL, TALL)),
        *({"prompt": f"is it {number}"} for number in range(8)), {"image": "no.png", "prompt": "what"},
    ]  # fmt: skip
    target, answers = str(tmp_path / "target"), tmp_path / "out" / "answers.jsonl"
    command = ["--target", target, "--prompts", str(write_rows(tmp_path / "prompts.jsonl", rows)), "--dtype", "float32"]
    limits = ["--max-new-tokens", "10", "--drafter", "lookup", "--batch-size", "4", "--quiet"]
    assert cli(["regenerate", *command, "--output", str(answers), *limits]) == 0
    said = capsys.readouterr()
    assert "26 answered" in said.out and "skipped 1 of 27 rows" in said.err and "no.png" in said.err
    decoder = seeing_decoder("qwen2_5_vl")
    made = [json.loads(line) for line in answers.read_text().splitlines()]
    shown = [row for row in made if isinstance(row["messages"][-1]["content"], list)]
    expected = expected_of(decoder, shown[0]["messages"], max_new_tokens=10)
    assert len(shown) == 18 and shown[0]["response_ids"] == expected
    model = {
        "target": target, "head": {"fused_layers": [0, 1]}, "draft_vocab_size": 64, "unroll_steps": 2, "lr": 5e-3,
        "warmup_steps": 1, "loss": "kl_pq",
    }  # fmt: skip
    data = {"train_files": [str(answers)], "validation_fraction": 0.3, "batch_tokens": 128, "tokenizer": target}
    callbacks = [in_recipe("ExportHead"), in_recipe("DecodedTau", rules=["exact"], prompts=4, max_new_tokens=6)]

    def fit(name: str, after: Path | None = None, **more: Any) -> list[float]:
        out = tmp_path / name
        checkpoints = in_recipe("ModelCheckpoint", dirpath=str(out / "ckpt"), every_n_train_steps=4, save_top_k=-1)
        trainer = {"max_steps": 8, "callbacks": [*callbacks, checkpoints], "precision": "32-true",
                   "logger": in_recipe("CSVLogger", save_dir=str(out)), "log_every_n_steps": 1}  # fmt: skip
        resumed = [] if after is None else [f"--ckpt_path={after}"]
        assert cli([*fit_command(out, trainer, model, {**data, **more}), *resumed]) == 0
        return logged(out, "loss")

    plain = fit("plain")
    assert fit("resumed", next((tmp_path / "plain").rglob("*step=4.ckpt"))) == pytest.approx(plain[4:], rel=1e-5)
    assert fit("recorded", record_features=str(tmp_path / "features")) == pytest.approx(plain, rel=0.02)
    cached = ["--target", target, "--data", str(answers), "--output", str(tmp_path / "cache"), "--dtype", "float32"]
    assert cli(["cache-features", *cached, "--layers", *map(str, FeatureStore(tmp_path / "features").layers)]) == 0
    store = FeatureStore(tmp_path / "cache")
    assert len(store) == 26, "equal ids with other images have features of their own"
    assert fit("cached", features=str(tmp_path / "cache")) == pytest.approx(plain, rel=0.02)
    assert logged(tmp_path / "cached", "decoded_tau/exact")[-1] >= 1
    head = next((tmp_path / "plain").rglob("config.json")).parent
    few = ["--draft-vocab-size", "32", "--data", str(answers)]
    assert cli(["export", str(head), str(tmp_path / "few"), *few]) == 0
    recipe = tmp_path / "new.yaml"
    assert cli(["new-recipe", "--target", target, "--data", str(answers), "--output", str(recipe)]) == 0
    assert f"tokenizer: {target}" in recipe.read_text() and cli(["estimate", "--config", str(recipe)]) == 0
    tuned = FuzzyDecoder.from_pretrained(target, str(head), dtype="fp32", device="cpu")
    messages = [asked({"type": "image", "path": str(tmp_path / TALL)}, text("what is 3"))]
    assert tuned.generate(messages, **LIMITS).sequences == [expected_of(decoder, messages)]


def test_small_lms_read_no_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_seeing(tmp_path / "target", "smolvlm", with_processor=True)
    path, target = write_rows(pictures(tmp_path) / "rows.jsonl", [{"image": SMALL, **TEXT}] * 8), tmp_path / "target"
    model = in_recipe("fsd_train.models.LMModule", target=str(target), drafter="self:layers=0")
    data = {"train_files": [str(path)], "validation_fraction": 0, "tokenizer": str(target)}
    assert cli(fit_command(tmp_path / "out", {"max_steps": 1}, model, data)) == 2
    assert "rows have images, which a small LM does not read" in capsys.readouterr().err
