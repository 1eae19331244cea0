"""Generation of tokens with the methods `prefill` and `decode`: prompts, the loop of calls, sampling, texts, streams.

All rows of a batch are decoded together: shorter prompts are padded on the left, so that all are at one position.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightswap_runtime.engines.engine import Engine
from weightswap_runtime.errors import CallError, InputMismatch, MissingExtra, Unsupported, is_number
from weightswap_runtime.format.manifest import STEPS, TextGeneration
from weightswap_runtime.live.context import Context
from weightswap_runtime.sources.location import Location
from weightswap_runtime.tensors import array_content, as_array

Scores = NDArray[np.floating[Any]]
Tokens = NDArray[np.int64]
TOKENIZER = "tokenizer.json"
_LONG = 4096  # characters, from which on other threads must run meanwhile
_END = object()
StopAt = int | str | Sequence[int]
Run = Callable[..., Any]


class Sampling(NamedTuple):
    """The options of sampling, as in transformers."""

    temperature: float = 0.0  # 0 takes the most likely token, whatever `top_k` and `top_p` are
    top_k: int | None = None  # sample among this many of the most likely tokens
    top_p: float | None = None  # sample among the fewest most likely tokens whose probabilities add up to it
    repetition_penalty: float = 1.0  # divides positive logits of past tokens, multiplies negative ones

    def check(self) -> None:
        """Raise Unsupported for invalid numbers."""
        if not (is_number(self.temperature) and self.temperature >= 0):
            raise Unsupported(f"temperature={self.temperature!r}: expected 0 or more")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise Unsupported(f"top_k={self.top_k!r}: expected 1 or more, or None")
        if self.top_p is not None and not (is_number(self.top_p) and 0 < self.top_p <= 1):
            raise Unsupported(f"top_p={self.top_p!r}: expected a number above 0, up to 1, or None")
        if not (is_number(self.repetition_penalty) and self.repetition_penalty > 0):
            raise Unsupported(f"repetition_penalty={self.repetition_penalty!r}: expected a positive number")


class GenerationRequest(NamedTuple):
    """What is generated: one row of new tokens for each prompt."""

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    most: int | None = None  # the maximum number of new tokens of each row; None: until the cache is full
    # returns whether a row ends after these new tokens, in addition to the artifact's own end tokens
    stopped: Callable[[Sequence[int]], bool] = lambda _: False
    seed: int | None = None  # of the sampling


def check(request: GenerationRequest, generation: TextGeneration) -> None:
    """Raise InputMismatch for prompts that do not fit into the cache, and Unsupported for invalid numbers."""
    request.sampling.check()
    for name, value, least in (("max_new_tokens", request.most, 1), ("seed", request.seed, 0)):
        if value is not None and (type(value) is not int or value < least):
            raise Unsupported(f"{name}={value!r}: expected an integer of at least {least}, or None")
    if problems := list(_problems(request, generation)):
        raise InputMismatch("generate", problems)


def _problems(request: GenerationRequest, generation: TextGeneration) -> Iterator[str]:
    lengths = [len(prompt) for prompt in request.prompts]
    if not 1 <= len(lengths) <= generation.batch:
        yield f"expected 1 to {generation.batch} prompts, got {len(lengths)}"
    if min(lengths, default=1) < 1:
        yield "a prompt has no tokens"
    if (largest := max((token for prompt in request.prompts for token in prompt), default=0)) >= generation.vocabulary:
        yield f"a prompt has the token {largest}, but the vocabulary has {generation.vocabulary}"
    if max(lengths, default=0) > generation.length:
        yield f"a prompt has {max(lengths)} tokens, but the cache holds {generation.length}"
    elif request.most is not None and max(lengths, default=0) + request.most - 1 > generation.length:
        yield (
            f"a prompt of {max(lengths)} tokens and {request.most} new ones do not fit in a cache of "
            f"{generation.length}"
        )


def generate_steps(
    find: Callable[[str], Run], engine: Engine, context: Context, request: GenerationRequest, generation: TextGeneration
) -> Iterator[list[int | None]]:
    """Yield the next token of each prompt, or None if it has ended, until all have, by calls with a context, then close
    that. find: returns a method by name.

    If a call resets the cache, as the weights have changed, the prompts and the tokens so far are read again.
    """

    def call(method: str, arrays: Iterable[Tokens]) -> Scores:
        tensors = [engine.tensor(array_content(array)) for array in arrays]
        logits = as_array(engine.content(methods[method](*tensors, context=context)))
        return logits if logits.dtype in (np.float32, np.float64) else logits.astype(np.float32)

    with context:
        methods = {name: find(name) for name in STEPS}
        rows = _Rows(request, generation)
        logits = call("prefill", rows.prompt())
        made_with = context.weights_id
        yield (chosen := rows.choose(logits))
        for _ in range(rows.free):
            if rows.ended:
                return
            logits = call("decode", rows.step(chosen))
            if context.on_swap == "reset" and context.weights_id != made_with:
                logits = call("prefill", rows.read())
                made_with = context.weights_id
            yield (chosen := rows.choose(logits))


class _Rows:
    """All rows of a generation. Shorter prompts are padded on the left, so that all rows have the same length."""

    def __init__(self, request: GenerationRequest, generation: TextGeneration) -> None:
        self._request, self._generation = request, generation
        self._count = len(request.prompts)
        self._width = max(map(len, request.prompts))
        self._seen = [list(prompt) for prompt in request.prompts]
        self._new: list[list[int]] = [[] for _ in request.prompts]
        self._done = [False] * self._count
        self._random = np.random.default_rng(request.seed)
        self._mask = np.zeros((generation.batch, generation.length), np.int64)
        self._ids = np.full_like(self._mask, generation.pad)
        self._last = np.full_like(self._mask[:, :1], generation.pad)  # the tokens of the last step, and their positions
        self._positions = np.zeros_like(self._last)
        self._position = np.zeros((), np.int64)
        free = generation.length - self._width  # the last token is never read
        self.free = free if request.most is None else min(free, request.most - 1)

    @property
    def ended(self) -> bool:
        return all(self._done)

    def prompt(self) -> tuple[Tokens, Tokens, Tokens, Tokens]:
        """Return the inputs of the first call. Unused rows of the batch have one padding token."""
        self._mask[self._count :, self._width - 1] = 1
        for row, prompt in enumerate(self._request.prompts):
            self._ids[row, self._width - len(prompt) : self._width] = prompt
            self._mask[row, self._width - len(prompt) : self._width] = 1
        self._next = self._width
        return self.read()

    def read(self) -> tuple[Tokens, Tokens, Tokens, Tokens]:
        """Return the inputs of a call that reads all tokens so far into an empty cache."""
        positions = np.maximum(self._mask[:, : self._next].cumsum(1) - 1, 0)
        self._positions[:] = positions[:, -1:]
        return self._ids[:, : self._next], self._mask, positions, np.asarray(0, np.int64)

    def step(self, chosen: list[int | None]) -> tuple[Tokens, Tokens, Tokens, Tokens]:
        """Return the inputs of the call that follows after tokens were chosen."""
        pad = self._generation.pad
        self._last[: self._count, 0] = [pad if token is None else token for token in chosen]
        self._ids[:, self._next] = self._last[:, 0]
        self._mask[:, self._next] = 1
        self._positions += 1
        self._position[...] = self._next
        self._next += 1
        return self._last, self._mask, self._positions, self._position

    def choose(self, logits: Scores) -> list[int | None]:
        return [None if done else self._choose(row, logits[row]) for row, done in enumerate(self._done)]

    def _choose(self, row: int, logits: Scores) -> int:
        token = choose(logits, self._seen[row], self._request.sampling, self._random)
        self._seen[row].append(token)
        self._new[row].append(token)
        self._done[row] = token in self._generation.ends or self._request.stopped(self._new[row])
        return token


def choose(logits: Scores, seen: Sequence[int], sampling: Sampling, random: np.random.Generator) -> int:
    """Choose the next token of one row. logits: [vocabulary]. seen: the tokens that have occurred."""
    scores = _penalised(logits, seen, sampling.repetition_penalty)
    best = scores.argmax()  # NaN wins; -inf forbids a token, but not all of them
    if not math.isfinite(scores[best]):
        raise CallError(f"generate: the largest logit of the next token must be finite, got {scores[best]}")
    if not sampling.temperature:
        return int(best)
    return int(random.choice(len(scores), p=probabilities(scores, sampling)))


def _penalised(logits: Scores, seen: Sequence[int], penalty: float) -> Scores:
    if penalty == 1.0 or not seen:
        return logits
    tokens = np.unique(np.asarray(seen))
    scores = logits.copy()
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        scores[tokens] = np.where(scores[tokens] < 0, scores[tokens] * penalty, scores[tokens] / penalty)
    return scores


def probabilities(scores: Scores, sampling: Sampling) -> NDArray[np.float64]:
    """Return the probability of each token, [vocabulary]; temperature must not be 0."""
    scaled = scores.astype(np.float64)
    scaled = (scaled - scaled.max()) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(scaled):
        scaled[scaled < np.partition(scaled, -sampling.top_k)[-sampling.top_k]] = -np.inf
    if sampling.top_p is not None and sampling.top_p < 1:
        order = np.argsort(scaled, kind="stable")  # the least likely first
        scaled[order[:-1][_softmax(scaled[order]).cumsum()[:-1] <= 1 - sampling.top_p]] = -np.inf
    return _softmax(scaled)


def _softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    exponentials = np.exp(scores - scores.max())
    result: NDArray[np.float64] = exponentials / exponentials.sum()
    return result


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


def rows_of(prompt: Any) -> tuple[list[list[int]], bool]:
    """Return prompts (lists, arrays or tensors of one row or several) as lists of tokens, and whether it was one row.

    Raises InputMismatch.
    """
    tokens = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    single = isinstance(tokens, Sequence) and all(type(item) is int for item in tokens)
    rows = [tokens] if single else tokens
    if not isinstance(rows, Sequence) or not all(
        isinstance(row, Sequence) and all(type(item) is int and item >= 0 for item in row) for row in rows
    ):
        raise InputMismatch("generate", ["expected tokens: a list of integers, or a list of such lists"])
    return [list(row) for row in rows], single


def _is_texts(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(item, str) for item in prompt)


def _is_stop(stop: Any) -> bool:
    return isinstance(stop, str) or all(map(_is_token, stop if isinstance(stop, Sequence) else [stop]))


def _is_token(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


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
            added = self._loaded.get_added_tokens_decoder().values()
            self._special = {token.content for token in added if token.special}

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
        """Yield the text as it grows; what the next tokens may still change comes when they no longer can."""
        seen: list[int] = []
        yielded = ""
        in_bytes = False  # whether the text ends in bytes, which are decoded together: one may make all of them invalid
        for token in tokens:
            seen.append(token)
            name = self._loaded.id_to_token(token)
            if name is not None and name not in self._special:  # others are left out of the text, even between bytes
                in_bytes = _is_byte(name)
            if not in_bytes and not (text := self.decode(seen)).endswith("\ufffd"):
                yield text[len(yielded) :]
                yielded = text
        if (text := self.decode(seen)) != yielded:
            yield text[len(yielded) :]


def _is_byte(name: str) -> bool:
    return len(name) == 6 and name.startswith("<0x") and name.endswith(">")


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
