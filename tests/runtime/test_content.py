"""Tensors as dtype, shape and bytes: in numpy, in the engines, and in the files of `weightswap run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from weightswap_runtime import InputMismatch, Unsupported, WeightFileError
from weightswap_runtime.engines.onnx import DTYPE_NAMES, OnnxEngine, content_of
from weightswap_runtime.engines.onnx_names import ELEMENTS
from weightswap_runtime.engines.torch_cpu import TorchEngine
from weightswap_runtime.format.signature import Integer, Signature
from weightswap_runtime.tensors import DTYPES, TORCH_NAMES, TensorBytes, array_content, as_array, is_numpys, numpy_dtype
from weightswap_runtime.torch_tensors import tensor_bytes
from weightswap_tools.inputs import named_inputs, read_tensors, write_tensors

every_dtype = pytest.mark.parametrize("name", TORCH_NAMES)


def tensors_of(name: str) -> dict[str, torch.Tensor]:
    dtype = getattr(torch, name)
    some = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 4.0]]).to(dtype)
    return {"some": some, "turned": some.t(), "one": some[0, 2], "none": some[:0], "cut": some[:, 1:2]}


def contents_of(name: str) -> dict[str, TensorBytes]:
    return {key: TorchEngine.content(tensor) for key, tensor in tensors_of(name).items()}


@every_dtype
def test_torch_tensors_go_out_and_come_back(name: str) -> None:
    for key, content in contents_of(name).items():
        tensor = TorchEngine.tensor(content._replace(data=memoryview(bytes(content.data))))
        expected = tensors_of(name)[key]
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        assert TorchEngine.content(tensor) == content


def test_bytes_are_a_tensors_memory_and_keep_it() -> None:
    tensor, none = torch.arange(3.0), torch.zeros(0)
    content, (place, empty) = TorchEngine.content(tensor), map(tensor_bytes, (torch.full((9,), 7.0), none))
    tensor[1] = 5
    assert as_array(content).tolist() == [0, 5, 2]
    assert not content.data.readonly
    assert empty.tobytes() == b""
    assert torch.frombuffer(place, dtype=torch.float32).tolist() == [7] * 9
    assert all(each.untyped_storage().resizable() for each in (tensor, none))


def test_tensors_without_memory_have_no_bytes() -> None:
    with FakeTensorMode():
        hollow = torch.zeros(3)
    for each in (hollow, TwoTensor(torch.zeros(3), torch.zeros(3)), torch._efficientzerotensor(3)):
        with pytest.raises(RuntimeError, match="numpy"):
            tensor_bytes(each)


def test_what_torch_or_files_lack_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match=r"torch\.complex128 is not a dtype of the safetensors format"):
        TorchEngine.content(torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(Unsupported, match=r"dtype F4: torch .* has no such type"):
        TorchEngine.tensor(TensorBytes("F4", (2,), memoryview(b"x")))


@every_dtype
def test_arrays_go_out_and_come_back(name: str) -> None:
    lacks_zero = name == "float8_e8m0fnu"
    some = (np.array([[1, 0, 2], [0, 1, 4]]) + lacks_zero).astype(numpy_dtype(TORCH_NAMES[name]))
    for array in (
        some,
        some.T,
        some[0, 2:].reshape(()),
        some[:0],
        some[:, 1:2],
        some.astype(some.dtype.newbyteorder()),
    ):
        content = array_content(array)
        assert (content.dtype, content.shape) == (TORCH_NAMES[name], array.shape)
        assert bytes(content.data) == array.astype(some.dtype).tobytes()
        back = as_array(content)
        assert back.dtype == some.dtype
        assert hash(back.dtype) == hash(some.dtype)
        assert np.array_equal(back, array)
    assert np.shares_memory(as_array(array_content(some)), some)


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_arrays_of_the_engine_onnx_go_out_and_come_back(dtype: str) -> None:
    for content in contents_of(str(DTYPES[dtype].torch)).values():
        array = OnnxEngine.tensor(content._replace(data=memoryview(bytes(content.data))))
        assert (DTYPE_NAMES[array.dtype], array.shape) == (dtype, content.shape)
        assert array.flags.writeable
        assert content_of(array) == content
        assert content_of(array.T).shape == content.shape[::-1]
    with pytest.raises(Unsupported, match=r"numpy's complex64: expected one of BOOL, U8, "):
        content_of(np.zeros(2, np.complex64))
    with pytest.raises(Unsupported, match="dtype C64: ONNX Runtime has no such type"):
        OnnxEngine.tensor(TensorBytes("C64", (1,), memoryview(bytes(8))))


@every_dtype
def test_every_dtype_is_kept_in_safetensors_files(name: str, tmp_path: Path) -> None:
    path, contents = tmp_path / "out.safetensors", contents_of(name)
    write_tensors(path, contents)
    assert read_tensors(path) == contents
    for key, tensor in safetensors.torch.load_file(path).items():
        assert TorchEngine.content(tensor) == contents[key]


@every_dtype
def test_npz_files_keep_what_numpy_has_and_refuse_the_rest_by_name(name: str, tmp_path: Path) -> None:
    path, contents = tmp_path / "out.npz", contents_of(name)
    dtype = TORCH_NAMES[name]
    if not is_numpys(dtype):
        with pytest.raises(Unsupported, match=rf"some: numpy has no {dtype}; write a .safetensors file"):
            write_tensors(path, contents)
        assert not path.exists()
        return
    write_tensors(path, contents)
    assert read_tensors(path) == contents


def test_npz_files_keep_tensors_of_any_name(tmp_path: Path) -> None:
    contents = {name: array_content(np.ones(2, "f4")) for name in ("file", "allow_pickle", "args", "a/b.npy")}
    write_tensors(tmp_path / "out.npz", contents)
    assert read_tensors(tmp_path / "out.npz") == contents


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.zeros(2, np.complex128), "x: numpy's complex128 is not a dtype of the safetensors format"),
        (np.array(["text"]), "x: numpy's <U4 is not a dtype of the safetensors format"),
        (np.array([None]), "cannot be read (Object arrays cannot be loaded"),
    ],
)
def test_arrays_that_are_no_tensors_are_refused(array: Any, says: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", x=array)
    with pytest.raises(WeightFileError) as refused:
        read_tensors(tmp_path / "in.npz")
    assert str(refused.value).startswith(f"{tmp_path / 'in.npz'}: {says}")


def test_an_integer_is_one_element_of_an_integer_type() -> None:
    number = Integer(name="n", value="n")
    signature = Signature(args=(("n", number),), kwargs=(), output=number, dims={})
    for dtype in ("int64", "uint8", "bool"):
        assert named_inputs("forward", signature, {"n": array_content(np.ones((1, 1), dtype))}) == [1]
    for array, found in ((np.ones(2, "i8"), r"I64\[2\]"), (np.ones((), "f4"), r"F32\[\]")):
        with pytest.raises(InputMismatch, match=rf"forward: n: expected one integer, got {found}"):
            named_inputs("forward", signature, {"n": array_content(array)})
