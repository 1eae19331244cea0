"""Pairs of keys, by which weights are signed."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat


def write_keys(folder: Path, *names: str) -> None:
    """Write a pair for each name: `NAME.key` signs, `NAME.pem` is public."""
    for name in names:
        key = ec.generate_private_key(ec.SECP256R1())
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (folder / f"{name}.key").write_bytes(secret)
        public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (folder / f"{name}.pem").write_bytes(public)
