"""Streams of what a model generates, token by token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

from weightswap_runtime.engines.engine import Engine
from weightswap_runtime.errors import InputMismatch, Unsupported
from weightswap_runtime.format.manifest import STEPS, TextGeneration
from weightswap_runtime.live.generation.generating import GenerationRequest, Tokens, generate, rows_of
from weightswap_runtime.live.generation.sampling import Scores
from weightswap_runtime.live.generation.tokenizer import TOKENIZER, Tokenizer
from weightswap_runtime.sources.location import Location
from weightswap_runtime.tensors.content import array_content, as_array

from .context import Context

_END = object()
StopAt = int | str | Sequence[int]
Run = Callable[..., Any]


class Prompts:
    """What is to be continued: `rows` of tokens, and what their continuations are given back as."""

    def __init__(self, prompt: Any, tokenizer: Callable[[], Tokenizer]) -> None:
        """prompt: tokens of one row or of several, or texts. tokenizer: opens that of texts. Raises InputMismatch."""
        texts = [prompt] if isinstance(prompt, str) else list(prompt) if _is_texts(prompt) else None
        self._tokenizer = tokenizer() if texts is not None else None
        if texts is not None and self._tokenizer is not None:
            self.rows, self.single = [self._tokenizer.encode(text) for text in texts], isinstance(prompt, str)
        else:
            self.rows, self.single = rows_of(prompt)

    def stopped(self, wanted: StopAt | Sequence[StopAt]) -> Callable[[Sequence[int]], bool]:
        """Whether new tokens end with one of the stops, or their text has one in it. Raises InputMismatch."""
        stops: Sequence[Any] = [wanted] if isinstance(wanted, str | int) else wanted
        if not isinstance(stops, Sequence) or isinstance(stops, bytes) or not all(map(_is_stop, stops)):
            raise InputMismatch("generate", ["stop: expected tokens, lists of tokens or texts"])
        if "" in stops:
            raise InputMismatch("generate", ["stop: an empty text ends everything"])
        texts = [stop for stop in stops if isinstance(stop, str)]
        tails = [[stop] if isinstance(stop, int) else list(stop) for stop in stops if not isinstance(stop, str)]
        tokenizer = self._tokenizer
        if texts and tokenizer is None:
            raise InputMismatch("generate", ["stop: texts end texts; give the prompt as text, or the stop as tokens"])

        def ended(tokens: Sequence[int]) -> bool:
            if any(tail and list(tokens[-len(tail) :]) == tail for tail in tails):
                return True
            return bool(texts) and tokenizer is not None and any(text in tokenizer.decode(tokens) for text in texts)

        return ended

    def pieces(self, steps: Iterator[list[int | None]]) -> Iterator[Any]:
        """A step's tokens as they are given back. Raises Unsupported for several texts."""
        if not self.single:
            if self._tokenizer is not None:
                raise Unsupported("stream=True with several texts: stream one at a time, or give tokens")
            return steps
        tokens = (token for step in steps for token in step if token is not None)
        return tokens if self._tokenizer is None else self._tokenizer.pieces(tokens)

    def whole(self, steps: Iterator[list[int | None]]) -> Any:
        """All new tokens of each prompt, or their texts."""
        found = [[token for token in row if token is not None] for row in zip(*steps, strict=True)]
        given = found if self._tokenizer is None else [self._tokenizer.decode(row) for row in found]
        return given[0] if self.single else given


def _is_stop(stop: Any) -> bool:
    return isinstance(stop, str | int) or (isinstance(stop, Sequence) and all(isinstance(each, int) for each in stop))


def _is_texts(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(each, str) for each in prompt)


def find_tokenizer(sources: Iterable[str], artifact: Location) -> Tokenizer:
    """That beside the first of these weights that has one, or in the artifact. Raises Unsupported, and MissingExtra."""
    beside = [folder for source in map(Path, sources) for folder in (source, source.parent)]
    local = (folder for folder in (*beside, artifact) if isinstance(folder, Path))
    folder = next((each for each in local if (each / TOKENIZER).is_file()), None)
    if folder is None:
        raise Unsupported(
            f"a text prompt needs a {TOKENIZER}; there is none beside the weights, nor in the artifact. "
            "Give tokens, or put it there; generate() and weightswap generate take another (tokenizer=, --tokenizer)"
        )
    return Tokenizer(folder)


class _Inputs:
    """Arrays of int64 as an engine's tensors. Those of `decode` are made once and written to, where that is possible.

    No call keeps its inputs, and what a state keeps of them are copies.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept: list[Any] = []
        self._memory: list[Tokens] = []  # that of those kept

    def of(self, method: str, arrays: Sequence[Tokens]) -> list[Any]:
        if method != "decode":
            return self._made(arrays)
        if self._memory:
            for memory, array in zip(self._memory, arrays, strict=True):
                np.copyto(memory, array)
            return self._kept
        self._kept = self._made(arrays)
        if all(getattr(tensor, "is_cpu", True) for tensor in self._kept):
            self._memory = [as_array(self._engine.content(tensor)) for tensor in self._kept]
        return self._kept

    def _made(self, arrays: Sequence[Tokens]) -> list[Any]:
        return [self._engine.tensor(array_content(array)) for array in arrays]


def generated(
    find: Callable[[str], Run], engine: Engine, context: Context, wanted: GenerationRequest, generation: TextGeneration
) -> Iterator[list[int | None]]:
    """The next tokens of each row, by calls with a context, which is closed at the end. find: a method by its name."""
    inputs = _Inputs(engine)

    def call(method: str, ids: Tokens, mask: Tokens, positions: Tokens, position: Tokens) -> Scores:
        given = inputs.of(method, (ids, mask, positions, position))
        logits = as_array(engine.content(methods[method](*given, context=context)))
        return logits if logits.dtype in (np.float32, np.float64) else logits.astype(np.float32)

    def cache_of() -> str | None:
        return context.weights_id if context.on_swap == "reset" else None

    with context:
        methods = {name: find(name) for name in STEPS}
        yield from generate(call, wanted, generation, cache_of)


class TokenStream(Iterator[Any], AsyncIterator[Any], AbstractContextManager["TokenStream"]):
    """What is generated, piece by piece: for `for`, and for `async for`, where a thread waits for each piece.

    The pieces are tokens; of several prompts lists with the next token of each, None for those that have ended; of a
    text pieces of text. `close()` ends it early, as does dropping it, or leaving its `with` block.
    """

    def __init__(self, steps: Iterator[list[int | None]], pieces: Iterator[Any], context: Context) -> None:
        self._steps = steps
        self._pieces = pieces
        self._context = context
        self._turn = RLock()  # a thread that an awaiting task has given up may still be within a step

    @property
    def weights_id(self) -> str | None:
        """The id of the weights that it is pinned to, or that have answered last."""
        return self._context.weights_id

    @property
    def generation(self) -> int | None:
        """The generation that it is pinned to; None where it is not, or has ended."""
        return self._context.generation

    def __next__(self) -> Any:
        with self._turn:
            return next(self._pieces)

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Any:
        piece = await asyncio.to_thread(next, self, _END)
        if piece is _END:
            raise StopAsyncIteration
        return piece

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it, and let its context go, once a step that another thread is in has ended."""
        with self._turn:
            self._pieces = iter(())
            self._steps.close()  # type: ignore[attr-defined]
            self._context.close()
