"""Token streams: the prompts of a generation, its steps, and its output piece by piece."""

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
    """Prompts as `rows` of tokens, with the conversion of their continuations to the form of the prompts."""

    def __init__(self, prompt: Any, tokenizer: Callable[[], Tokenizer]) -> None:
        """prompt: one or several rows of tokens, or texts. tokenizer: opens one for texts. Raises InputMismatch."""
        texts = [prompt] if isinstance(prompt, str) else list(prompt) if _is_texts(prompt) else None
        self._tokenizer = tokenizer() if texts is not None else None
        if texts is not None and self._tokenizer is not None:
            self.rows, self.single = [self._tokenizer.encode(text) for text in texts], isinstance(prompt, str)
        else:
            self.rows, self.single = rows_of(prompt)

    def stop_check(self, stop: StopAt | Sequence[StopAt]) -> Callable[[Sequence[int]], bool]:
        """Return a predicate: do new tokens end with a stop, or does their text contain one? Raises InputMismatch."""
        stops: Sequence[Any] = [stop] if isinstance(stop, str | int) else stop
        if not isinstance(stops, Sequence) or isinstance(stops, bytes) or not all(map(_is_stop, stops)):
            raise InputMismatch("generate", ["stop: expected tokens, lists of tokens, or strings"])
        if "" in stops:
            raise InputMismatch("generate", ["stop: an empty string would end every row at once"])
        texts = [stop for stop in stops if isinstance(stop, str)]
        tails = [[stop] if isinstance(stop, int) else list(stop) for stop in stops if not isinstance(stop, str)]
        tokenizer = self._tokenizer
        if texts and tokenizer is None:
            raise InputMismatch(
                "generate", ["stop: strings need a text prompt; give the prompt as text, or the stop as tokens"]
            )

        def ended(tokens: Sequence[int]) -> bool:
            if any(tail and list(tokens[-len(tail) :]) == tail for tail in tails):
                return True
            return bool(texts) and tokenizer is not None and any(text in tokenizer.decode(tokens) for text in texts)

        return ended

    def pieces(self, steps: Iterator[list[int | None]]) -> Iterator[Any]:
        """Return an iterator over the output of each step, for streaming. Raises Unsupported for several texts."""
        if not self.single:
            if self._tokenizer is not None:
                raise Unsupported("stream=True with several texts: stream one at a time, or give tokens")
            return steps
        tokens = (token for step in steps for token in step if token is not None)
        return tokens if self._tokenizer is None else self._tokenizer.pieces(tokens)

    def whole(self, steps: Iterator[list[int | None]]) -> Any:
        """Run all steps, and return the new tokens of each prompt, or their texts."""
        rows = [[token for token in row if token is not None] for row in zip(*steps, strict=True)]
        outputs = rows if self._tokenizer is None else [self._tokenizer.decode(row) for row in rows]
        return outputs[0] if self.single else outputs


def _is_stop(stop: Any) -> bool:
    return isinstance(stop, str) or all(map(_is_token, stop if isinstance(stop, Sequence) else [stop]))


def _is_token(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _is_texts(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(item, str) for item in prompt)


def find_tokenizer(sources: Iterable[str], artifact: Location) -> Tokenizer:
    """Open the first tokenizer beside these weights, or that of the artifact. Raises Unsupported and MissingExtra."""
    beside = [folder for source in map(Path, sources) for folder in (source, source.parent)]
    local = (folder for folder in (*beside, artifact) if isinstance(folder, Path))
    folder = next((each for each in local if (each / TOKENIZER).is_file()), None)
    if folder is None:
        raise Unsupported(
            f"a text prompt needs a {TOKENIZER}, but there is none beside the weights or in the artifact. "
            "Give tokens, put one there, or name another (tokenizer=, --tokenizer)"
        )
    return Tokenizer(folder)


class _Inputs:
    """Conversion of int64 arrays to an engine's tensors. Those of `decode` are made once and reused on the CPU.

    That is safe: no call keeps its inputs, and a state holds only copies of them.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._decode_tensors: list[Any] = []
        self._decode_memory: list[Tokens] = []  # arrays that alias the tensors

    def tensors(self, method: str, arrays: Sequence[Tokens]) -> list[Any]:
        if method != "decode":
            return self._new_tensors(arrays)
        if self._decode_memory:
            for memory, array in zip(self._decode_memory, arrays, strict=True):
                np.copyto(memory, array)
            return self._decode_tensors
        self._decode_tensors = self._new_tensors(arrays)
        if all(getattr(tensor, "is_cpu", True) for tensor in self._decode_tensors):
            self._decode_memory = [as_array(self._engine.content(tensor)) for tensor in self._decode_tensors]
        return self._decode_tensors

    def _new_tensors(self, arrays: Sequence[Tokens]) -> list[Any]:
        return [self._engine.tensor(array_content(array)) for array in arrays]


def generate_steps(
    find: Callable[[str], Run], engine: Engine, context: Context, request: GenerationRequest, generation: TextGeneration
) -> Iterator[list[int | None]]:
    """Yield the next tokens of all rows, by calls with a context, then close it. find: returns a method by name."""
    inputs = _Inputs(engine)

    def call(method: str, ids: Tokens, mask: Tokens, positions: Tokens, position: Tokens) -> Scores:
        tensors = inputs.tensors(method, (ids, mask, positions, position))
        logits = as_array(engine.content(methods[method](*tensors, context=context)))
        return logits if logits.dtype in (np.float32, np.float64) else logits.astype(np.float32)

    def cache_id() -> str | None:
        return context.weights_id if context.on_swap == "reset" else None

    with context:
        methods = {name: find(name) for name in STEPS}
        yield from generate(call, request, generation, cache_id)


class TokenStream(Iterator[Any], AsyncIterator[Any], AbstractContextManager["TokenStream"]):
    """An iterator over the generated output, for `for` and `async for` (a thread then waits for each piece).

    The pieces are tokens; for several prompts, lists with the next token of each, or None if that has ended; for a
    text, pieces of text. `close()` ends the stream early, as does dropping it or leaving its `with` block.
    """

    def __init__(self, steps: Iterator[list[int | None]], pieces: Iterator[Any], context: Context) -> None:
        self._steps = steps
        self._pieces = pieces
        self._context = context
        self._lock = RLock()  # the thread of a cancelled task may still be within a step

    @property
    def weights_id(self) -> str | None:
        """The id of the weights that the stream is pinned to, or that answered last."""
        return self._context.weights_id

    @property
    def generation(self) -> int | None:
        """The generation that the stream is pinned to; None if it is not pinned, or has ended."""
        return self._context.generation

    def __next__(self) -> Any:
        with self._lock:
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
        """End the stream and close its context, after waiting for a step in another thread."""
        with self._lock:
            self._pieces = iter(())
            self._steps.close()  # type: ignore[attr-defined]
            self._context.close()
