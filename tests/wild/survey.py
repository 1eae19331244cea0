"""What happens to a model type of transformers: whether its inputs are found, and whether an export equals eager."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from tests.support.setups import equal
from tests.wild.tiny import tiny
from weightswap_exporter import pack
from weightswap_exporter.commands.hf_directory import directory_model, export_directory
from weightswap_exporter.commands.hf_inputs import describe, sample_inputs
from weightswap_runtime import CaptureError, ExportError, OutOfMemory, Unsupported, WeightswapError, load

_MEMORY = 10 << 30
_SECONDS_FOR_SIZES = 12

EQUAL = "equal"
TRACED = "equal to torch.export"
FOUND = "inputs found"
REFUSED = "not exported"
LARGE = "too large"
UNKNOWN = "inputs not found"
UNBUILT = "not built"
SLOW = "too slow"
BROKEN = "broken"


class Outcome(NamedTuple):
    """What became of a type, what it was called with, and why it went no further."""

    what: str
    inputs: str = ""
    reason: str = ""


def model_types() -> list[str]:
    """The types that transformers' AutoModel has."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)


def warm() -> None:
    """Import what most types need, so that children need not."""
    for name in ("bert", "clip", "llama", "wav2vec2", "whisper"):
        import_module(f"transformers.models.{name}.modeling_{name}")
    model_types()


def survey(model_type: str, *, exporting: bool, seconds: int) -> Outcome:
    """What becomes of a type in a child process; seconds: of its processor time."""
    return guarded_child(lambda: _survey(model_type, exporting), seconds)


def guarded_child(work: Callable[[], Outcome], seconds: int) -> Outcome:
    """What some work finds in a child process, of which nothing stays; seconds: of its processor time."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        os.write(writer, pickle.dumps(_guarded(work)))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        found = pipe.read()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return Outcome(SLOW, reason=f"more than {seconds} s of processor time")
    outcome: Outcome = pickle.loads(found) if found else Outcome(BROKEN, reason=f"died with status {status}")
    return outcome


def _guarded(work: Callable[[], Outcome]) -> Outcome:
    """Whatever is raised that nobody has named."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        return work()
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}, line {place.lineno}"
        return Outcome(BROKEN, reason=f"{type(error).__name__} ({where}): {error}")


def _survey(model_type: str, exporting: bool) -> Outcome:
    with TemporaryDirectory() as name:
        folder = Path(name)
        found = _smallest(model_type, folder)
        if isinstance(found, Outcome):
            return found
        model, inputs = found
        if not exporting:
            return Outcome(FOUND, describe(inputs))
        try:
            return Outcome(_comparison(model, inputs, folder), describe(inputs))
        except (CaptureError, Unsupported) as error:
            return Outcome(REFUSED, describe(inputs), str(error))
        except OutOfMemory as error:
            return Outcome(LARGE, describe(inputs), str(error))
        except ExportError as error:  # eager took them once by chance
            return Outcome(UNKNOWN, reason=str(error))


def _smallest(model_type: str, folder: Path) -> tuple[Any, dict[str, Any]] | Outcome:
    """The smallest of the type's models that can be built and called, with its inputs."""
    unbuilt, unknown = Outcome(UNBUILT, reason="has no default configuration"), None
    start = time.process_time()
    for config in _configurations(model_type):
        (folder / "config.json").write_text(json.dumps(config))
        torch.manual_seed(0)
        try:
            model = directory_model(folder, hollow=False)
        except (WeightswapError, MemoryError) as error:
            unbuilt = Outcome(UNBUILT, reason=re.sub(rf"{folder}\S* ", "", str(error)))
            continue
        try:
            return model, sample_inputs(model).kwargs
        except Unsupported as error:
            unknown = Outcome(UNKNOWN, reason=str(error))
        if "is not known here" in unknown.reason or time.process_time() - start > _SECONDS_FOR_SIZES:
            break
    return unknown or unbuilt


def _configurations(model_type: str) -> Iterator[dict[str, Any]]:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    names = MODEL_MAPPING_NAMES[model_type]
    architecture = names if isinstance(names, str) else names[0]
    return tiny(CONFIG_MAPPING[model_type]().to_dict() | {"architectures": [architecture]})


def _comparison(model: Any, inputs: dict[str, Any], folder: Path) -> str:
    """How the served outputs compare; a model may compute in another way while torch captures it."""
    artifact = export_directory(folder, out=folder / "a.artifact")
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor), alpha=0.01)
        served = load(artifact, pack(model, artifact, out=folder / "w.safetensors").path)
        values = {name: torch.randn_like(x) if x.is_floating_point() else x for name, x in inputs.items()}
        found = _seeded(served, values)
        if equal(found, plain(_seeded(model, values))):
            return EQUAL
        traced = torch.export.export(model, (), values, strict=False).module()
        return TRACED if equal(found, plain(_seeded(traced, values))) else BROKEN


def _seeded(call: Callable[..., Any], values: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    return call(**values)


def plain(value: Any) -> Any:
    """Outputs as a server gives them, which knows no classes of the library."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value)) if type(value) in (list, tuple) else tuple(map(plain, value))
    return value
