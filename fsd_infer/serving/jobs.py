"""From a checked request to the jobs that decode its answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsd_core.errors import FsdError
from fsd_core.text.encoding import encode_chat
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.decoder.calibrated import resolved
from fsd_infer.decoder.prompts import encode_with_images
from fsd_infer.request.guide import COMPACT, Guide
from fsd_infer.request.images import Sources
from fsd_infer.rules import parse_rule
from fsd_infer.rules.texts import markers_of
from fsd_infer.serving.batcher import AnswerJob, Penalties
from fsd_infer.serving.fields import GUIDED, ChatCompletionRequest, TextCompletionRequest
from fsd_infer.serving.tools import CallReader, Tool, ToolFormat, tool_format
from fsd_infer.targets.image_inputs import ImageInput

AnyCompletionRequest = ChatCompletionRequest | TextCompletionRequest
MAX_WITH_IMAGES = 1 << 25  # bytes of a request to a target that takes images


@dataclass(frozen=True)
class Limits:
    """Bounds of requests.

    Attributes:
        max_batch: most answers that the server decodes together.
        max_queue: most answers that wait.
        max_new_tokens: largest length of an answer in tokens.
        max_bytes: largest body of a request.
        image_folders: directories whose files requests may name as images.
        seconds: time from a request's arrival until the server cuts its answer off.
    """

    max_batch: int = 8
    max_queue: int = 64
    max_new_tokens: int = 4096
    max_bytes: int = 1 << 20
    image_folders: tuple[Path, ...] = ()
    seconds: float = 600.0


def make_jobs(
    decoder: FuzzyDecoder, request: AnyCompletionRequest, rule: str, limits: Limits, in_template: bool | None = False
) -> list[AnswerJob]:
    """Make a job per answer, not queued yet: ``n`` of the first prompt, then those of the next.

    Args:
        decoder: target and drafter.
        request: as its fields were checked.
        rule: the rule of requests that name none.
        limits: bounds of requests.
        in_template: whether a prompt of text goes into the chat template; None: if the tokenizer has one.

    Raises:
        FsdError: a request that cannot be decoded.
    """
    answers = request.n * (len(request.prompt) if isinstance(request, TextCompletionRequest) else 1)
    if answers > limits.max_queue:
        raise FsdError(f"this server makes at most {limits.max_queue} answers at once, and this asks for {answers}.")
    prompts = _encode(decoder, request, in_template, limits)
    room = decoder.target.max_positions
    most = request.most_tokens or limits.max_new_tokens
    for ids, _ in prompts:
        if room is not None and len(ids) >= room:
            raise FsdError(
                f"the prompt has {len(ids)} tokens, but the model has a context of {room}. Shorten the prompt."
            )
    sampling = request.sampling
    named = parse_rule(resolved(request.named_rule or rule, decoder.drafter, decoder.target, request.temperature))  # type: ignore[arg-type]
    markers_of([named], decoder.tokenizer)  # its error would fail the whole batch later
    size = decoder.target.vocab_size
    for token in request.logit_bias:
        if not 0 <= token < size:
            raise FsdError(f"logit_bias: there is no token {token}: ids are from 0 to {size - 1}.")
    if request.logit_bias:
        sampling["sequence_bias"] = {(token,): bias for token, bias in request.logit_bias.items()}
    guide = _guide(decoder, request)
    if guide is not None:
        decoder.check_guide(guide)
    return [
        AnswerJob(
            prompt=ids,
            image_input=image_input,
            rule=named,
            sampling={**sampling, "seed": None if request.seed is None else (request.seed + index) % 2**63},
            max_new_tokens=min(most, limits.max_new_tokens, (room or most + len(ids)) - len(ids)),
            stop=[text for text in request.stop if text],
            deadline=time.monotonic() + limits.seconds,
            on_update=lambda text, done: None,
            penalties=Penalties(request.presence_penalty, request.frequency_penalty),
            guide=guide,
            user=request.user,
            quality=request.quality,
            alternatives=request.logprobs_asked,
        )
        for ids, image_input in prompts
        for index in range(request.n)
    ]


def reader_of(decoder: FuzzyDecoder, request: AnyCompletionRequest) -> Callable[[], CallReader] | None:
    """Return a factory of readers of tool calls, one per answer; None if answers may call none. Raises FsdError."""
    if not isinstance(request, ChatCompletionRequest) or not request.offered:
        return None
    format, names = _format(decoder, request), {tool.name for tool in request.offered}
    return lambda: CallReader(format, names, is_forced=bool(request.forced))


def _format(decoder: FuzzyDecoder, request: ChatCompletionRequest) -> ToolFormat:
    format = tool_format(decoder.tokenizer, _for_template(request))
    if format is None:
        raise FsdError(
            f"tools: the chat template of {decoder.target.name} has no format of tool calls that this server knows "
            "(Hermes and Qwen, Llama 3, Mistral). Leave tools out."
        )
    return format


def _for_template(request: ChatCompletionRequest) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_unset=True) for tool in request.tools] if request.offered else []


def _encode(
    decoder: FuzzyDecoder, request: AnyCompletionRequest, in_template: bool | None, limits: Limits
) -> list[tuple[list[int], ImageInput | None]]:
    """Token ids of each of the request's prompts, and its images."""
    if isinstance(request, TextCompletionRequest):
        return [(decoder.encode(prompt, apply_chat_template=in_template), None) for prompt in request.prompt]
    if request.offered:
        _format(decoder, request)  # an unknown format is the request's fault, not the template's
    options = {**request.chat_template_kwargs, **({"tools": _for_template(request)} if request.offered else {})}
    turns = [turn.message() for turn in request.messages]
    if any(turn.images for turn in request.messages):
        encoded = encode_with_images(decoder.target, turns, sources=Sources(limits.image_folders), options=options)
    else:
        encoded = encode_chat(decoder.tokenizer, turns, options=options, blank=True), None
    _check_variables(decoder, request)  # the processor of images may bring the template
    return [encoded]


def _check_variables(decoder: FuzzyDecoder, request: ChatCompletionRequest) -> None:
    """Raise FsdError for a variable that the chat template does not mention, unless it is null or false."""
    template = str(decoder.tokenizer.chat_template or "")  # all of several
    for name, value in request.chat_template_kwargs.items():
        if name not in template and value not in (None, False):  # front ends send {"enable_thinking": false} to all
            raise FsdError(
                f"chat_template_kwargs: the chat template of {decoder.target.name} does not read {name!r:.80}. "
                "Leave it out."
            )


def _guide(decoder: FuzzyDecoder, request: AnyCompletionRequest) -> Guide | None:
    """What the answer must be; None: any text."""
    guides = request.guides
    if len(guides) > 1:
        raise FsdError(f"an answer follows one of {GUIDED}: name one.")
    if guides and (request.min_tokens or request.ignore_eos):
        raise FsdError(f"min_tokens, ignore_eos: what follows one of {GUIDED} ends where that does. Leave them out.")
    if isinstance(request, ChatCompletionRequest) and request.offered:
        if guides:
            raise FsdError(f"tools: an answer that calls tools cannot also follow one of {GUIDED}. Leave one out.")
        if request.forced:
            format = _format(decoder, request)
            try:
                return Guide.lark(call_grammar(format, request.forced))
            except FsdError as error:
                raise FsdError(f"tools: {error}") from error
    return guides[0] if guides else None


def call_grammar(format: ToolFormat, tools: Sequence[Tool]) -> str:
    """Return a grammar in Lark's notation: exactly one call of one of these tools."""
    before, after = (f"{format.opening}\n", f"\n{format.closing}") if format.closing else ("", "")
    before, after = before + "[" * format.is_list, "]" * format.is_list + after
    rules = ["start: " + " | ".join(f"call{number}" for number in range(len(tools)))]
    for number, tool in enumerate(tools):
        head = f'{before}{{"name": {json.dumps(tool.name)}, "{format.arguments}": '
        rules += [
            f"call{number}: {json.dumps(head)} arguments{number} {json.dumps('}' + after)}",
            f"arguments{number}: %json {json.dumps({'x-guidance': COMPACT, **tool.parameters})}",
        ]
    return "\n".join(rules)
