"""Checks of the records in a graph's archive. torch would unpickle some kinds, which an artifact must not have."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

from weightswap_runtime.errors import ArtifactError
from weightswap_runtime.messages import listed

_MEMBER = re.compile(
    r"[\w.-]+/(models/model\.json|data/(weights/model_weights|constants/model_constants)_config\.json"
    r"|archive_format|archive_version|byteorder|\.data/version|\.data/serialization_id)"
)
_EMPTY = re.compile(r"[\w.-]+/data/(weights/weight_\d+|constants/tensor_\d+|sample_inputs/model\.pt)")
_RECORD = re.compile(r"(weight|tensor)_\d+")


def check_records(raw: bytes, where: str) -> None:
    """Raise ArtifactError if an archive has a record that would be unpickled or does not belong in it."""
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            problems = list(_record_problems(archive, len(raw)))
    except Exception as error:  # zip and JSON readers raise many types for crafted bytes
        raise ArtifactError(f"{where}: not an archive written by torch.export ({error})") from error
    if problems:
        raise ArtifactError(f"{where}: {listed(problems, between='; ')}. Export the artifact again.")


def calls(raw: bytes) -> Counter[str]:
    """Count the calls in the graphs of a checked archive by target, `torch.ops.NAMESPACE.NAME.OVERLOAD`."""
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        models = [json.loads(archive.read(name)) for name in archive.namelist() if name.endswith("/models/model.json")]
    return Counter(target for model in models for target in _targets(model))


def _targets(value: Any) -> Iterator[str]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        yield from _targets(item)
    if isinstance(value, dict) and isinstance(value.get("target"), str) and "inputs" in value:
        yield value["target"]


def _record_problems(archive: zipfile.ZipFile, size: int) -> Iterator[str]:
    members = archive.infolist()
    if len({info.filename for info in members}) != len(members):
        yield "two records have the same name"
    elif len({info.filename.partition("/")[0] for info in members}) > 1:
        yield "its records are in several folders"
    elif any(info.compress_type != zipfile.ZIP_STORED for info in members):
        yield "its records are compressed"
    elif sum(info.file_size for info in members) > size:
        yield "its records overlap"
    else:
        yield from _member_problems(archive)


def _member_problems(archive: zipfile.ZipFile) -> Iterator[str]:
    for info in archive.infolist():
        if _EMPTY.fullmatch(info.filename):
            if info.file_size:
                yield f"the record {info.filename!r} must be empty"
        elif not _MEMBER.fullmatch(info.filename):
            yield f"the record {info.filename!r} does not belong in an artifact"
        elif info.filename.endswith("_config.json"):
            yield from _config_problems(json.loads(archive.read(info)))


def _config_problems(config: dict[str, Any]) -> Iterator[str]:
    for name, entry in config["config"].items():
        if entry["use_pickle"] is not False or not _RECORD.fullmatch(entry["path_name"]):
            yield f"the record of {name!r} would be unpickled"
