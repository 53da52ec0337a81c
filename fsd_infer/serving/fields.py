"""The fields of requests. Each of OpenAI's is honoured, or refused by its name; docs/serving.md has the table."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    Tag,
    field_validator,
    model_validator,
)

from fsd_core.text.conversations import check_text
from fsd_infer.request.guide import Guide
from fsd_infer.request.options import at_temperature
from fsd_infer.serving.messages import ChatMessage, Many, NamedTool, RequestedTool, RequestFields
from fsd_infer.serving.tools import Tool

GUIDED = "response_format, guided_json, guided_regex and guided_grammar"


MAX_BIASES = 16_384
# Arguments of transformers' apply_chat_template, which would replace the template, its turns or what it returns.
NOT_FOR_TEMPLATES = {
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "padding", "truncation",
    "continue_final_message", "tokenize", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs",
    "return_assistant_tokens_mask",
}  # fmt: skip


class StreamOptions(RequestFields):
    """``stream_options``."""

    include_usage: StrictBool = False
    include_obfuscation: Literal[False] = False


class Schema(RequestFields):
    """``json_schema`` of a ``response_format``. ``strict`` changes nothing: answers always follow the schema."""

    name: str = ""
    description: str = ""
    strict: StrictBool | None = None
    rules: dict[str, Any] = Field({}, alias="schema")


class Format(RequestFields):
    """``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Format:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('response_format: "json_schema" goes with the type "json_schema", and with no other.')
        return self

    @property
    def guide(self) -> Guide | None:
        """What the answer must be; None: any text. Raises FsdError for a schema that the guide does not support."""
        if self.json_schema is not None:
            return Guide.json_schema(self.json_schema.rules)
        return Guide.json_object() if self.type == "json_object" else None


class VllmArguments(RequestFields):
    """``vllm_xargs``: how requests to vLLM name a rule."""

    rule: str | None = None


def _texts(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> Any:
    """Put one prompt, a text or a list of token ids, into a list."""
    several = isinstance(value, list) and bool(value) and isinstance(value[0], (str, list))
    return value if several else [value]


def _bounded(biases: Any) -> Any:
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        raise ValueError(f"logit_bias: at most {MAX_BIASES} tokens, got {len(biases)}.")
    return biases


Bias = Annotated[StrictFloat, Field(ge=-100, le=100)]


class CompletionRequest(RequestFields):
    """The fields that both kinds of completion share. A ``Literal`` field accepts only the value without effect."""

    model: str = ""
    max_tokens: StrictInt | None = Field(None, ge=1)
    min_tokens: StrictInt = Field(0, ge=0, lt=2**31)
    ignore_eos: StrictBool = False
    temperature: StrictFloat = Field(1.0, ge=0, le=2)
    top_p: StrictFloat = Field(1.0, gt=0, le=1)
    top_k: StrictInt = Field(0, ge=-1, lt=2**31)
    min_p: StrictFloat = Field(0.0, ge=0, le=1)
    typical_p: StrictFloat = Field(1.0, gt=0, le=1)
    epsilon_cutoff: StrictFloat = Field(0.0, ge=0, lt=1)
    eta_cutoff: StrictFloat = Field(0.0, ge=0, lt=1)
    repetition_penalty: StrictFloat = Field(1.0, gt=0, le=100)
    no_repeat_ngram_size: StrictInt = Field(0, ge=0, le=2**16)
    seed: StrictInt | None = Field(None, ge=0, lt=2**63)
    n: StrictInt = Field(1, ge=1, le=128)
    stop: Annotated[Many[str], BeforeValidator(_texts)] = Field([], max_length=16)
    stream: StrictBool = False
    stream_options: StreamOptions = StreamOptions()
    logit_bias: Annotated[dict[int, Bias], BeforeValidator(_bounded)] = {}
    presence_penalty: StrictFloat = Field(0.0, ge=-2, le=2)
    frequency_penalty: StrictFloat = Field(0.0, ge=-2, le=2)
    user: str = Field("", max_length=512)
    guided_json: dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    rule: str | None = None
    quality: StrictFloat | None = Field(None, gt=0, le=1)
    vllm_xargs: VllmArguments = VllmArguments()

    @model_validator(mode="before")
    @classmethod
    def _is_json(cls, values: Any) -> Any:
        """Refuse NaN and infinities, which Python's JSON parser accepts."""
        queue = [values]
        while queue:
            value = queue.pop()
            queue += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"the body is not JSON: it holds {value}, or a number that is too large.")
        return values

    @model_validator(mode="after")
    def _quality_is_instead_of_a_rule(self) -> CompletionRequest:
        if self.quality is not None and (self.rule or self.vllm_xargs.rule):
            raise ValueError("quality chooses the rule: leave out quality, or the rule.")
        return self

    @model_validator(mode="after")
    def _options_of_streams_have_one(self) -> CompletionRequest:
        if not self.stream and self.stream_options.include_usage:
            raise ValueError("stream_options needs stream = true: a whole answer always has its usage.")
        return self

    @model_validator(mode="after")
    def _least_tokens_fit(self) -> CompletionRequest:
        if self.most_tokens and self.min_tokens > self.most_tokens:
            raise ValueError(f"min_tokens: at most max_tokens, {self.most_tokens}, got {self.min_tokens}.")
        return self

    @property
    def named_rule(self) -> str | None:
        """The rule that the request names, ``quality:Q`` for a quality; None: the server's."""
        if self.quality is not None:
            return f"quality:{self.quality}"
        return self.rule or self.vllm_xargs.rule

    @field_validator("stop")
    @classmethod
    def _stops_are_text(cls, stops: list[str]) -> list[str]:
        return [check_text(stop, "stop") for stop in stops]

    @property
    def most_tokens(self) -> int | None:
        """Largest length of an answer in tokens; None: the server's limit."""
        return self.max_tokens

    @property
    def sampling(self) -> dict[str, Any]:
        """Arguments of ``generate`` that shape the distribution, without those that change nothing."""
        always = ("repetition_penalty", "no_repeat_ngram_size")
        drawn = ("top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff") if self.temperature else ()
        options = self.model_dump(include={*always, *drawn}, exclude_defaults=True)
        if options.get("top_k") == -1:  # vLLM's value for none
            del options["top_k"]
        options |= {"min_new_tokens": self.min_tokens} if self.min_tokens else {}
        options |= {"eos_token_id": None} if self.ignore_eos else {}
        return {**at_temperature(self.temperature), **options}

    @property
    def guides(self) -> list[Guide]:
        """What answers must be. Raises FsdError for a grammar that the guide does not support."""
        guides = [] if self.guided_json is None else [Guide.json_schema(self.guided_json)]
        guides += [] if self.guided_regex is None else [Guide.regex(self.guided_regex)]
        return guides + ([] if self.guided_grammar is None else [Guide.lark(self.guided_grammar)])


class TextCompletionRequest(CompletionRequest):
    """POST /v1/completions."""

    prompt: Annotated[
        Many[
            Annotated[
                Annotated[str, Tag("text")] | Annotated[Many[StrictInt], Tag("ids")],
                Discriminator(lambda value: "ids" if isinstance(value, list) else "text"),
            ]
        ],
        BeforeValidator(_prompts),
    ]
    logprobs: StrictInt | None = Field(None, ge=0, le=20)
    best_of: Literal[1] = 1
    echo: Literal[False] = False
    suffix: Literal[""] = ""

    @property
    def logprobs_asked(self) -> int | None:
        """How many alternatives each token's log-probability comes with; None: no log-probabilities."""
        return self.logprobs


class ChatCompletionRequest(CompletionRequest):
    """POST /v1/chat/completions."""

    messages: Many[ChatMessage] = Field(min_length=1, max_length=2**13)
    max_completion_tokens: StrictInt | None = Field(None, ge=1)
    logprobs: StrictBool = False
    top_logprobs: StrictInt = Field(0, ge=0, le=20)
    response_format: Format = Format(type="text")
    modalities: Many[Literal["text"]] = ["text"]
    service_tier: Literal["auto", "default"] = "auto"
    store: Literal[False] = False
    tools: Many[RequestedTool] = Field([], max_length=128)
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("mode")] | Annotated[NamedTool, Tag("named")],
            Discriminator(lambda value: "named" if isinstance(value, (dict, NamedTool)) else "mode"),
        ]
        | None
    ) = None
    parallel_tool_calls: StrictBool = True
    chat_template_kwargs: dict[str, Any] = {}

    @field_validator("chat_template_kwargs")
    @classmethod
    def _leaves_the_template_alone(cls, variables: dict[str, Any]) -> dict[str, Any]:
        for name in variables:
            if name in NOT_FOR_TEMPLATES:
                raise ValueError(f"chat_template_kwargs: {name!r:.60} is not the template's to read. Leave it out.")
        return variables

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def guides(self) -> list[Guide]:
        format = self.response_format.guide
        return [*super().guides, *([] if format is None else [format])]

    @property
    def logprobs_asked(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def offered(self) -> list[Tool]:
        """The tools that the answer may call."""
        if self.tool_choice == "none":
            return []
        return [Tool(tool.function.name, tool.function.parameters) for tool in self.tools]

    @property
    def forced(self) -> list[Tool]:
        """The tools of which the answer must call one; none if it need not call any."""
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in self.offered if tool.name == self.tool_choice.function.name]
        return self.offered if self.tool_choice == "required" else []

    @field_validator("messages")
    @classmethod
    def _results_follow_calls(cls, messages: list[ChatMessage]) -> list[ChatMessage]:
        calls: list[dict[str, Any]] = []  # those that messages of the role tool may answer
        before = ""
        for index, message in enumerate(messages):
            ids = [str(call.get("id") or "") for call in calls]
            if message.role != "tool":  # clients may write one message per call
                calls = [*(calls if before == message.role == "assistant" else ()), *message.tool_calls]
            elif not calls:
                raise ValueError(
                    f"messages[{index}]: a message of the role tool answers a call: put the assistant's message with "
                    "its tool_calls before it."
                )
            elif all(ids) and message.tool_call_id is not None and message.tool_call_id not in ids:
                raise ValueError(
                    f"messages[{index}].tool_call_id: no call before it has the id {message.tool_call_id!r:.80}. "
                    f"Their ids are {', '.join(sorted(ids)):.80}."
                )
            before = message.role
        return messages

    @model_validator(mode="after")
    def _fields_fit_together(self) -> ChatCompletionRequest:
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens name one limit: give one of them.")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true.")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("tool_choice needs tools.")
        if isinstance(self.tool_choice, NamedTool) and not self.forced:
            raise ValueError(f"tool_choice: tools has no function {self.tool_choice.function.name!r:.80}.")
        if self.offered and not self.forced and any(tool.function.strict for tool in self.tools):
            raise ValueError('tools: strict needs a tool_choice of "required" or of one function. Leave it out.')
        if not self.parallel_tool_calls and self.offered and not self.forced:
            raise ValueError(
                'parallel_tool_calls: false needs a tool_choice of "required" or of one function, whose answer is one '
                "call. Leave it out."
            )
        return self


class ViewRequest(RequestFields):
    """POST /view/decode, which the page sends."""

    prompt: str
    rule: str = "exact"
    temperature: StrictFloat = Field(0.0, ge=0, le=2)
    max_tokens: StrictInt = Field(96, ge=1)
