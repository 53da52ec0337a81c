"""Targets that see images: greedy answers equal ``generate`` in fp32, for text alone and for prompts with images."""

from __future__ import annotations

import base64
import io
import json
import re
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from torch import Tensor
from transformers import CONFIG_MAPPING

from fsd_core.errors import FsdError, ModelLoadError
from fsd_core.tensors import to_device
from fsd_infer import FuzzyDecoder, Target, TreeShape
from fsd_infer.cli.main import main
from fsd_infer.decoder.prompts import encode_with_images
from fsd_infer.device.cache import SlotCache
from fsd_infer.drafters import NoDrafter
from fsd_infer.engine import Request, decode
from fsd_infer.request.images import Sources, has_images, split_images
from fsd_infer.rules import parse_rule
from fsd_infer.serving.app import Limits, make_app
from fsd_infer.targets.image_inputs import ImagePrompt, read_with_images
from fsd_infer.targets.kinds import auto_class
from fsd_infer.targets.loading import load_target
from fsd_infer.targets.prefixes import PrefixCache
from tests.covering import fast_only
from tests.families import drafter_of, reference
from tests.seeing_toys import IMAGE, PROCESSORS, SEEING, an_image, save_seeing, seeing_decoder, seeing_model
from tests.sim_graphs import SimRecorder
from tests.simulated_device import SIM, SimulatedDevice

LIMITS: dict[str, Any] = dict(max_new_tokens=12, do_sample=False)
PROMPTS = [[5, 60, 7, 41, 99], [17, 250, 33, 8, 120, 44, 61, 3, 90, 14, 15, 16], [200, 31, 12, 77, 140, 9, 10]]
FAST = ["gemma3", "gemma4", "qwen2_5_vl", "qwen3_5", "smolvlm", "llava"]


def turn(*parts: Any) -> list[dict[str, Any]]:
    """A user's message of texts and images."""
    made = [{"type": "text", "text": x} if isinstance(x, str) else {"type": "image", "image": x} for x in parts]
    return [{"role": "user", "content": made}]


SHOWN = [
    turn("the cat ", an_image(1), " what is it"), turn("is there an answer to that"),
    turn(an_image(2), "the end", an_image(3, 16, 32), "it is the cat, and the mat"),
]  # fmt: skip


@cache
def decoder_of(family: str) -> FuzzyDecoder:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    try:
        return seeing_decoder(family)
    except ImportError as error:
        pytest.skip(f"the processor of {family} needs {error.name}")


def encoded(decoder: FuzzyDecoder, messages: Any) -> tuple[list[int], Any]:
    return encode_with_images(decoder.target, messages) if has_images(messages) else (decoder.encode(messages), None)


def expected_of(decoder: FuzzyDecoder, messages: Any, **options: Any) -> list[int]:
    """New tokens of ``generate`` for messages, as their processor encodes them."""
    ids, image_input = encoded(decoder, messages)
    inputs = (
        {}
        if image_input is None
        else {**image_input.inputs, "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    )
    made = decoder.target.model.generate(torch.tensor([ids]), **{**LIMITS, **options}, **inputs)
    return made[0, len(ids) :].tolist()


@pytest.mark.parametrize("family", fast_only(SEEING, ["gemma4", "qwen3_5", "lfm2_vl"]))
def test_text_alone_equals_generate(family: str, tmp_path: Path) -> None:
    """From a directory, chains and trees, in ragged batches."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    model = save_seeing(tmp_path, family)
    expected = reference(model, PROMPTS, **LIMITS)
    assert len({token for row in expected for token in row}) > 2, "degenerate model: the comparison would be hollow"
    loaded, tokenizer = load_target(str(tmp_path), dtype="fp32", device="cpu")
    assert type(loaded) is type(model) and tokenizer is not None
    check(FuzzyDecoder(target := Target(loaded, tokenizer), NoDrafter(target.vocab_size)), PROMPTS, expected)


@pytest.mark.parametrize("family", fast_only(PROCESSORS, FAST))
def test_images_equal_generate(family: str) -> None:
    """Through the family's own processor, beside a prompt without images, in a ragged batch."""
    decoder = decoder_of(family)
    expected = [expected_of(decoder, messages) for messages in SHOWN]
    check(decoder, SHOWN, expected)
    ids, image_input = encode_with_images(decoder.target, SHOWN[0])
    if family != "paligemma":  # whose toy says one token whatever it sees
        blind = decoder.generate(ids, **LIMITS).sequences[0]
        assert blind != expected[0], "the images change nothing: the comparison would be hollow"
    inputs = {**image_input.inputs, "input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}
    assert decoder.generate(inputs, **LIMITS).sequences == expected[:1], "as a processor returns them"


def check(decoder: FuzzyDecoder, prompts: Any, expected: list[list[int]]) -> None:
    target = decoder.target
    for name, least_tau in {"oracle": 2.0, "fused": 1.0}.items():
        if name == "fused" and not target.lm_head_is_plain:
            continue
        drafter = drafter_of(name, target, TreeShape(3, 3, 8))
        if name == "oracle":  # which asks the model for what follows a text, without its images
            drafter.known = known_of(decoder, prompts, expected)
        batch = decoder.generate(prompts, drafter=drafter, **LIMITS)
        assert batch.sequences == expected, f"{name}, ragged batch"
        assert batch.stats.acceptance_length >= least_tau, f"{name}: drafts that are right were not accepted"
    assert decoder.generate(prompts[:1], drafter=NoDrafter(target.vocab_size), **LIMITS).sequences == expected[:1]


def known_of(decoder: FuzzyDecoder, prompts: Any, expected: list[list[int]]) -> dict[tuple[int, ...], list[int]]:
    """What follows each text on the way to the expected answers."""
    found = {}
    for prompt, answer in zip(prompts, expected, strict=True):
        ids = encoded(decoder, prompt)[0]
        for done in range(len(answer) + 1):
            found[(*ids, *answer[:done])] = answer[done : done + 4]
    return found


@pytest.mark.parametrize("family", fast_only(["qwen2_5_vl", "qwen3_5", "llava"], ["qwen2_5_vl", "qwen3_5"]))
def test_a_prefix_with_images_is_read_once(family: str) -> None:
    """And serves no prompt with other images, though the ids are the same."""
    decoder = decoder_of(family)
    first, other = (turn("the cat ", an_image(seed), "what is the answer") for seed in (1, 4))
    answer = decoder.generate(first, **LIMITS).sequences[0]
    said = decoder.tokenizer.decode(answer)
    chat = [*first, {"role": "assistant", "content": said}, {"role": "user", "content": "it is there"}]
    assert decoder.encode(first) == decoder.encode(other)
    expected = [expected_of(decoder, messages) for messages in (first, other, chat)]
    assert expected[0] != expected[1], "the images change nothing"
    decoder.target.prefixes = PrefixCache(1 << 24)
    try:
        made = [decoder.generate(messages, **LIMITS) for messages in (first, other, first, chat)]
    finally:
        decoder.target.prefixes = None
    assert [each.sequences[0] for each in made] == [expected[0], expected[1], expected[0], expected[2]]
    known, before = [each.stats.cached_tokens[0] for each in made], decoder.encode(first).index(IMAGE)
    assert known[0] == 0 and known[1] <= before
    if not decoder.target.is_recurrent:  # which keeps no start of a text
        assert known[2] == len(decoder.encode(first)) - 1 and known[3] > before


@pytest.mark.parametrize("family", fast_only(["qwen2_5_vl", "gemma3"], ["qwen2_5_vl"]))
def test_beams_equal_generate(family: str) -> None:
    decoder = decoder_of(family)
    options = dict(num_beams=3, max_new_tokens=8)
    expected = [expected_of(decoder, messages, **options) for messages in SHOWN]
    assert decoder.generate(SHOWN, **{**LIMITS, **options}).sequences == expected


class HostPrompt(ImagePrompt):
    """A prompt on the simulated device, where the families' own code would wait. Its model is on a CPU."""

    @cached_property
    def on_host(self) -> ImagePrompt:
        tokens: Any = self.tokens
        return ImagePrompt(self.model, tokens.value, self.image_input)

    @cached_property
    def positions(self) -> Tensor:
        return to_device(self.on_host.positions, SIM)


def read_on_the_host(twin: Target) -> Any:
    """What reads a prompt with images for the simulated device: a CPU."""

    def read(target: Target, cache: SlotCache, prompt: HostPrompt, on_layer: Any) -> tuple[Tensor, Tensor]:
        count = prompt.tokens.shape[1]
        own, written = twin.new_cache(1, count), list[Any]()
        own.read, own.offsets, update = torch.tensor([count]), torch.zeros(1, dtype=torch.long), own.update
        own.update = lambda *given, **options: (written.append(given[:3]), update(*given, **options))[1]  # type: ignore
        twin.captured_layers = target.captured_layers
        made = read_with_images(twin, own, prompt.on_host)
        cache.set_write_slots(torch.arange(count, device=SIM)[None], 0, count)
        for keys, values, layer in written:
            cache.update(to_device(keys, SIM), to_device(values, SIM), layer)
        assert cache.offsets is not None and int(own.offsets) < 0, "the images move no later position"
        cache.offsets.copy_(to_device(own.offsets, SIM))
        return to_device(made[0], SIM), to_device(made[1], SIM)

    return read


@pytest.mark.parametrize("family", fast_only(["qwen2_5_vl", "qwen3_vl"], ["qwen2_5_vl"]))
@pytest.mark.parametrize("kind", ["fused", "lookup"])
def test_recorded_rounds_after_images_answer_as_generate(
    family: str, kind: str, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With M-RoPE, whose offsets differ by row. A second request, in another order, takes the first one's tensors."""
    decoder, twin = decoder_of(family), Target(seeing_model(family))
    monkeypatch.setattr("fsd_infer.request.prompts.read_with_images", read_on_the_host(twin))
    monkeypatch.setattr("fsd_infer.request.prompts.ImagePrompt", lambda model, *rest: HostPrompt(twin.model, *rest))
    asked = [[encoded(decoder, messages) for messages in shown] for shown in (SHOWN, SHOWN[::-1])]
    expected = [expected_of(decoder, messages) for messages in SHOWN]
    target = Target(seeing_model(family).to(SIM), decoder.tokenizer)
    drafter, recorder = drafter_of(kind, target, TreeShape(2, 3, 7)), SimRecorder(device)
    for model in (target, drafter):
        model.use_graphs(recorder)
    for pairs, answers in zip(asked, (expected, expected[::-1]), strict=True):
        prompts, image_inputs = zip(*pairs, strict=True)
        request = Request(list(prompts), LIMITS["max_new_tokens"], True, image_inputs=image_inputs)
        assert decode(target, drafter, parse_rule("exact"), request).sequences == answers
        assert target.recorded.refused is None
    assert recorder.replayed > 0


AUDIO = ["qwen2_audio", "voxtral", "granite_speech"]
ENCODERS = ["florence2", "udop", "t5", "bart", "whisper"]


@pytest.mark.parametrize("family", [*AUDIO, *ENCODERS, "mllama", "idefics"])
def test_other_kinds_are_refused_by_name(family: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    with pytest.raises(ModelLoadError, match=re.escape(family)):
        auto_class(CONFIG_MAPPING[family]())


def png(seed: int = 1) -> bytes:
    file = io.BytesIO()
    an_image(seed).save(file, "png")
    return file.getvalue()


def data_url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_images_on_the_command_line(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the directory's own processor, of which Qwen's reads videos too, with a package that may be missing."""
    save_seeing(tmp_path, family, with_processor=True)
    (tmp_path / "one.png").write_bytes(png())
    words = ["generate", "--target", str(tmp_path), "--drafter", "lookup", "--dtype", "fp32", "--device", "cpu"]
    words += ["--max-new-tokens", "12", "--quiet", "--json", "--prompt", "what is it"]
    assert main([*words, "--image", str(tmp_path / "one.png")]) == 0
    found = json.loads(capsys.readouterr().out)["tokens"]
    assert found == expected_of(decoder_of(family), turn(an_image(1), "what is it"))
    assert main([*words, "--image", str(tmp_path / "two.png")]) == 2
    assert "there is no image" in capsys.readouterr().err


def test_images_behind_the_server(tmp_path: Path) -> None:
    decoder, folder = decoder_of("qwen2_5_vl"), tmp_path / "images"
    folder.mkdir()
    for file in (folder / "one.png", tmp_path / "secret.png"):
        file.write_bytes(png())
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "text.png").write_text("no image")
    expected = decoder.generate(turn(an_image(1), "what is it"), **LIMITS).text
    client = TestClient(make_app(decoder, limits=Limits(image_folders=(folder,))))

    def answer(*parts: Any, role: str = "user") -> Any:
        body = {"messages": [{"role": role, "content": list(parts)}], "max_tokens": 12, "temperature": 0}
        return client.post("/v1/chat/completions", json=body)

    def shown(url: str, role: str = "user") -> Any:
        return answer(
            {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it"}, role=role
        )

    with client:
        for url in (data_url(png()), f"file://{folder}/one.png", f"{folder}/one.png"):
            found = shown(url)
            assert found.status_code == 200, found.text
            assert found.json()["choices"][0]["message"]["content"] == expected
        for url, why in {
            "https://example.com/one.png": "remote URL", "ftp://example.com/one.png": "remote URL",
            f"file://{tmp_path}/secret.png": "directories that this server may read",
            f"file://{folder}/../secret.png": "directories that this server may read",
            f"file://{folder}/link.png": "directories that this server may read",
            f"file://{folder}/text.png": "holds no image", f"file://{folder}": "there is no image",
            data_url(b"no image"): "holds no image", "data:image/png;base64,!": "base64", "data:,x": "base64",
            data_url(png()[:60]): "holds no image",
        }.items():  # fmt: skip
            found = shown(url)
            assert found.status_code == 400 and why in found.json()["error"]["message"], (url, found.text)
        assert "role user" in shown(data_url(png()), role="assistant").json()["error"]["message"]
        audio = answer({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}})
        assert audio.status_code == 400 and "input_audio" in audio.json()["error"]["message"]


def test_what_does_not_fit_is_refused_by_name(toy_decoder: FuzzyDecoder) -> None:
    decoder, image = decoder_of("qwen2_5_vl"), an_image(1)
    refused: dict[str, Any] = {
        "one image for each": lambda: decoder.generate([{"role": "user", "content": [{"type": "image"}]}], **LIMITS),
        "images more than": lambda: decoder.generate(
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "images": [image, image]}, **LIMITS
        ),
        "not 'image'. Did you mean 'images'?": lambda: decoder.generate({"prompt": "a", "image": image}, **LIMITS),
        "each prompt's images": lambda: decoder.generate(["a", "b"], images=[image], **LIMITS),
        "token ids": lambda: decoder.generate({"prompt": [1, 2, 3], "images": [image]}, **LIMITS),
        "of the type 'video'": lambda: decoder.generate(
            turn(image) + [{"role": "user", "content": [{"type": "video"}]}]
        ),
        "takes no images": lambda: toy_decoder.generate({"prompt": "the cat", "images": [image]}, **LIMITS),
        "PIL image, got int": lambda: decoder.generate({"prompt": "the cat", "images": [3]}, **LIMITS),
        "user turn": lambda: decoder.generate(
            {"prompt": [{"role": "system", "content": "x"}], "images": [image]}, **LIMITS
        ),
    }
    for why, ask in refused.items():
        with pytest.raises(FsdError, match=re.escape(why)):
            ask()
    with pytest.raises(FsdError, match="no processor"):
        FuzzyDecoder(Target(decoder.target.model, decoder.tokenizer), decoder.drafter).generate(
            {"prompt": "a", "images": image}
        )


def test_names_of_marks_in_messages_are_text() -> None:
    """A user who writes the mark of an image shows none."""
    decoder = decoder_of("smolvlm")  # whose processor looks up characters
    plain, marked = turn(an_image(1), "what is it"), turn(an_image(1), "what <image> is <|end|> it")
    counts = [encode_with_images(decoder.target, messages)[0].count(IMAGE) for messages in (plain, marked)]
    assert counts == [4, 4]
    ids = encode_with_images(decoder.target, marked)[0]
    assert "what <image> is <|end|> it" in decoder.tokenizer.decode(ids)
    shown = {"prompt": "what is it", "images": an_image(1)}
    assert decoder.generate(shown, **LIMITS).sequences[0] == expected_of(decoder, plain)


@pytest.mark.usefixtures("unsaid")
def test_a_prompt_carries_its_images() -> None:
    """Text, messages and ids, beside prompts without images; `images=`, the former argument, gives the same."""
    decoder, image = decoder_of("qwen2_5_vl"), an_image(1)
    asked, blind = turn(image, "what is it"), expected_of(decoder, turn("what is it"))
    expected, (ids, image_input) = expected_of(decoder, asked), encode_with_images(decoder.target, asked)
    assert expected != blind, "the image changes nothing: the comparison would be hollow"
    parts = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it"}]}]
    given: list[Any] = [
        {"prompt": "what is it", "images": [image]}, "what is it", {"prompt": parts, "images": image}, asked,
        {"prompt": ids, "images": image_input}, {"prompt": "what is it", "images": None}, {"prompt": "what is it"},
    ]  # fmt: skip
    found = decoder.generate(given, **LIMITS).sequences
    assert found == [expected, blind, expected, expected, expected, blind, blind]
    assert decoder.encode(given[0]) == ids
    with pytest.warns(FutureWarning, match="carries its images"):
        assert decoder.generate("what is it", images=image, **LIMITS).sequences == [expected]
    assert decoder.generate(["what is it"] * 2, images=[[image], None], **LIMITS).sequences == [expected, blind]
    assert decoder.encode("what is it", images=[image]) == ids
    inputs = {**image_input.inputs, "input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}
    assert decoder.generate(inputs, images=[], **LIMITS).sequences == [expected], "a processor's images stay"


def test_images_stand_in_the_last_turn_alone_though_an_earlier_one_is_the_same() -> None:
    asked = {"role": "user", "content": "what is it"}
    turns, images = split_images([asked, {"role": "assistant", "content": "a cat"}, asked], [an_image(1)], Sources())
    assert turns[0] == asked and [part["type"] for part in turns[2]["content"]] == ["image", "text"]
    assert len(images) == 1
