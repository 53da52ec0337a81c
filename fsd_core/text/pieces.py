"""Token ids as the texts and bytes that they add to an answer."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence
from functools import cache
from itertools import groupby
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
    pieces joined are the decoded text without special tokens. Bytes that are no text add replacement characters, as in
    any UTF-8 decoder, whatever bytes follow. The work per token does not grow with the text.

    Args:
        tokenizer: a transformers tokenizer.

    Attributes:
        text: the whole characters so far.
        is_partial: whether the last token ends inside a character.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.text = tokenizer, ""
        self._special = special_names(tokenizer)
        self._bytes = TokenBytes(tokenizer)
        self._window: list[int] = []  # the last tokens
        self._shown = ""  # their characters that the text holds
        self.is_partial = False

    def add(self, token: int) -> str:
        """Append a token, and return what it adds to the text."""
        self._window.append(token)
        decoded = self._decoded(self._window)
        complete, self.is_partial = self._without_partial(decoded, self._window)
        piece = complete[len(self._shown) :]
        if piece:
            self._shown, self.text = complete, self.text + piece
            if len(self._window) > _WINDOW and not self.is_partial:
                self._forget()
        return piece

    def rest(self) -> str:
        """Return what stands for the bytes of a character that the answer leaves incomplete."""
        return self._decoded(self._window)[len(self._shown) :]

    def of(self, token: int) -> Piece:
        """Return what a token would add."""
        if token in self._special:
            return Piece(token, "", self._special[token], b"")
        window = [*self._window, token]
        complete, partial = self._without_partial(self._decoded(window), window)
        text = complete[len(self._shown) :]
        if partial or self.is_partial or UNKNOWN in text:
            return Piece(token, text, str(self.tokenizer.decode([token])), self._bytes(token))
        return Piece(token, text, text, text.encode())

    def _decoded(self, tokens: Sequence[int]) -> str:
        ordinary = [token for token in tokens if token not in self._special]
        return str(self.tokenizer.decode(self._bytes.mended(ordinary)))

    def _without_partial(self, decoded: str, tokens: Sequence[int]) -> tuple[str, bool]:
        """Return the text without its incomplete character, and whether it has one."""
        if not decoded.endswith(UNKNOWN) or not self._is_partial(tokens):
            return decoded, False
        return decoded[:-1], True

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
        window = self._window[-_KEPT:]
        decoded = self._decoded(window)
        if decoded and self._shown.endswith(decoded):
            self._window, self._shown = window, decoded


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
        parts = b"" if decoder is None else bytes(decoder.__getstate__())
        self.is_byte_level = b'"ByteLevel"' in parts
        bytes_of = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
        # ids by byte, where the decoder joins bytes to characters
        self._of_byte = bytes_of if b'"ByteFallback"' in parts and len(set(bytes_of)) == 256 else []
        self._byte_of = {token: byte for byte, token in enumerate(self._of_byte)}

    def __call__(self, token: int) -> bytes:
        name = self.tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):
            return b""  # the vocabulary is padded
        if self.is_byte_level:
            table = _byte_level()
            return bytes(table[char] for char in name) if all(char in table for char in name) else name.encode()
        match = _BYTE.fullmatch(name)
        return bytes([int(match[1], 16)]) if match else name.replace("\u2581", " ").encode()

    def mended(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens with replacement characters, as bytes, for what is no text among SentencePiece's bytes.

        Its decoder would replace every byte of such a run, those of whole characters too, and also earlier ones.
        """
        mended = list[int]()
        for is_byte, run in groupby(tokens, self._byte_of.__contains__):
            pieces = list(run)
            if is_byte:
                text = bytes(self._byte_of[token] for token in pieces).decode("utf-8", "replace")
                pieces = [self._of_byte[byte] for byte in text.encode()] if UNKNOWN in text else pieces
            mended += pieces
        return mended


@cache
def _byte_level() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
