"""Subjects of inspection, opened and checked as far as needed to show them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.format.artifact import Artifact, is_artifact
from weightswap_runtime.format.delta_file import DeltaStamp, delta_stamp
from weightswap_runtime.format.goldens import GoldensRecord, artifact_goldens, record_beside, record_of
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.format.recorded_call import Value
from weightswap_runtime.format.weight_file import Stamp
from weightswap_runtime.tensors.dtypes import describe
from weightswap_tools.module_tree import natural
from weightswap_tools.tensor_set import SetRequest, SetTensor, TensorSet, check_levels, open_set


class ArtifactSubject(NamedTuple):
    """An artifact whose files match their digests. `record` is that of its goldens."""

    artifact: Artifact
    record: GoldensRecord | None

    @property
    def manifest(self) -> Manifest:
        return self.artifact.manifest


class WeightsSubject(NamedTuple):
    """A weight file, a checkpoint or a delta file; no values are read. `record` is that of the goldens beside it."""

    weights: TensorSet
    delta: DeltaStamp | None
    record: GoldensRecord | None

    @property
    def kind(self) -> str:
        if self.weights.weights is None:
            return "checkpoint"
        return "delta file" if self.delta else "weight file"

    @property
    def swappable(self) -> bool:
        """True if swaps accept the file."""
        return self.weights.weights is not None

    @property
    def stamp(self) -> Stamp | None:
        return self.weights.weights.stamp if self.weights.weights else None

    @property
    def digests(self) -> Mapping[str, str]:
        """The recorded digests by tensor; empty if there are none."""
        stamp = self.delta or self.stamp
        return stamp.digests if stamp else {}

    @property
    def labels(self) -> Mapping[str, str]:
        stamp = self.delta or self.stamp
        return stamp.labels if stamp else {}

    @property
    def casts(self) -> Mapping[str, Sequence[str]]:
        """The tensors that packing cast, by their dtype in the checkpoint."""
        return (self.stamp.cast or {}) if self.stamp else {}

    @property
    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.weights.tensors.values())

    @property
    def sizes(self) -> dict[str, int]:
        """The size in bytes by name, with layers in the order of their numbers."""
        return {name: self.weights.tensors[name].nbytes for name in sorted(self.weights.tensors, key=natural)}

    @property
    def ties(self) -> dict[str, tuple[str, ...]]:
        """The other names of each tensor that has several."""
        return {name: others for name, others in self.weights.ties.items() if others}

    def in_order(self) -> list[tuple[str, SetTensor]]:
        """Return the tensors in the order of the files."""
        return sorted(self.weights.tensors.items(), key=lambda item: (item[1].file, item[1].offset or 0))


class GoldensSubject(NamedTuple):
    """A goldens file; only its header is read."""

    where: str
    record: GoldensRecord
    tensors: Mapping[str, SetTensor]

    @property
    def calls(self) -> list[tuple[int, str, str, str]]:
        """The number and method of each recorded call, and its inputs and outputs as text."""
        cases = enumerate(self.record.cases)
        return [(number, case.method, self._texts(case.inputs), self._texts(case.outputs)) for number, case in cases]

    def _texts(self, values: Iterable[Value]) -> str:
        return ", ".join(map(self._text, values))

    def _text(self, value: Value) -> str:
        """Return a value as `F32[2, 10]`, as an integer, or as "fixed" for a literal of the signature."""
        if isinstance(value, str):
            tensor = self.tensors.get(value)
            return describe(tensor) if tensor else f"{value}, which is missing"
        return "fixed" if value is None else str(value)


Subject = ArtifactSubject | WeightsSubject | GoldensSubject


@contextmanager
def open_subject(path: str, level: str | None = None) -> Iterator[Subject]:
    """Open the subject at a path or URL while the block runs.

    level: of a pickled or distributed checkpoint. Raises WeightswapError.
    """
    if is_artifact(path):
        if level is not None:
            raise Unsupported(f"{path}: is an artifact, which has no levels; leave --level out")
        yield _open_artifact(path)
        return
    with open_set(path, SetRequest(level)) as opened:
        check_levels([level], [opened])
        yield _tensors_subject(opened)


def _open_artifact(path: str) -> ArtifactSubject:
    artifact = Artifact.open(path)
    artifact.verify()
    goldens = artifact_goldens(artifact)
    return ArtifactSubject(artifact, goldens.record if goldens else None)


def _tensors_subject(opened: TensorSet) -> WeightsSubject | GoldensSubject:
    weights = opened.weights
    if weights is None:
        return WeightsSubject(opened, None, None)
    if record := record_of(weights):
        return GoldensSubject(opened.where, record, opened.tensors)
    return WeightsSubject(opened, delta_stamp(weights), record_beside(weights.location))
