"""Text in and out: a tokenizer of the library tokenizers, as `tokenizer.json` describes it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weightswap_runtime.errors import MissingExtra, Unsupported

TOKENIZER = "tokenizer.json"


class Tokenizer:
    """Text to tokens and back."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """path: a tokenizer.json, or the folder that has it. Raises MissingExtra, and Unsupported for another file."""
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError as error:
            raise MissingExtra("text prompts", "text") from error
        self._file = Path(path, TOKENIZER) if Path(path).is_dir() else Path(path)
        with self._errors(f"is no {TOKENIZER} that can be read"):
            self._loaded: Any = Loaded.from_file(str(self._file))
            self._loaded.no_padding()  # as transformers does: a training may have left them there
            self._loaded.no_truncation()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with those that the model expects around it. Raises Unsupported."""
        with self._errors(f"gives no tokens for {text!a:.80}"):
            found: list[int] = self._loaded.encode(text).ids
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones. Raises Unsupported."""
        with self._errors("gives no text"):
            found: str = self._loaded.decode(list(tokens))
        return found

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """A block whose errors are Unsupported; panics of the library are no Exceptions."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise Unsupported(f"{self._file}: {what} ({error})") from error

    def pieces(self, tokens: Iterator[int]) -> Iterator[str]:
        """The text as it grows; a letter that takes several tokens comes with the last of them."""
        seen: list[int] = []
        said = ""
        for token in tokens:
            seen.append(token)
            text = self.decode(seen)
            if not text.endswith("\ufffd"):
                yield text[len(said) :]
                said = text
        if (text := self.decode(seen)) != said:
            yield text[len(said) :]
