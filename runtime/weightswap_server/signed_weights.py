"""Signed weights: a signature beside a weight file, by OpenSSF's model-signing, over the weights id.

What is signed is a folder with one file, `weights-id`, that holds the 64 digits and a line's end. The id is that of the
bytes: a staging computes it anew, so that a few bytes are signed for any size of weights. No network is asked.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weightswap_runtime.errors import MissingExtra, SwapError, Unsupported
from weightswap_runtime.sources.location import Location
from weightswap_runtime.sources.opening import read_small
from weightswap_runtime.staging.request import Admit

SUFFIX = ".sig"
_MOST = 1 << 20  # bytes of a signature
_SIGNED = "weights-id"


class SignatureRefused(SwapError):
    """A weight file has no signature beside it, or none of the key that is required, for its weights."""


def requires(key: str, *others: str) -> Admit:
    """What `load(admit=...)` takes, to refuse files that none of these public keys has signed.

    key, others: PEM files with an elliptic curve's public key each. Raises MissingExtra and Unsupported.
    """
    keys = (key, *others)
    verifiers = [_verifier(each) for each in keys]

    def admit(location: Location, weights_id: str) -> None:
        where = location.with_name(location.name + SUFFIX)
        signature = read_small(where, _MOST)
        if signature is None:
            raise SignatureRefused(f"{location}: not signed: {where} is not there; `weightswap sign` writes it")
        with _folder(weights_id) as (folder, file):
            file.write_bytes(signature)
            if not any(_verified(each, folder, file) for each in verifiers):
                raise SignatureRefused(
                    f"{location}: {where} is no signature of the weights {weights_id[:12]} by the key "
                    f"{' or '.join(keys)}"
                )

    return admit


def _verifier(key: str) -> Any:
    verifying = _library("verifying")
    try:
        if Path(key).read_bytes().count(b"-----BEGIN PUBLIC KEY") > 1:  # all but the first would be passed over
            raise ValueError("it has several; say --require-signature for each, in a file of its own")
        return verifying.Config().use_elliptic_key_verifier(public_key=Path(key))
    except Exception as error:
        raise Unsupported(f"--require-signature {key}: no public key of an elliptic curve ({error})") from error


def _verified(verifier: Any, folder: Path, signature: Path) -> bool:
    try:
        verifier.verify(folder, signature)
    except Exception:  # of many kinds, for what is no signature
        return False
    return True


def sign(weights_id: str, key: str, password: str | None = None) -> bytes:
    """A signature of a weights id. key: a PEM file with an elliptic curve's private key.

    Raises MissingExtra, and Unsupported for what is no such key.
    """
    signing = _library("signing")
    try:
        signer = signing.Config().use_elliptic_key_signer(private_key=Path(key), password=password)
    except Exception as error:
        raise Unsupported(f"{key}: no private key of an elliptic curve, or another password ({error})") from error
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
    """The folder that is signed, and a file for its signature outside of it."""
    with tempfile.TemporaryDirectory(prefix="weightswap-") as parent:
        folder = Path(parent) / "signed"
        folder.mkdir()
        (folder / _SIGNED).write_text(f"{weights_id}\n", encoding="ascii")
        yield folder, Path(parent) / "signature"
