"""The public modules, and the few modules that importing them loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

import weightswap_exporter
import weightswap_runtime
from tests.support.tiny import WriteWeights
from weightswap_runtime import errors


def test_all_is_what_the_runtime_offers() -> None:
    offered = {
        name for name, value in vars(weightswap_runtime).items() if not name.startswith("_") and not is_module(value)
    }
    assert sorted(offered | {"__version__"}) == sorted(weightswap_runtime.__all__)


def test_all_is_what_the_exporter_offers() -> None:
    assert sorted(weightswap_exporter._HOMES) == sorted(set(weightswap_exporter.__all__) - {"__version__"})
    assert all(getattr(weightswap_exporter, name) is not None for name in weightswap_exporter.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        weightswap_exporter.nothing  # noqa: B018


def test_every_error_is_in_the_family_and_in_the_drawing() -> None:
    assert errors.__doc__ is not None
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.WeightswapError)
        assert name in errors.__doc__
        assert name in weightswap_runtime.__all__


def is_module(value: object) -> bool:
    return type(value) is type(sys)


def imported_by(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


HEAVY = {"torch", "sympy", "onnxruntime", "safetensors", "weightswap_exporter"}
STEPS = """
import sys

def tell():
    print(*({heavy} & {{name for name, module in sys.modules.items() if module is not None}}))

import weightswap_runtime
tell()
from weightswap_runtime.following.directory import open_directory
from weightswap_runtime.format.weight_set import open_weights
open_weights({path!r})
open_directory(".")()
tell()
sys.modules["torch"] = None
import weightswap_runtime.staging.golden_check, weightswap_tools.commands.run
tell()
try:
    import weightswap_runtime.engines.torch_cpu
except weightswap_runtime.MissingExtra as error:
    print(error)
from weightswap_tools.program import main
sys.argv = ["weightswap", "export", "x.py:f", "-o", "x"]
main()
"""


@pytest.mark.slow
def test_packing_and_publishing_bring_in_no_compiler() -> None:
    code = "from weightswap_exporter import pack, publish\nfrom weightswap_exporter.commands.build import pack_command"
    assert not {"sympy", "torch._dynamo"} & imported_by(code)


@pytest.mark.slow
def test_listing_the_commands_brings_in_no_torch() -> None:
    code = "sys.argv = ['weightswap', '--help']\nimport atexit\nfrom weightswap_tools.program import main\n"
    code += "try:\n    main()\nexcept SystemExit:\n    pass"
    assert not (HEAVY - {"weightswap_exporter"}) & imported_by(code)


def test_what_needs_no_torch_brings_in_little_and_what_needs_it_names_the_extra(weight_file: WriteWeights) -> None:
    """The import of the library, local files, verifying and running; then the engine `torch` and an export."""
    heavy = HEAVY | {"fsspec", "aiohttp", "weightswap_runtime.sources.remote"}
    code = STEPS.format(heavy=heavy, path=str(weight_file(1)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    imported, opened, verified, engine = done.stdout.splitlines()
    assert (imported, opened, verified) == ("", "", "")
    assert "pip install 'weightswap[torch]'" in engine
    assert (done.returncode, done.stderr) == (
        2,
        "MissingExtra: the build side needs the extra `export`: pip install 'weightswap[export]'\n",
    )


def test_loading_and_calling_brings_in_no_exporter() -> None:
    assert "weightswap_exporter" not in imported_by("import weightswap_runtime.engines.torch_cpu")
