"""Text form of chosen variants, in requests and responses: `lora=customer-a`, `lora=a,style=b`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from weightswap_runtime.messages import brief
from weightswap_server.errors import BadRequest

NAME = r"[^\s,=/][^\s,=]{0,199}"
"""Pattern of the names of variants and groups that requests can contain."""
PARAMETER = "variant"
_NAME = re.compile(NAME)


def read_variants(text: object) -> dict[str, str]:
    """Parse names by group; none from None or "". Raises BadRequest."""
    variants: dict[str, str] = {}
    if text is None or text == "":
        return variants
    if not isinstance(text, str):
        raise BadRequest(f"{PARAMETER}: expected a string, got {brief(repr(text))}")
    for part in text.split(","):
        group, equals, name = part.partition("=")
        if not (equals and _NAME.fullmatch(group) and _NAME.fullmatch(name)):
            raise BadRequest(f"{PARAMETER}: expected GROUP=NAME, separated by commas, got {brief(repr(part))}")
        if group in variants:
            raise BadRequest(f"{PARAMETER}: {brief(group)} is chosen more than once")
        variants[group] = name
    return variants


def write_variants(ids: Mapping[str, str]) -> str:
    """Return the text form of names or weights ids by group."""
    return ",".join(f"{group}={value}" for group, value in ids.items())
