"""Calls of what a server's description lists, tried out by schemathesis: those that it allows, and others."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

MODES = ["positive", "negative"]


def try_operation(operation: Any, mode: str, examples: int, **options: Any) -> None:
    """Send an operation so many calls, and compare what is answered with the description."""
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks as openapi

    checks = [
        not_a_server_error,
        openapi.status_code_conformance,
        openapi.content_type_conformance,
        openapi.response_schema_conformance,
    ]

    @given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    def run(case: Any) -> None:
        case.call_and_validate(checks=checks, **options)

    with suppress(Unsatisfiable):  # nothing contradicts the description of a page without parameters
        run()
