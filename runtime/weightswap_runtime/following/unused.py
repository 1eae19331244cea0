"""Weight files of a folder that nobody needs any more: those of `publish(keep=)`, and uploads to a server."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from weightswap_runtime.format.delta import DeltaStamp
from weightswap_runtime.format.safetensors import Stamp
from weightswap_runtime.format.weight_set import GOLDENS_SUFFIX, SIGNATURE_SUFFIX, SUFFIX, goldens_path

from .desired_state import DesiredState
from .place import stamp_of

Stamps = Stamp | DeltaStamp


def in_use(state: DesiredState, keep: int) -> set[str]:
    """Return the ids of weights whose files a place may need.

    These are the desired ones, the last `keep` of the history and of those withdrawn, which an operator may set again,
    and the bases of all these.
    """
    kept = [*state.history[-keep:], *state.withdrawn[-keep:], *((state.weights,) if state.weights else ())]
    return {each.weights_id for each in kept} | {base.weights_id for each in kept for base in each.bases or ()}


def remove_unused(folder: Path, used: set[str], may_go: Callable[[Path, Stamps], bool]) -> list[Path]:
    """Remove weight files from a folder, each with the goldens and the signature beside it, and return their paths.

    A file stays if its weights are among `used`, if a file that stays is a delta from them, or a copy of them, and if
    `may_go` does not give it up. Links, folders, and files that weightswap has not written are never removed.

    Raises WeightFileError for a file that cannot be read, which may be a delta; nothing has been removed then. Raises
    OSError for one that cannot be removed.
    """
    stamps = {
        path: stamp_of(path)
        for path in sorted(folder.iterdir())
        if path.name.endswith(SUFFIX) and not path.name.endswith(GOLDENS_SUFFIX) and path.is_file()
    }
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
    for path, _ in going:
        path.unlink(missing_ok=True)  # first: who finds it shall find its goldens, too
        for beside in (goldens_path(path), path.with_name(path.name + SIGNATURE_SUFFIX)):
            with suppress(FileNotFoundError):
                beside.unlink()
    return [path for path, _ in going]


def _needed(stamp: Stamps) -> set[str]:
    return {stamp.weights_id, stamp.base} if isinstance(stamp, DeltaStamp) else {stamp.weights_id}
