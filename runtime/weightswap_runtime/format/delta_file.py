"""Delta files: the parts of a weight file that differ from another, as plain safetensors.

Each weight that differs has two tensors. `runs:<FQN>`, int64 of shape [runs, 2], has the byte ranges (begin, end) of
the row-major weight that are replaced, sorted and disjoint. `data:<FQN>`, uint8, has their new bytes, end to end.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from weightswap_runtime.errors import DamagedFile
from weightswap_runtime.messages import listed
from weightswap_runtime.tensors.digests import DIGEST
from weightswap_runtime.tensors.dtypes import TensorType, describe, is_valid

from .weight_file import label_problem
from .weight_set import WeightSet

DELTA_KEY = "weightswap_delta"
DATA, RUNS = "data:", "runs:"
_AGAIN = "Write the delta again, or copy it again."


class DeltaStamp(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a delta file: the weights ids before (`base`) and after it, and the graph id.

    `changes` maps the FQNs of the changed weights to their types. `digests` maps the names of the file's tensors to
    their digests.
    """

    graph_id: str
    base: str
    weights_id: str
    changes: dict[str, TensorType]
    digests: dict[str, str]
    labels: dict[str, str] = {}


def delta_stamp(weights: WeightSet) -> DeltaStamp | None:
    """Return the stamp of a delta file; None for other files. Raises DamagedFile."""
    text = weights.metadata.get(DELTA_KEY)
    if text is None:
        return None
    try:
        stamp = msgspec.json.decode(text, type=DeltaStamp)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise DamagedFile(f"{weights.where}: its `{DELTA_KEY}` metadata cannot be read ({error}). {_AGAIN}") from error
    if problem := label_problem(stamp.labels):
        raise DamagedFile(f"{weights.where}: {problem}")
    if problems := list(_problems(stamp, weights)):
        raise DamagedFile(f"{weights.where}: contradicts itself: {listed(problems, between='; ')}. {_AGAIN}")
    return stamp


def _problems(stamp: DeltaStamp, weights: WeightSet) -> Iterator[str]:
    texts = (stamp.graph_id, stamp.base, stamp.weights_id, *stamp.digests.values())
    if not all(DIGEST.fullmatch(text) for text in texts):
        yield "an id or a digest does not have 64 hexadecimal digits"
    expected = {prefix + name for name in stamp.changes for prefix in (DATA, RUNS)}
    if expected != weights.tensors.keys() or expected != stamp.digests.keys():
        yield "its tensors do not match the weights that it claims to change"
        return
    for name, changed in stamp.changes.items():
        data, runs = weights.tensors[DATA + name], weights.tensors[RUNS + name]
        if (data.dtype, len(data.shape), runs.dtype, runs.shape[1:]) != ("U8", 1, "I64", (2,)):
            yield f"the tensors of {name} are {describe(data)} and {describe(runs)}"
        if not is_valid(changed):
            yield f"{name} has the type {describe(changed)}"
