"""Signed weights: a signature of the weights id beside a weight file, made with OpenSSF's model-signing.

The signed content is a folder with one file, `weights-id`, of the 64 hex digits and a newline. Staging computes the id
from the weights' bytes, so a signature of the id covers weights of any size. No network is used.
"""

from __future__ import annotations

import tempfile
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weightswap_runtime.errors import MissingExtra, SwapError, Unsupported
from weightswap_runtime.format.weight_set import SIGNATURE_SUFFIX
from weightswap_runtime.sources.location import Location
from weightswap_runtime.sources.opening import read_small
from weightswap_runtime.sources.writing import is_file
from weightswap_runtime.staging.request import Admit

_MAX_SIGNATURE = 1 << 20  # bytes
_SIGNED = "weights-id"


class SignatureRefused(SwapError):
    """A weight file without a signature beside it, or whose signature is not of its weights by a required key."""


def requires(key: str, *others: str) -> Admit:
    """Return a callback for `load(admit=...)` that refuses files signed by none of these public keys.

    key, others: PEM files, each with one elliptic-curve public key. They are read again for each file. Raises
    MissingExtra and Unsupported. The callback raises SignatureRefused.
    """
    return _Required((key, *others))


class _Required:
    """The callback; `fingerprint()` changes with the keys."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._keys = tuple(str(Path(key).absolute()) for key in keys)
        for key in self._keys:
            _verifier(key)

    def fingerprint(self) -> Hashable:
        return tuple(Path(key).read_bytes() if is_file(Path(key)) else None for key in self._keys)

    def __call__(self, location: Location, weights_id: str) -> None:
        where = location.with_name(location.name + SIGNATURE_SUFFIX)
        signature = read_small(where, _MAX_SIGNATURE)
        if signature is None:
            raise SignatureRefused(f"{location}: not signed: {where} does not exist; `weightswap sign` writes it")
        with _folder(weights_id) as (folder, file):
            file.write_bytes(signature)
            refusals = [_refusal(key, folder, file) for key in self._keys]
        if None not in refusals:
            raise SignatureRefused(
                f"{location}: {where} is not a signature of the weights {weights_id[:12]} by the key "
                f"{' or '.join(self._keys)}{''.join(refusal for refusal in refusals if refusal)}"
            )


def _verifier(key: str) -> Any:
    verifying = _library("verifying")
    try:
        if Path(key).read_bytes().count(b"-----BEGIN PUBLIC KEY") > 1:  # the library would use the first alone
            raise ValueError("it has several; put each into its own file, with its own --require-signature")
        return verifying.Config().use_elliptic_key_verifier(public_key=Path(key))
    except Exception as error:
        raise Unsupported(f"--require-signature {key}: not a public key of an elliptic curve ({error})") from error


def _refusal(key: str, folder: Path, signature: Path) -> str | None:
    """Return None for a signature by a key, else what to add to the message."""
    try:
        verifier = _verifier(key)
    except Unsupported as error:  # replaced by something else since the start
        return f"; {error}"
    try:
        verifier.verify(folder, signature)
    except Exception:  # the library raises many kinds for a file that is no signature
        return ""
    return None


def sign(weights_id: str, key: str, password: str | None = None) -> bytes:
    """Return a signature of a weights id. key: a PEM file with an elliptic-curve private key.

    Raises MissingExtra, and Unsupported if the key cannot be read.
    """
    signing = _library("signing")
    try:
        signer = signing.Config().use_elliptic_key_signer(private_key=Path(key), password=password)
    except Exception as error:
        raise Unsupported(f"{key}: not a private key of an elliptic curve, or a wrong password ({error})") from error
    with _folder(weights_id) as (folder, file):
        signer.sign(folder, file)
        return file.read_bytes()


def _library(name: str) -> Any:
    try:
        import model_signing.signing
        import model_signing.verifying
    except ImportError as error:
        raise MissingExtra("signed weights", "signing") from error
    return getattr(model_signing, name)


@contextmanager
def _folder(weights_id: str) -> Iterator[tuple[Path, Path]]:
    """Make the folder that is signed, and yield it with a path outside of it for the signature."""
    with tempfile.TemporaryDirectory(prefix="weightswap-") as parent:
        folder = Path(parent) / "signed"
        folder.mkdir()
        (folder / _SIGNED).write_text(f"{weights_id}\n", encoding="ascii")
        yield folder, Path(parent) / "signature"
