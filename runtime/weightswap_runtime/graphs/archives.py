"""What a graph's archive may hold, checked before torch opens it.

`torch.export.load` unpickles some records and evaluates some texts. An artifact has neither, whoever wrote it.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from weightswap_runtime.errors import ArtifactError

_MEMBER = re.compile(
    r"[^/]+/(models/model\.json|data/(weights/model_weights|constants/model_constants)_config\.json"
    r"|archive_format|archive_version|byteorder|\.data/version|\.data/serialization_id)"
)
_EMPTY = re.compile(r"[^/]+/data/(weights/weight_\d+|constants/tensor_\d+|sample_inputs/model\.pt)")
_RECORD = re.compile(r"(weight|tensor)_\d+")
_SYMBOL = re.compile(r"'(?:[a-z]{1,4}\d+|[-+.\deE]+)'")
_EXPRESSION = re.compile(r"[\w.+\-*/%(),<>=&|~ ]*")
_NAME = re.compile(
    r"[a-z]{1,4}\d+|Symbol|Integer|Rational|Float|precision|positive|nonnegative|integer|Add|Mul|Pow|Max|Min|Mod|Abs"
    r"|True|False|true|false|int_oo|oo|Equality|Unequality|(Strict)?(Less|Greater)Than|Eq|Ne|Lt|Le|Gt|Ge|And|Or|Not"
    r"|(Ceil|Floor|Trunc)To(Float|Int)|ToFloat|RoundToInt|RoundDecimal|FloorDiv|CeilDiv|CleanDiv|(Int|Float)TrueDiv"
    r"|ModularIndexing|PythonMod|PowByNatural|FloatPow|LShift|RShift|Where|Identity|Piecewise|floor|ceiling"
)
_POWER = re.compile(r"\*\*|<<|\b(?:Pow|PowByNatural|LShift)\(")  # of floats no power is large
_SMALL_EXPONENT = re.compile(r" *(?:Integer\()?-?\d{1,2}\)* *")
MOST_POWERS = 3
_WORD = re.compile(r"[A-Za-z_]\w*")
MOST_CHARACTERS = 10_000


def check_archive(raw: bytes, where: str) -> None:
    """Raises ArtifactError for an archive with a record that would be unpickled, or a text that would run."""
    _check(raw, where, lambda archive: [*_record_problems(archive), *_text_problems(archive)])


def check_records(raw: bytes, where: str) -> None:
    """Raises ArtifactError for an archive with a record that would be unpickled, or that has no place in it."""
    _check(raw, where, _record_problems)


def _check(raw: bytes, where: str, find: Callable[[zipfile.ZipFile], Iterable[str]]) -> None:
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            problems = list(find(archive))
    except Exception as error:  # what a zip or JSON reader raises for bytes that somebody made up
        raise ArtifactError(f"{where}: not an archive that torch.export writes ({error})") from error
    if problems:
        raise ArtifactError(f"{where}: {'; '.join(problems[:5])}. Export the artifact again.")


def functions(raw: bytes) -> set[str]:
    """What an archive's graphs call, as `torch.ops.NAMESPACE.NAME.OVERLOAD`. It was checked before."""
    return set(calls(raw))


def calls(raw: bytes) -> Counter[str]:
    """The same, with how often it is called."""
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        models = [json.loads(archive.read(name)) for name in archive.namelist() if name.endswith("/models/model.json")]
    return Counter(target for model in models for target in _targets(model))


def _targets(value: Any) -> Iterator[str]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        yield from _targets(item)
    if isinstance(value, dict):
        if isinstance(value.get("target"), str) and "inputs" in value:
            yield value["target"]
        if isinstance(value.get("as_operator"), str):
            yield value["as_operator"]


def _record_problems(archive: zipfile.ZipFile) -> Iterator[str]:
    members = archive.infolist()
    if len({info.filename for info in members}) != len(members):
        yield "two records have one name"
    elif any(info.compress_type != zipfile.ZIP_STORED for info in members):
        yield "its records are compressed"
    else:
        yield from _member_problems(archive)


def _member_problems(archive: zipfile.ZipFile) -> Iterator[str]:
    for info in archive.infolist():
        if _EMPTY.fullmatch(info.filename):
            if info.file_size:
                yield f"the record {info.filename!r} must be empty"
        elif not _MEMBER.fullmatch(info.filename):
            yield f"the record {info.filename!r} has no place in an artifact"
        elif info.filename.endswith("_config.json"):
            yield from _config_problems(json.loads(archive.read(info)))


def _text_problems(archive: zipfile.ZipFile) -> Iterator[str]:
    for name in archive.namelist():
        if name.endswith("/models/model.json"):
            yield from (f"the text {text!r} is not a size" for text in _texts(json.loads(archive.read(name))))


def _config_problems(config: dict[str, Any]) -> Iterator[str]:
    for name, entry in config["config"].items():
        if entry["use_pickle"] is not False or not _RECORD.fullmatch(entry["path_name"]):
            yield f"the record of {name!r} would be unpickled"


def _texts(value: Any) -> Iterator[str]:
    """Expressions that are not integer arithmetic over symbols and torch's own functions."""
    if isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key == "expr_str" and isinstance(item, str):
                if not is_size(item):
                    yield item[:80]
            else:
                yield from _texts(item)


def is_size(text: str) -> bool:
    """Whether a text is arithmetic over torch's symbols and functions, and so harmless to evaluate."""
    plain = _SYMBOL.sub("", text)
    return (
        len(text) < MOST_CHARACTERS
        and _has_small_powers(plain)
        and _EXPRESSION.fullmatch(plain) is not None
        and all(_NAME.fullmatch(word) for word in _WORD.findall(plain))
    )


def _has_small_powers(text: str) -> bool:
    """Whether no power is one of another: evaluating a tower of them would take for ever."""
    found = list(_POWER.finditer(text))
    return len(found) <= MOST_POWERS and all(_SMALL_EXPONENT.fullmatch(_exponent(text, power)) for power in found)


def _exponent(text: str, power: re.Match[str]) -> str:
    """What follows an operator up to the next one, or the last argument of a function."""
    if power[0] in ("**", "<<"):
        return re.split(r"[+\-/%,<>=&|]|\*(?!\*)", text[power.end() :].lstrip(), maxsplit=1)[0]
    depth, end = 1, power.end()
    while depth and end < len(text):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        end += 1
    inner = text[power.end() : end - 1]
    return "" if _POWER.search(inner) else inner.rpartition(",")[2]
