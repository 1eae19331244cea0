"""Documents of some size that are small in no other way: each place of a valid one is blown up in each way."""

from __future__ import annotations

import argparse
import copy
import gc
import json
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path as File
from typing import Any, NamedTuple

import numpy as np

from tests.fuzzing.subjects import Readers
from tests.support.varied import small_blocks
from weightswap_runtime import WeightswapError
from weightswap_runtime.format import model_config
from weightswap_runtime.format.canonical import canonical_order, pack_ranges, render_header
from weightswap_runtime.format.context_file import ContextStamp, read_context
from weightswap_runtime.format.delta import DELTA_KEY
from weightswap_runtime.format.goldens import Case, encode_goldens, goldens_beside
from weightswap_runtime.format.peft import read_config
from weightswap_runtime.format.safetensors import METADATA_KEY
from weightswap_runtime.format.weight_set import PEFT_CONFIG_NAME
from weightswap_runtime.tensors import array_content, digest_of
from weightswap_server.admin.app import CHANGES, staging_of
from weightswap_server.admin.documents import LoadRequest
from weightswap_server.methods import ServedMethod
from weightswap_server.protocol import GenerateRequest, decoded, read_request

Json = Any
Path = tuple[str | int, ...]
_HERE = "<here>"


def _filled(unit: str, opening: str = "[", closing: str = "]") -> Callable[[int], str]:
    """Return a maker of a container with as many units, separated by commas, as have room."""
    return lambda size: opening + ",".join([unit] * (size // (len(unit) + 1))) + closing


def _keys(value: str) -> Callable[[int], str]:
    return lambda size: "{" + ",".join(f'"{i:x}":{value}' for i in range(size // (len(value) + 8))) + "}"


TEXTS: dict[str, Callable[[int], str]] = {
    "zeros": _filled("0"),
    "large numbers": _filled("9007199254740993"),
    "fractions": _filled("0.1"),
    "lists": _filled("[]"),
    "nested lists": _filled("[[]]"),
    "objects": _filled("{}"),
    "strings": _filled('""'),
    "nulls": _filled("null"),
    "keys": _keys("0"),
    "keys of strings": _keys('""'),
    "keys of lists": _keys("[]"),
    "one key": _filled('"":0', "{", "}"),
    "deep lists": lambda size: "[" * (size // 2) + "]" * (size // 2),
    "deep objects": lambda size: '{"":' * (size // 5) + "0" + "}" * (size // 5),
    "digits": lambda size: "9" * size,
    "a small fraction": lambda size: "0." + "0" * size + "1",
    "spaces": lambda size: " " * size + "0",
    "a long string": lambda size: f'"{"a" * size}"',
    "escapes": lambda size: '"' + "\\n" * (size // 2) + '"',
    "code points": lambda size: '"' + "\\u20ac" * (size // 6) + '"',
    "brackets": lambda size: '"' + "([{" * (size // 3) + '"',
    "letters and dots": lambda size: '"' + "a." * (size // 2) + '"',
    "sums": lambda size: '"' + "+".join(["batch"] * (size // 6)) + '"',
}


def bombs(document: Json, size: int) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield names and makers of documents of about so many bytes, each with one place blown up."""
    seen: set[Path] = set()
    for path, value in _places(document, ()):
        kind = tuple("*" if isinstance(key, int) else key for key in path)
        if kind in seen:
            continue
        seen.add(kind)
        where = ".".join(map(str, kind)) or "all"
        if value and isinstance(value, dict | list):
            yield (
                f"{where}: repeated",
                lambda path=path, value=value: json.dumps(_replaced(document, path, _repeated(value, size))),
            )
        before, after = json.dumps(_replaced(document, path, _HERE)).split(json.dumps(_HERE))
        for name, text in TEXTS.items():
            yield (
                f"{where}: {name}",
                lambda before=before, text=text, after=after: before + text(size) + after,
            )


def _places(value: Json, path: Path) -> Iterator[tuple[Path, Json]]:
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*path, key))


def _replaced(document: Json, path: Path, value: Json) -> Json:
    if not path:
        return value
    changed = copy.copy(document)
    changed[path[0]] = _replaced(document[path[0]], path[1:], value)
    return changed


def _repeated(value: Json, size: int) -> Json:
    """Return a list with its items again and again, or an object with its last value under many names."""
    if isinstance(value, list):
        return value * max(1, size // (len(json.dumps(value)) + 1))
    last = list(value)[-1]
    count = size // (len(json.dumps(value[last])) + len(last) + 12)
    return {**value, **{f"{last}.{i}": value[last] for i in range(count)}}


def weight_bombs(raw: bytes, size: int) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield names and makers of safetensors files: the header blown up, or the stamp in it."""
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]

    def file(make: Callable[[], str]) -> bytes:
        text = make().encode()
        return struct.pack("<Q", len(text)) + text + data

    for name, make in bombs(header, size):
        yield name, partial(file, make)
    key = next((key for key in (METADATA_KEY, DELTA_KEY) if key in header.get("__metadata__", {})), None)
    for name, make in bombs(json.loads(header["__metadata__"][key]), size // 2) if key else ():

        def stamped(make: Callable[[], str] = make) -> str:
            return json.dumps(_replaced(header, ("__metadata__", key or ""), make()))

        yield f"stamp {name}", partial(file, stamped)


class Reader(NamedTuple):
    """`read` takes the content of a file or a request; `bombs` yields names and makers of such contents."""

    name: str
    read: Callable[[bytes], object]
    bombs: Callable[[int], Iterator[tuple[str, Callable[[], bytes]]]]


def _of(document: Json) -> Callable[[int], Iterator[tuple[str, Callable[[], bytes]]]]:
    return lambda size: (
        (name, lambda make=make: make().encode())
        for name, make in bombs(document, size)  # type: ignore[misc]
    )


def readers(folder: File) -> Iterator[Reader]:
    """Yield the readers of files and of requests."""
    fuzzed = Readers(folder)
    for subject in fuzzed.subjects:
        if subject.name in ("weights", "delta"):
            yield Reader(subject.name, subject.read, partial(weight_bombs, subject.seeds[0]))
        elif subject.name in ("index", "manifest", "graph"):
            yield Reader(subject.name, subject.read, _of(json.loads(subject.seeds[0])))
    model, manifest = fuzzed.models[0], fuzzed.tiny.manifest
    yield _goldens(folder, manifest)
    yield _context(folder, manifest)
    config = {"peft_type": "LORA", "r": 4, "target_modules": ["a"], "rank_pattern": {"a": 4}, "alpha_pattern": {"b": 2}}
    yield Reader("config", _written(folder / PEFT_CONFIG_NAME, lambda: read_config(folder)), _of(config))
    yield _model_config()
    method = ServedMethod(model, "forward")
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1.0, 2.0, 3.0], "parameters": {"a": 1}}
    call = {"id": "", "inputs": [tensor], "outputs": [{"name": "output", "parameters": {}}], "parameters": {"a": ""}}
    yield Reader("call", lambda raw: read_request(raw, None, method.arguments), _of(call))
    prompt = {"text_input": "a", "input_ids": [1], "id": "", "parameters": {"stop": ["a", 1], "seed": 1, "variant": ""}}
    yield Reader("generate", lambda raw: decoded(raw, GenerateRequest), _of(prompt))
    for name in ("stage", "canary", "follow"):
        document = {
            "source": "a",
            "why": "",
            "expect": "",
            "labels": {"a": "b"},
            "share": 0.1,
            "desired_store": "p",
            "by": "",
        }
        yield Reader(name, partial(decoded, kind=CHANGES[name][0]), _of(document))
    load = {"parameters": {"config": "{}", "weights": "a"}}
    yield Reader("load", lambda raw: staging_of(decoded(raw, LoadRequest)), _of(load))


def _written(path: File, read: Callable[[], object]) -> Callable[[bytes], object]:
    def write(raw: bytes) -> object:
        path.write_bytes(raw)
        return read()

    return write


def _model_config() -> Reader:
    rope = {"rope_type": "default", "rope_theta": 1e4, "factors": [1.0]}
    document = {"model_type": "a", "hidden_act": "silu", "rms_norm_eps": 1e-6, "layer_types": ["a"]}
    document |= {"rope_parameters": rope, "text_config": {"model_type": "a", "num_heads": 4}, "n": {"__float__": "inf"}}
    ours = model_config.read_config(json.dumps(document).encode(), "ours")

    def compare(raw: bytes) -> object:
        return model_config.config_problems(ours, model_config.read_config(raw, "theirs"))

    return Reader("model config", compare, _of(document))


def _goldens(folder: File, manifest: Any) -> Reader:
    values = {"x": array_content(np.zeros((2, 3), np.float32)), "y": array_content(np.zeros((2, 5), np.float32))}
    raw = encode_goldens(
        [Case(method="forward", inputs=("x",), outputs=("y",))], values,
        graph_id=manifest.graph_id, weights_id=None, environment=None, tolerance=None,
    )  # fmt: skip
    weights = folder / "recorded.safetensors"
    read = _written(folder / "recorded.goldens.safetensors", lambda: goldens_beside(weights, manifest))
    return Reader("goldens", read, partial(weight_bombs, raw))


def _context(folder: File, manifest: Any) -> Reader:
    rows = manifest.weights
    order = canonical_order(row.row for row in rows)
    ranges, zeros = pack_ranges(order), {row.name: bytes(row.nbytes) for row in rows}
    digests = {name: digest_of([memoryview(data)]) for name, data in zeros.items()}
    stamp = ContextStamp(context_version=1, graph_id=manifest.graph_id, weights_id=None, digests=digests)
    metadata = {
        METADATA_KEY: json.dumps(
            {name: getattr(stamp, name) for name in ("context_version", "graph_id", "weights_id", "digests")}
        )
    }
    raw = render_header(ranges, metadata) + b"".join(zeros[row.name] for row in order)
    path = folder / "context.safetensors"
    return Reader("context", _written(path, lambda: read_context(path, rows)), partial(weight_bombs, raw))


class Watch:
    """The longest time for which this thread did not run, while the main thread reads."""

    def __init__(self) -> None:
        self.begin()
        threading.Thread(target=self._tick, daemon=True).start()

    def begin(self) -> None:
        self.longest, self._last = 0.0, time.perf_counter()

    def _tick(self) -> None:
        while True:
            time.sleep(0.001)
            now = time.perf_counter()
            self.longest, self._last = max(self.longest, now - self._last), now


def resident(field: str) -> int:
    """Return a size of this process's memory in bytes."""
    lines = File("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def read_all(reader: Reader, size: int, every: int, watch: Watch) -> dict[str, Any]:
    """Give a reader its bombs; return how many it accepted, and what took most of each, with the bomb's name."""
    count = accepted = 0
    most = {"seconds": (0.0, ""), "bytes": (0.0, ""), "stopped": (0.0, "")}
    for name, make in reader.bombs(size):
        count += 1
        if count % every:
            continue
        raw = make()
        File("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        time.sleep(0.002)  # the other thread has its turn
        watch.begin()
        before, began = resident("VmRSS"), time.process_time()
        said = ""
        try:
            reader.read(raw)
            accepted += 1
        except WeightswapError as error:
            said = str(error)
        except BaseException as error:
            raise AssertionError(f"{reader.name}: {name}: {error!r}") from error
        assert len(said) < 10_000, (reader.name, name, len(said))
        seconds = time.process_time() - began
        found = {"seconds": seconds, "bytes": resident("VmHWM") - before, "stopped": watch.longest}
        most = {key: max(most[key], (float(value), name)) for key, value in found.items()}
    return {"reader": reader.name, "bombs": count, "accepted": accepted, **most}


def main() -> None:
    """Print a line of JSON for each reader."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bytes", type=int, help="of each bomb, about")
    parser.add_argument("--every", type=int, default=1, help="read one of so many")
    parser.add_argument("--only", default="", help="the name of a reader")
    options = parser.parse_args()
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder, small_blocks(16):
        made = list(readers(File(folder)))
        gc.collect()
        gc.freeze()  # or the collector would look at all of torch's objects, and stop the other thread
        for reader in made:
            if options.only in ("", reader.name):
                print(json.dumps(read_all(reader, options.bytes, options.every, watch)), flush=True)


if __name__ == "__main__":
    main()
