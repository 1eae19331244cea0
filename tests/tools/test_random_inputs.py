"""Inputs and weights made from random numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.support.models import Everything
from weightswap_exporter import MethodSpec, export
from weightswap_exporter.engines.index_bounds import index_bounds
from weightswap_runtime import load, read_weights
from weightswap_runtime.format.signature import Dimension, Integer, Literal, Signature, Tensor
from weightswap_runtime.tensors import DTYPES, as_float64, is_numpys
from weightswap_runtime.torch_tensors import as_tensor, torch_dtype
from weightswap_tools.inputs import (
    common_sizes,
    edge_sizes,
    encoded,
    random_values,
    signs_of,
    write_random_weights,
)

BATCH, LENGTH = Dimension(1, 64), Dimension(2, None)


def signature(*leaves: Tensor | Integer | Literal, dims: dict[str, Dimension], conditions: tuple[str, ...] = ()):
    args = tuple((leaf.name, leaf) for leaf in leaves)
    return Signature(args=args, kwargs=(), output=Literal("output"), dims=dims, conditions=conditions)


TEXT = signature(
    Tensor("ids", "I64", ("batch", "2*length+1")),
    Integer("count", "length"),
    Literal("flag", value=True),
    dims={"batch": BATCH, "length": LENGTH},
)


def test_the_ends_of_the_ranges_one_dimension_at_a_time() -> None:
    assert edge_sizes(TEXT, most=1000) == [
        {"batch": 1, "length": 2},
        {"batch": 64, "length": 2},
        {"batch": 1, "length": 64},  # a range without an end
    ]
    assert edge_sizes(TEXT, most=70)[1:] == [{"batch": 8, "length": 2}, {"batch": 1, "length": 32}]
    many = signature(Tensor("ids", "I64", ("n",)), dims={"n": Dimension(1, 1 << 20)})
    assert edge_sizes(many)[1:] == [{"n": 2048}]


def test_a_range_from_zero_has_two_ends_below() -> None:
    free = signature(Tensor("x", "F32", ("rows", 3)), dims={"rows": Dimension(0, 9)})
    assert edge_sizes(free) == [{"rows": 1}, {"rows": 9}, {"rows": 0}]


def test_common_sizes_are_within_the_ranges() -> None:
    pairs = [(2, 3), (3, 5), (5, 8), (8, 2)]
    assert common_sizes(TEXT) == [{"batch": batch, "length": length} for batch, length in pairs]
    small = signature(Tensor("x", "F32", ("n",)), dims={"n": Dimension(0, 2)})
    assert common_sizes(small) == [{"n": 2}]


def test_without_dynamic_dimensions_there_is_one_set_of_sizes() -> None:
    fixed = signature(Tensor("x", "F32", (2,)), dims={})
    assert common_sizes(fixed) == edge_sizes(fixed) == [{}]


def test_conditions_are_kept() -> None:
    dims = {"rows": Dimension(1, 8), "columns": Dimension(1, 8)}
    tall = signature(Tensor("x", "F32", ("rows", "columns")), dims=dims, conditions=("columns < rows",))
    assert edge_sizes(tall) == [{"rows": 8, "columns": 1}]


def test_values_fit_the_signature() -> None:
    ids, count, flag = random_values(TEXT, {"batch": 3, "length": 4}, np.random.default_rng(0), {"ids": 50})
    assert (ids.dtype, ids.shape, count, flag) == ("I64", (3, 9), 4, True)
    assert 1 < as_float64(ids).max() < 50
    assert as_float64(ids).min() >= 0


def test_values_of_one_sign_reach_the_ends_of_small_dtypes_and_stay_rows_of_tables() -> None:
    small = signature(*(Tensor(name, name, (4000,)) for name in ("U8", "I8", "I64", "F32", "BOOL")), dims={})
    assert signs_of(small) == ["positive values", "negative values"]
    assert signs_of(signature(Tensor("x", "U8", (2,)), dims={})) == ["positive values"]
    for signs, ends in (
        ("positive values", ((1, 255), (1, 127), (1, 5))),
        ("negative values", ((1, 255), (-128, -1), (1, 5))),
    ):
        *integers, floats, truth = random_values(small, {}, np.random.default_rng(0), {"I64": 6}, signs)
        assert tuple((as_float64(one).min(), as_float64(one).max()) for one in integers) == ends
        assert ((as_float64(floats) > 0) == (signs == "positive values")).all()
        assert {*truth.data} == {0, 1}


@pytest.mark.parametrize("dtype", [name for name, row in DTYPES.items() if row.torch])
def test_every_dtype_is_encoded_near_its_values(dtype: str) -> None:
    values = np.array([[0.0, 1.0, 2.0], [3.5, 0.125, 100.0]])
    wanted = torch_dtype(dtype)
    if not wanted.is_floating_point and not wanted.is_complex:
        values = values.round()
    made = encoded(values, dtype)
    expected = torch.from_numpy(values).to(wanted)
    assert (made.dtype, made.shape) == (dtype, (2, 3))
    found = as_tensor(bytearray(made.data), dtype, (2, 3))
    step = {"BF16": 2**-7, "F8_E5M2": 2**-2, "F8_E5M2FNUZ": 2**-2, "F8_E8M0": 1.0}.get(dtype, 2**-3)
    exact = is_numpys(dtype)
    torch.testing.assert_close(
        found.to(torch.complex128), expected.to(torch.complex128), rtol=0 if exact else step, atol=0 if exact else 1e-4
    )


def test_random_weights_are_taken_by_the_model(tmp_path: Path) -> None:
    artifact = export(Everything().eval(), (torch.randn(2, 1, 8, 8),), out=tmp_path / "a")
    for seed, name in enumerate(("one", "again", "other")):
        write_random_weights(artifact.manifest, tmp_path / name, np.random.default_rng(seed // 2))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "again").read_bytes() != (tmp_path / "other").read_bytes()
    answer = load(artifact, tmp_path / "one")(torch.randn(2, 1, 8, 8))
    assert all(value.isfinite().all() for value in answer.values())
    assert read_weights(tmp_path / "one")["norm.running_var"].min() > 0


class Tables(nn.Module):
    """Two embedding tables, one of them indexed through views, and an integer that indexes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 4)
        self.places = nn.Embedding(7, 4)

    def forward(self, ids: torch.Tensor, places: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return self.words(ids) + self.places(places[:, 1:].to(torch.int64).unsqueeze(0)[0]) * factor

    def both(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(ids) + self.places(ids)


def test_bounds_of_what_indexes_a_table(tmp_path: Path) -> None:
    rows = Dim("rows", max=9)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    inputs = (ids, torch.zeros(2, 4, dtype=torch.int32), ids[0, 0])
    shapes = {"ids": {0: rows}, "places": {0: rows}, "factor": None}
    methods = {"forward": MethodSpec("forward", inputs, {}, shapes), "both": MethodSpec("both", (ids,))}
    artifact = export(Tables().eval(), out=tmp_path / "a", methods=methods)
    assert index_bounds(artifact, "forward") == {"ids": 30, "places": 7}
    assert index_bounds(artifact, "both") == {"ids": 7}
