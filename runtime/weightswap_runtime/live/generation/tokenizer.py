"""Tokenizers of the library `tokenizers`, loaded from `tokenizer.json`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weightswap_runtime.errors import MissingExtra, Unsupported

TOKENIZER = "tokenizer.json"
_LONG = 4096  # characters, from which on other threads must run meanwhile


class Tokenizer:
    """A conversion of text to tokens and back."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """path: a tokenizer.json, or the folder that has one. Raises MissingExtra, and Unsupported for other files."""
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError as error:
            raise MissingExtra("text prompts", "text") from error
        self._file = Path(path, TOKENIZER) if Path(path).is_dir() else Path(path)
        with self._errors(f"is not a readable {TOKENIZER}"):
            self._loaded: Any = Loaded.from_file(str(self._file))
            self._loaded.no_padding()  # as transformers does: training may have left these settings in the file
            self._loaded.no_truncation()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with the special tokens that the model expects around it. Raises Unsupported."""
        with self._errors(f"gives no tokens for {text!a:.80}"):
            is_long = len(text) > _LONG
            encoded = self._loaded.encode_batch_fast([text])[0] if is_long else self._loaded.encode(text)
            tokens: list[int] = encoded.ids
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones. Raises Unsupported."""
        with self._errors("gives no text"):
            text: str = self._loaded.decode(list(tokens))
        return text

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Convert errors within the block to Unsupported."""
        try:
            yield
        except BaseException as error:  # panics of the library are not Exceptions
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise Unsupported(f"{self._file}: {what} ({error})") from error

    def pieces(self, tokens: Iterator[int]) -> Iterator[str]:
        """Yield the text as it grows; a character that takes several tokens comes with the last of them."""
        seen: list[int] = []
        yielded = ""
        for token in tokens:
            seen.append(token)
            text = self.decode(seen)
            if not text.endswith("\ufffd"):
                yield text[len(yielded) :]
                yielded = text
        if (text := self.decode(seen)) != yielded:
            yield text[len(yielded) :]
