"""Weight files of a folder that nobody needs any more: those of `publish(keep=)`, and uploads to a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from weightswap_runtime.format.delta import DeltaStamp
from weightswap_runtime.format.safetensors import Stamp
from weightswap_runtime.format.weight_set import GOLDENS_SUFFIX, SUFFIX, companions

from .desired_state import DesiredState
from .desired_store import stamp_of

AnyStamp = Stamp | DeltaStamp


def in_use(state: DesiredState, keep: int) -> set[str]:
    """Return the ids of weights whose files a desired store may need.

    These are the desired ones, the last `keep` of the history and of those withdrawn, which an operator may set again,
    and the bases of all these.
    """
    kept = [*state.history[-keep:], *state.withdrawn[-keep:], *((state.weights,) if state.weights else ())]
    return {each.weights_id for each in kept} | {base.weights_id for each in kept for base in each.bases or ()}


def stamps_in(folder: Path) -> dict[Path, AnyStamp | None]:
    """Read the stamps of the weight files in a folder. Raises WeightFileError for an unreadable one: perhaps a delta"""
    return {
        path: stamp_of(path)
        for path in sorted(folder.iterdir())
        if path.name.endswith(SUFFIX) and not path.name.endswith(GOLDENS_SUFFIX) and path.is_file()
    }


def unused(
    stamps: Mapping[Path, AnyStamp | None], used: set[str], may_go: Callable[[Path, AnyStamp], bool]
) -> list[Path]:
    """Return the weight files of a folder that may be removed.

    A file stays if its weights are among `used`, if a file that stays is a delta from them, or a copy of them, and if
    `may_go` does not give it up. Links, folders, and files that weightswap has not written stay, too.
    """
    staying, going = set(used), []
    for path, stamp in stamps.items():
        if stamp is not None and stamp.weights_id not in used and not path.is_symlink() and may_go(path, stamp):
            going.append((path, stamp))
        elif stamp is not None:
            staying |= _needed(stamp)
    # what stays may need others, and these again others
    while needed := [stamp for _, stamp in going if stamp.weights_id in staying]:
        staying.update(*(_needed(stamp) for stamp in needed))
        going = [(path, stamp) for path, stamp in going if stamp.weights_id not in staying]
    return [path for path, _ in going]


def _needed(stamp: AnyStamp) -> set[str]:
    return {stamp.weights_id, stamp.base} if isinstance(stamp, DeltaStamp) else {stamp.weights_id}


def remove(path: Path) -> None:
    """Remove a weight file with the goldens and the signature beside it. Raises OSError."""
    # the weights first: who finds them shall find their goldens, too
    for each in (path, *(path.with_name(name) for name in companions(path.name))):
        each.unlink(missing_ok=True)
