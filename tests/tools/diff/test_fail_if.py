"""Conditions on changes: their meaning, and their syntax errors."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny import WriteWeights
from weightswap_runtime import Unsupported
from weightswap_tools.diff import Policy, TensorDiff, Values, WeightsDiff, compare_weights
from weightswap_tools.diff.weights import QUANTITIES

NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def diff(tmp_path_factory: pytest.TempPathFactory) -> WeightsDiff:
    """Tensors that are named after their change."""
    folder = tmp_path_factory.mktemp("policies")
    ones = torch.ones(2, 2)
    before = {
        "encoder.nan": ones,
        "decoder.inf": ones,
        "old.nan": torch.tensor([NAN, 1.0]),
        "small": ones,
        "large": ones,
        "dead": ones,
        "flipped": torch.tensor([1.0, 1.0, 1.0, 1.0]),
        "typed": ones,
        "shaped": ones,
        "gone": torch.full((3,), 7.0),
        "name": torch.arange(3.0),
        "same": torch.full((4,), 4.0),
    }
    after = {
        "encoder.nan": torch.tensor([[NAN, 1.0], [1.0, 1.0]]),
        "decoder.inf": torch.tensor([[INF, -INF], [1.0, 1.0]]),
        "old.nan": torch.tensor([NAN, 1.0]),
        "small": ones * 1.001,
        "large": ones * 2,
        "dead": torch.tensor([[0.0, 0.0], [1.0, 1.0]]),
        "flipped": torch.tensor([-1.0, 1.0, 1.0, 1.0]),
        "typed": ones.half(),
        "shaped": torch.ones(4),
        "come": torch.full((5,), 3.0),
        "renamed": torch.arange(3.0),
        "same": torch.full((4,), 4.0),
    }
    before = {name: value.clone() for name, value in before.items()}
    safetensors.torch.save_file(before, folder / "a.safetensors")
    safetensors.torch.save_file(after, folder / "b.safetensors")
    return compare_weights(folder / "a.safetensors", folder / "b.safetensors")


MEANINGS = {
    "nan": {"encoder.nan", "old.nan"},
    "new_nan": {"encoder.nan"},
    "inf == 2": {"decoder.inf"},
    "new_inf >= 3": set(),
    "new_nan or new_inf": {"encoder.nan", "decoder.inf"},
    'nan and name ~ "encoder.*"': {"encoder.nan"},
    "nan and not name ~ 'encoder.*'": {"old.nan"},
    "rel_change > 0.5": {"large", "dead", "flipped"},
    "rel_change > 5e-1 and rel_change<=.8": {"dead"},
    "removed": {"gone"},
    "added": {"come"},
    "reshaped or retyped": {"shaped", "typed"},
    "renamed": {"renamed"},
    "dead_rows": {"dead"},
    "new_dead_rows > 0": {"dead"},
    "sign_flips": {"flipped"},
    "cosine < 0.9": {"dead", "flipped"},
    "share_changed == 0.25": {"encoder.nan", "flipped"},
    "max_change == 2": {"flipped"},
    "max_rel_change > 0.5 and max_change < 2": {"large", "dead"},
    "std == 0 and mean == 4": {"same"},
    "norm > -1 and name ~ 'same'": {"same"},
    "mean >= -1e400 and name ~ 's*'": {"same", "shaped", "small"},
    "alarm": {"encoder.nan", "decoder.inf", "gone", "shaped"},
    "notice and not (rel_change > 0.5 or added)": {"typed", "renamed"},
    "not (changed or name ~ '*' and removed)": {"old.nan", "same", "renamed"},
    "new_nan or new_inf and name ~ 'nothing'": {"encoder.nan"},
    "not not reshaped": {"shaped"},
    "(((reshaped)))": {"shaped"},
    "mean == 0": set(),
}


@pytest.mark.parametrize("text", MEANINGS)
def test_meanings_of_conditions(text: str, diff: WeightsDiff) -> None:
    policy = Policy(text)
    failures = policy.failures(diff)
    assert set(failures) == MEANINGS[text]
    assert list(failures) == [tensor.name for tensor in diff.tensors if tensor.name in failures]


QUANTITY = 'expected name ~ "PATTERN" or one of nan, inf'
REFUSED = {
    "": (1, "invalid syntax"),
    "  ": (1, "invalid syntax"),
    "frobs > 1": (1, QUANTITY),
    "nan or": (7, "invalid syntax"),
    "nan nan": (5, "invalid syntax"),
    "nan > inf": (7, "expected a number"),
    "rel_change > 'x'": (14, "expected a number"),
    "rel_change > 0.5)": (17, "unmatched ')'"),
    "(nan": (1, "'(' was never closed"),
    "nan = 1": (5, "invalid syntax"),
    "nan > 1 > 0": (1, QUANTITY),
    "name": (1, QUANTITY),
    "name ~ encoder": (6, "invalid syntax"),
    'name ~ "encoder': (8, "unterminated string literal"),
    'nan and name____ or name ~ "a"': (9, QUANTITY),
    "__import__('os')": (1, QUANTITY),
    "nan.__class__": (1, QUANTITY),
    "nan;inf": (4, "invalid syntax"),
    "nan > --1": (7, "expected a number"),
    "nan > 1j": (7, "expected a number"),
    "nan + 1 > 2": (1, QUANTITY),
    "nan\n\n  or %": (11, "invalid syntax"),
    "nan\0": (5, "null bytes"),
    "nan or \ud800": (1, "surrogates not allowed"),
    "1 < nan": (1, QUANTITY),
    "NaN": (1, QUANTITY),
}


@pytest.mark.parametrize("text", REFUSED)
def test_syntax_errors_name_their_column(text: str) -> None:
    column, says = REFUSED[text]
    with pytest.raises(Unsupported) as refused:
        Policy(text)
    assert f"column {column}: " in str(refused.value)
    assert says in str(refused.value)


def test_texts_that_are_too_long_or_too_deep() -> None:
    assert Policy("(" * 50 + "nan" + ")" * 50)
    with pytest.raises(Unsupported, match="column"):
        Policy("(" * 900 + "nan" + ")" * 900)
    with pytest.raises(Unsupported, match="column"):
        Policy("nan > " + "-" * 1900 + "1")
    with pytest.raises(Unsupported, match="a condition of 2001 characters"):
        Policy("nan" + " " * 1998)
    assert Policy("not " * 400 + "nan").quantities == {"nan"}


def test_conditions_that_need_values_of_unchanged_tensors() -> None:
    wanting = {name for name in QUANTITIES if Policy(name).needs_values}
    assert wanting == {"nan", "inf", "mean", "std", "norm", "dead_rows"}


def test_unread_tensors_count_as_unchanged(weight_file: WriteWeights) -> None:
    path = weight_file(1)
    diff = compare_weights(path, path)
    assert all(tensor.change is None for tensor in diff.tensors)
    conditions = {"rel_change == 0": True, "cosine == 1": True, "share_changed > 0": False, "std >= 0": False}
    for text, holds in conditions.items():
        assert len(Policy(text).failures(diff)) == (len(diff.tensors) if holds else 0), text


WORDS = [
    "nan",
    "inf",
    "rel_change",
    "name",
    "~",
    '"e*"',
    "and",
    "or",
    "not",
    "(",
    ")",
    "<",
    "==",
    "1",
    ".5",
    "-",
    "x",
    "'",
]
NOTHING = Values(elements=1, nan=0, inf=0, mean=0.0, std=0.0, norm=0.0, dead_rows=0)
UNCHANGED = TensorDiff(name="x", status="same", values_before=NOTHING, values_after=NOTHING)


def parsed(text: str) -> Policy | None:
    """Parse a condition; None for a text that is refused with its column."""
    try:
        return Policy(text)
    except Unsupported as error:
        if "column" in str(error):
            return None
        raise


@given(st.lists(st.sampled_from(WORDS), max_size=12))
def test_any_text_is_refused_or_means_what_it_means_in_python(words: list[str]) -> None:
    text = " ".join(words)
    if policy := parsed(text):
        python = text.replace('name ~ "e*"', "False")
        assert policy.meets(UNCHANGED) == bool(eval(python, {}, dict.fromkeys(QUANTITIES, 0)))
