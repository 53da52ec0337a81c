"""The messages of a chat request and the tools that it offers, with the base of all request fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Field, StrictBool, Tag, model_validator

_Item = TypeVar("_Item")


class _One(FailFast):
    """A list that fails at its first wrong item: listing all of them would block the event loop."""

    __hash__ = object.__hash__  # unions of types need it


Many = Annotated[list[_Item], _One()]


class RequestFields(BaseModel):
    """A JSON object whose fields are all declared. A field that is null counts as left out."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_null(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        present = {name: value for name, value in values.items() if value is not None}
        known = {*cls.model_fields, *(field.alias for field in cls.model_fields.values())}
        unknown = [name for name in present if name not in known]
        return {name: value for name, value in present.items() if name in known or name == unknown[0]}  # one error


class Function(RequestFields):
    """``function`` of a tool."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str = ""
    parameters: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    strict: StrictBool = False


class RequestedTool(RequestFields):
    """One of ``tools``."""

    type: Literal["function"]
    function: Function


class Named(RequestFields):
    """The name in a ``tool_choice`` that names a function."""

    name: str


class NamedTool(RequestFields):
    """A ``tool_choice`` that names a function."""

    type: Literal["function"]
    function: Named


class TextPart(RequestFields):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ImageUrl(RequestFields):
    """``image_url`` of a part: a data: URL, or the file: URL of a directory that the server may read."""

    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class ImagePart(RequestFields):
    """A part of a user's content that is an image."""

    type: Literal["image_url"]
    image_url: ImageUrl


def _kind_of_part(part: Any) -> str | None:
    """The tag of a part, which no field has as its name: places of errors hold both."""
    part_type = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return {"text": "part of text", "image_url": "part with an image"}.get(str(part_type))


Part = Annotated[
    Annotated[TextPart, Tag("part of text")] | Annotated[ImagePart, Tag("part with an image")],
    Discriminator(
        _kind_of_part,
        custom_error_type="unknown_part",
        custom_error_message="Input should be a part of the type 'text' or 'image_url'",
    ),
]
Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[Many[Part], Tag("parts")],
    Discriminator(lambda value: "parts" if isinstance(value, list) else "text"),  # so that errors are of one of them
]


class ChatMessage(RequestFields):
    """One of ``messages``. ``refusal`` and ``annotations`` are fields of OpenAI's answers."""

    role: str
    content: Content | None = None
    tool_calls: Many[dict[str, Any]] = []
    tool_call_id: str | None = None
    name: str | None = None
    refusal: Literal[""] = ""
    annotations: Many[Any] = Field([], max_length=0)

    @model_validator(mode="after")
    def _fields_belong_to_roles(self) -> ChatMessage:
        if self.role != "tool" and (self.name is not None or self.tool_call_id is not None):
            raise ValueError("messages: name and tool_call_id belong to messages of the role tool. Leave them out.")
        if self.role != "assistant" and self.tool_calls:
            raise ValueError("messages: tool_calls belong to messages of the role assistant. Leave them out.")
        if self.role != "user" and self.images:
            raise ValueError("messages: images belong to messages of the role user. Leave them out.")
        return self

    @property
    def images(self) -> list[ImagePart]:
        parts = self.content if isinstance(self.content, list) else []
        return [part for part in parts if isinstance(part, ImagePart)]

    def message(self) -> dict[str, Any]:
        """The turn as chat templates read it; with images its content is a list of parts."""
        content: Any = self.content
        if self.images:
            text: Any = [part.model_dump() for part in content]
        else:
            text = content if content is None or isinstance(content, str) else "".join(part.text for part in content)
        more = self.model_dump(include={"tool_calls", "tool_call_id", "name"}, exclude_defaults=True)
        return {"role": self.role, "content": text, **more}
