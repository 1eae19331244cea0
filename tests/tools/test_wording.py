"""Signatures in words, and visible texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightswap_runtime.errors import visible
from weightswap_runtime.format.signature import Dict, Dimension, Integer, Items, Literal, Node, Signature, Tensor, Tuple
from weightswap_runtime.tensors import DTYPES
from weightswap_tools.terminal import element_words, enumerated, node_words, signature_sentence

X = Tensor("x", "F32", ("batch", 3))
Y = Tensor("y", "I64", ())


def signature(*args: tuple[str, Node], output: Node = X, **more: object) -> Signature:
    return Signature(args=args, output=output, **({"kwargs": (), "dims": {}} | more))  # type: ignore[arg-type]


def test_a_sentence_says_it_all() -> None:
    keywords = (("mask", Tensor("mask", "BOOL", ("rows", "2*rows"))), ("scale", Literal.of("scale", 2.0)))
    dims = {"batch": Dimension(1, 8), "rows": Dimension(0)}
    output = Dict((("y", X), ("n", Literal("n", 3))))
    args = (("x", X), ("n", Integer("n", "rows")))
    full = signature(*args, output=output, kwargs=keywords, dims=dims, conditions=("rows <= batch",))
    assert signature_sentence("forward", full) == (
        "forward takes x (a tensor of 32-bit floats, batch × 3) and n (an integer, rows), and by keyword only mask "
        "(a tensor of truth values, rows × 2·rows) and scale (fixed at 2.0), and returns a dict with y (a tensor of "
        "32-bit floats, batch × 3) and n (always 3); batch is from 1 to 8 and rows is 0 or more; where rows <= batch."
    )


@pytest.mark.parametrize(
    ("given_to", "says"),
    {
        "nothing": (signature(), "f takes nothing, and returns"),
        "keywords": (signature(kwargs=(("y", Y),)), "f takes by keyword only y (a single 64-bit integer), and returns"),
        "one": (signature(("y", Y)), "f takes y (a single 64-bit integer), and returns"),
    }.values(),
)
def test_sentences_of_arguments(given_to: Signature, says: str) -> None:
    assert signature_sentence("f", given_to).startswith(says)


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (Tensor("v", "BF16", ("length",)), "a vector of bfloat16 numbers, length long"),
        (Items(()), "an empty list"),
        (Dict(()), "an empty dict"),
        (Items((Y,)), "a list of 1: a single 64-bit integer"),
        (Tuple((Y, Y)), "a tuple of 2: each a single 64-bit integer"),
        (Tuple((Y, Literal("n", None))), "a tuple of 2: (a single 64-bit integer) and (always None)"),
    ],
)
def test_nodes_in_words(node: Node, words: str) -> None:
    assert node_words(node) == words


def test_every_dtype_has_words_of_its_own() -> None:
    words = {element_words(dtype) for dtype in DTYPES}
    assert len(words) == len(DTYPES)
    assert not words & DTYPES.keys()


@pytest.mark.parametrize(("parts", "text"), [([], ""), (["a"], "a"), (["a", "b"], "a and b"), ("abc", "a, b and c")])
def test_lists_in_words(parts: list[str], text: str) -> None:
    assert enumerated(parts) == text


@given(st.text(st.characters(exclude_categories=())))
def test_visible_text_is_printable(text: str) -> None:
    shown = visible(text)
    assert shown.isprintable() or not shown
    shown.encode()
    assert text.isprintable() <= (shown == text)
