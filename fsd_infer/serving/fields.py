"""What requests may say: OpenAI's fields, each honoured or refused by its name. docs/serving.md has the table."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from fsd_infer.request.guide import Guide

UNSUPPORTED = "extra_forbidden"  # pydantic's name for a field that is not declared here


class StreamOptions(BaseModel):
    """``stream_options``."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Schema(BaseModel):
    """``json_schema`` of a ``response_format``. ``strict`` changes nothing: schemas are always followed."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    name: str = ""
    description: str = ""
    strict: bool | None = None
    rules: dict[str, Any] = Field({}, alias="schema")


class Format(BaseModel):
    """``response_format``."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Format:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('response_format: "json_schema" goes with the type "json_schema", and with no other.')
        return self

    @property
    def guide(self) -> Guide | None:
        """Raises FsdError for a schema that cannot be followed."""
        if self.json_schema is not None:
            return Guide.json_schema(self.json_schema.rules)
        return Guide.json_object() if self.type == "json_object" else None


class VllmArguments(BaseModel):
    """``vllm_xargs``, as requests to vLLM name a rule."""

    model_config = ConfigDict(extra="forbid")

    rule: str | None = None


def _texts(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Bias = Annotated[float, Field(ge=-100, le=100)]


class Asked(BaseModel):
    """What both kinds of completion share. ``Literal`` fields are accepted where they change nothing."""

    model_config = ConfigDict(extra="forbid")

    model: str = ""
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    n: int = Field(1, ge=1, le=128)
    stop: Annotated[list[str], BeforeValidator(_texts)] = Field([], max_length=16)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    logit_bias: dict[int, Bias] = {}
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    user: str = Field("", max_length=512)
    guided_json: dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    rule: str | None = None
    vllm_xargs: VllmArguments = VllmArguments()

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, values: Any) -> Any:
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values

    @property
    def most_tokens(self) -> int | None:
        """Of the answer, if the request says so."""
        return self.max_tokens

    @property
    def guides(self) -> list[Guide]:
        """What answers must be. Raises FsdError for what cannot be followed."""
        found = [] if self.guided_json is None else [Guide.json_schema(self.guided_json)]
        found += [] if self.guided_regex is None else [Guide.regex(self.guided_regex)]
        return found + ([] if self.guided_grammar is None else [Guide.lark(self.guided_grammar)])

    @property
    def logprobs_asked(self) -> int | None:
        """How many alternatives each token's log-probability comes with; None: no log-probabilities."""
        return None


class CompletionAsked(Asked):
    """POST /v1/completions."""

    prompt: str | list[int]
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: Literal[1] = 1
    echo: Literal[False] = False
    suffix: Literal[""] = ""

    @property
    def logprobs_asked(self) -> int | None:
        return self.logprobs


class ChatAsked(Asked):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    response_format: Format = Format(type="text")
    modalities: list[Literal["text"]] = ["text"]
    service_tier: Literal["auto", "default"] = "auto"
    store: Literal[False] = False
    tool_choice: Literal["none"] = "none"

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

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatAsked:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true.")
        return self


class ViewAsked(BaseModel):
    """POST /view/decode, of the page."""

    model_config = ConfigDict(extra="forbid")

    prompt: str
    rule: str = "exact"
    temperature: float = Field(0.0, ge=0, le=2)
    max_tokens: int = Field(96, ge=1)
