"""Token ids as the texts and bytes that they add to an answer."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # how tokenizers decode a part of a character
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte in vocabularies of SentencePiece
_WINDOW, _KEPT = 64, 16  # tokens that are decoded together, and how many of them stay when there are more


class Piece(NamedTuple):
    """A token as a part of an answer.

    Attributes:
        token: its id.
        text: the characters that it adds; none for a special token.
        name: its own text, also of a special token; a part of a character is a replacement character.
        raw: the bytes that it adds. Those of several tokens joined are their text in UTF-8.
    """

    token: int
    text: str
    name: str
    raw: bytes


class Pieces:
    """The text of a growing answer.

    A token that ends inside a character adds what precedes that character. The token that completes it adds it. So the
    pieces joined are the decoded text without special tokens. The work per token does not grow with the text.

    Args:
        tokenizer: a transformers tokenizer.

    Attributes:
        text: the whole characters so far.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.text = tokenizer, ""
        self._special = special_names(tokenizer)
        self._bytes = TokenBytes(tokenizer)
        self._window: list[int] = []  # the last tokens
        self._shown = ""  # their characters that the text holds
        self._partial = False  # whether the last character is incomplete

    def add(self, token: int) -> str:
        """Append a token, and return what it adds to the text."""
        self._window.append(token)
        decoded = self._decoded(self._window)
        whole, self._partial = self._whole(decoded, self._window)
        piece = whole[len(self._shown) :]
        if piece:
            self._shown, self.text = whole, self.text + piece
            if len(self._window) > _WINDOW and not self._partial:
                self._forget()
        return piece

    def rest(self) -> str:
        """Return what stands for the bytes of a character that the answer leaves incomplete."""
        return self._decoded(self._window)[len(self._shown) :]

    def of(self, token: int) -> Piece:
        """Return what a token would add."""
        if token in self._special:
            return Piece(token, "", self._special[token], b"")
        following = [*self._window, token]
        whole, partial = self._whole(self._decoded(following), following)
        text = whole[len(self._shown) :]
        if partial or self._partial:
            return Piece(token, text, str(self.tokenizer.decode([token])), self._bytes(token))
        return Piece(token, text, text, text.encode())

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _whole(self, decoded: str, tokens: Sequence[int]) -> tuple[str, bool]:
        """Return the text without its incomplete character, and whether it has one."""
        if not decoded.endswith(UNKNOWN) or not self._is_partial(tokens):
            return decoded, False
        # other decoders write every byte of a run that is no text as a replacement character
        return decoded[:-1] if self._bytes.is_byte_level else decoded.rstrip(UNKNOWN), True

    def _is_partial(self, tokens: Sequence[int]) -> bool:
        """Whether more bytes may complete the last character."""
        end = b""
        for token in reversed(tokens):
            end = (b"" if token in self._special else self._bytes(token)) + end
            if len(end) >= 3:
                break
        starts = [end[-count:] for count in (1, 2, 3) if len(end) >= count and end[-count] >= 0xC0]
        decoder = getincrementaldecoder("utf-8")("replace")
        return bool(starts) and not decoder.decode(starts[0])

    def _forget(self) -> None:
        """Keep the last tokens of the window, if they decode alike without the others."""
        kept = self._window[-_KEPT:]
        decoded = self._decoded(kept)
        if decoded and self._shown.endswith(decoded):
            self._window, self._shown = kept, decoded


def token_pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds. Joined, the pieces are the decoded text without special tokens.

    A token that ends inside a character adds what precedes that character. The token that completes it adds it.
    """
    pieces = Pieces(tokenizer)
    texts = [pieces.add(token) for token in tokens]
    return [*texts[:-1], texts[-1] + pieces.rest()] if texts else []


def special_names(tokenizer: Any) -> dict[int, str]:
    """Return the texts of the tokenizer's special tokens by id: named ones such as eos, and added ones."""
    names = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return names | {index: str(tokenizer.convert_ids_to_tokens(index)) for index in set(tokenizer.all_special_ids)}


class TokenBytes:
    """The bytes of tokens by id, as byte-level vocabularies and those of SentencePiece write them."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self.is_byte_level = decoder is not None and b'"ByteLevel"' in bytes(decoder.__getstate__())

    def __call__(self, token: int) -> bytes:
        name = self.tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):
            return b""  # the vocabulary is padded
        if self.is_byte_level:
            table = _byte_level()
            return bytes(table[char] for char in name) if all(char in table for char in name) else name.encode()
        found = _BYTE.fullmatch(name)
        return bytes([int(found[1], 16)]) if found else name.replace("\u2581", " ").encode()


@cache
def _byte_level() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes: printable ones stand for themselves."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + place): byte for place, byte in enumerate(others)}
