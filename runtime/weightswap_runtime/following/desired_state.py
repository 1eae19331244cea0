"""The document `desired.json`: its fields, its encoding, and its transitions, without any input or output."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from weightswap_runtime.decoding import from_json
from weightswap_runtime.errors import (
    BaseMismatch,
    DesiredError,
    NothingToRollBack,
    NotPromoted,
    Unsupported,
    listed,
)
from weightswap_runtime.tensors import DIGEST

FORMAT_VERSION = 1
MOST_KEPT = 20  # weights of the history
MOST_WITHDRAWN = 200  # weights that were rolled back
MOST_BASES = 1000  # files that a new process reads before a delta
KEPT_BYTES = 3 << 20  # of a document: readers take 4 MiB, so that whoever wrote before, an operator's change has room
SHOWN = 12  # characters of a weights id that messages show
_Id = Annotated[str, msgspec.Meta(pattern=f"^{DIGEST.pattern}$")]
_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]  # what other readers of JSON keep exactly
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=253402300799)]  # since the epoch: the years that dates can name


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    def as_dict(self) -> dict[str, Any]:
        """Return the fields as dicts, lists, texts and numbers alone."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields


class DesiredBase(_Part, frozen=True, kw_only=True):
    """A file that leads to the base weights of a delta."""

    source: _Text  # as in `DesiredWeights`
    weights_id: _Id


class DesiredWeights(_Part, frozen=True, kw_only=True):
    """One set of weights that is, was or may again be desired."""

    source: (
        _Text  # a path or URL of a full set, or of a delta; a relative one is below the desired store of the document
    )
    weights_id: _Id
    graph_id: str = ""  # of the graph that it was packed for; empty if unknown
    labels: dict[str, str] = {}
    since: _Seconds
    by: str = ""
    why: str = ""
    # for a delta, a full set and then the deltas that lead to its base weights; a full set has none
    bases: Annotated[tuple[DesiredBase, ...], msgspec.Meta(max_length=MOST_BASES)] | msgspec.UnsetType = msgspec.UNSET


class Hold(_Part, frozen=True, kw_only=True):
    """A hold, during which nothing is promoted."""

    since: _Seconds
    by: str = ""
    why: str = ""


class DesiredState(_Part, frozen=True, kw_only=True):
    """The content of a desired store."""

    desired_version: int = FORMAT_VERSION
    revision: _Count = 0  # grows by one with each write; 0: nothing was written yet
    weights: DesiredWeights | None = None
    history: tuple[DesiredWeights, ...] = ()  # desired before, oldest first; a rollback can lead to them
    withdrawn: tuple[DesiredWeights, ...] = ()  # rolled back, in that order; no promotion brings them back
    hold: Hold | None = None

    @property
    def weights_id(self) -> str | None:
        """The id of the desired weights; None if there are none yet."""
        return self.weights.weights_id if self.weights else None

    @property
    def known(self) -> tuple[DesiredWeights, ...]:
        """All weights that the document names."""
        return (*self.withdrawn, *self.history, *((self.weights,) if self.weights else ()))


class _Versioned(msgspec.Struct):
    desired_version: _Count | None = None


def encode(state: DesiredState) -> bytes:
    """Encode a document with one field per line, for human readers."""
    return msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n"


def decode(raw: bytes | None, where: str) -> DesiredState:
    """Decode a document; None, for an absent one, gives revision 0. Raises DesiredError."""
    if raw is None:
        return DesiredState()
    try:
        version = from_json(raw, _Versioned).desired_version
        if version not in (None, FORMAT_VERSION):
            raise DesiredError(
                f"{where}: format version {version}; this runtime reads {FORMAT_VERSION}. Install the weightswap that "
                "wrote it."
            )
        state = from_json(raw, DesiredState)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise DesiredError(
            f"{where}: not a desired state ({error}). Put back the last one that weightswap wrote, or remove it, set "
            "the weights again, and hold: what was withdrawn is forgotten then."
        ) from error
    if state.revision == 0 or version is None:
        raise DesiredError(f"{where}: not a desired state (no version, or no revision). Let weightswap write it.")
    return state


def check_promotable(state: DesiredState, weights_id: str, source: object) -> None:
    """Raise NotPromoted during a hold and for weights that were withdrawn. Those that are desired now always pass."""
    if state.weights_id == weights_id:
        return
    for withdrawn in state.withdrawn:
        if withdrawn.weights_id == weights_id:
            raise NotPromoted(
                f"{source}: its weights {weights_id[:SHOWN]} were desired{_by(withdrawn.by)}, then withdrawn. Publish "
                "other weights, or set these by hand.",
                reason="superseded",
            )
    if state.hold is not None:
        why = f": {state.hold.why}" if state.hold.why else ""
        raise NotPromoted(
            f"{source}: not promoted, because promotion is on hold{_by(state.hold.by)}{why}. Release it first.",
            reason="held",
        )


def check_new(state: DesiredState, weights_id: str, source: object) -> None:
    """Raise NotPromoted for weights that were desired before: for promotions that nobody has asked for, of files that
    were found."""
    if any(weights.weights_id == weights_id for weights in state.history):
        raise NotPromoted(
            f"{source}: its weights {weights_id[:SHOWN]} were desired before, and later replaced", reason="superseded"
        )


def _by(who: str) -> str:
    return f" by {who}" if who else ""


def bases_of(
    state: DesiredState, base: str, weights_id: str, source: object, through: tuple[DesiredBase, ...] = ()
) -> tuple[DesiredBase, ...] | msgspec.UnsetType:
    """Return the files that a new process must read before a delta from the desired weights `base`.

    base: empty for a full set, which needs none. weights_id: the result of the delta, which may be desired already: its
    base may then be any of the files that lead there. through: deltas between `base` and this one. Raises BaseMismatch,
    and Unsupported for too long a chain.
    """
    if not base:
        return msgspec.UNSET
    desired = state.weights
    if desired and desired.weights_id == weights_id and base in (ids := ids_of(desired)):
        return (*(desired.bases or ())[: ids.index(base) + 1], *through)
    if desired is None or desired.weights_id != base:
        actual = f"{desired.weights_id[:SHOWN]} are desired" if desired else "nothing is desired"
        raise BaseMismatch(
            f"{source}: a delta from the weights {base[:SHOWN]}, but {actual}. Use the deltas of a chain in order, "
            "each while its base weights are desired, or use a full weight file."
        )
    bases = (*(desired.bases or ()), DesiredBase(source=desired.source, weights_id=base), *through)
    if len(bases) > MOST_BASES:
        raise Unsupported(
            f"{source}: a delta after {len(bases)} files that a new process would read first, but at most {MOST_BASES} "
            "can be; use a full weight file, or make one file of these first (weightswap desired STORE --compact FILE)"
        )
    return bases


def ids_of(weights: DesiredWeights) -> list[str]:
    """Return the weights ids of the files that lead to a delta, in order."""
    return [base.weights_id for base in weights.bases or ()]


def with_weights(state: DesiredState, weights: DesiredWeights) -> DesiredState:
    """Return the state with new desired weights; the ones before are appended to the history."""

    def without(entries: tuple[DesiredWeights, ...]) -> tuple[DesiredWeights, ...]:
        return tuple(entry for entry in entries if entry.weights_id != weights.weights_id)

    before = (state.weights,) if state.weights else ()
    history = without((*state.history, *before))[-MOST_KEPT:]
    return replace(state, weights=weights, history=history, withdrawn=without(state.withdrawn))


def trimmed(state: DesiredState) -> DesiredState:
    """Return a state that takes at most KEPT_BYTES, without what is missed least.

    That is all but the source and the id of withdrawn weights, which must stay withdrawn, and labels of the history;
    then its oldest weights, and at last the labels of what is desired. Nothing else in a document can be long.
    """
    if not _is_long(state):
        return state
    history = tuple(replace(entry, labels={}) for entry in state.history)
    state = replace(state, history=history, withdrawn=tuple(map(_bare, state.withdrawn)))
    while _is_long(state) and len(state.history) > 1:
        state = replace(state, history=state.history[1:])
    if _is_long(state) and state.weights:
        state = replace(state, weights=replace(state.weights, labels={}))
    return state


def _is_long(state: DesiredState) -> bool:
    return len(encode(state)) > KEPT_BYTES


def _bare(weights: DesiredWeights) -> DesiredWeights:
    return DesiredWeights(source=weights.source, weights_id=weights.weights_id, since=weights.since)


def find_good(state: DesiredState, weights_id: str | None, where: str) -> DesiredWeights:
    """Return the target of a rollback: the last entry of the history, or the one whose id begins with `weights_id`.

    That one may also be withdrawn. Raises NothingToRollBack.
    """
    candidates = (*state.withdrawn, *state.history) if weights_id else state.history[-1:]
    matches = [each for each in candidates if each.weights_id.startswith(weights_id or "")]
    if len(matches) != 1:
        ids = listed([each.weights_id[:SHOWN] for each in reversed(state.history)]) or "nothing"
        meant = f"weights {weights_id[:64]}" if weights_id else "weights that were desired before"
        how = "not in the history, or ambiguous" if weights_id else "none"
        raise NothingToRollBack(f"{where}: {meant}: {how}. The history has {ids}")
    return matches[0]


def rolled_back(state: DesiredState, target: DesiredWeights, hold: Hold | None) -> DesiredState:
    """Return the state after a rollback to weights that it names; the weights after them are withdrawn.

    hold: a new one, or None to leave the hold as it is.
    """
    hold = hold or state.hold
    index = next((index for index, each in enumerate(state.history) if each.weights_id == target.weights_id), None)
    if index is None:  # forward, to withdrawn weights
        return replace(with_weights(state, target), hold=hold)
    later = (*state.history[index + 1 :], *((state.weights,) if state.weights else ()))
    ids = {each.weights_id for each in later}
    withdrawn = (*(each for each in state.withdrawn if each.weights_id not in ids), *later)[-MOST_WITHDRAWN:]
    return replace(state, weights=target, history=state.history[:index], withdrawn=withdrawn, hold=hold)
