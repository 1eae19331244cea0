"""The generation loop: one call reads the prompts, and each further call yields one token of each row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from weightswap_runtime.errors import InputMismatch, Unsupported
from weightswap_runtime.format.manifest import TextGeneration

from .sampling import Sampling, Scores, choose

Tokens = NDArray[np.int64]


class Call(Protocol):
    """A call of `prefill` or `decode`, with arrays of int64; returns the logits, [batch, vocabulary].

    The arrays are written to afterwards; `decode` gets those of its first call again.
    """

    def __call__(self, method: str, ids: Tokens, mask: Tokens, positions: Tokens, position: Tokens) -> Scores: ...


class GenerationRequest(NamedTuple):
    """A request to generate. most: the maximum number of new tokens of each row; None: until the cache is full.

    stopped: returns whether a row ends after these new tokens, in addition to the artifact's own end tokens.
    seed: the seed of the sampling.
    """

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    most: int | None = None
    stopped: Callable[[Sequence[int]], bool] = lambda _: False
    seed: int | None = None


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


def check_position(method: str, flat: Sequence[Any], generation: TextGeneration) -> None:
    """Raise InputMismatch for a call of `prefill` or `decode` whose tokens would lie outside the cache.

    A position on a device is not checked, as reading it would make the call wait for the device.
    """
    ids, *_, position = flat
    if not getattr(position, "is_cpu", True):
        return
    first, tokens = int(position), ids.shape[1]
    if not 0 <= first <= generation.length - tokens:
        problem = f"{tokens} tokens at position {first} do not fit in a cache of {generation.length}"
        raise InputMismatch(method, [f"{problem}; start again in a new context, or export with a larger length"])


def generate(
    call: Call, request: GenerationRequest, generation: TextGeneration, cache_id: Callable[[], object] = lambda: None
) -> Iterator[list[int | None]]:
    """Yield the next token of each prompt, or None if it has ended, until all have.

    cache_id: returns what the cache was made with. If a call changes that, the cache was reset before the call, and the
    prompts and the tokens so far are read again.
    """
    rows = _Rows(request, generation)
    logits = call("prefill", *rows.prompt())
    made_with = cache_id()
    yield (chosen := rows.choose(logits))
    for _ in range(rows.room):
        if rows.ended:
            return
        logits = call("decode", *rows.step(chosen))
        if cache_id() != made_with:
            logits = call("prefill", *rows.read())
            made_with = cache_id()
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
        room = generation.length - self._width  # the last token is never read
        self.room = room if request.most is None else min(room, request.most - 1)

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
