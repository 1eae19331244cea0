"""The HTML report of goldens, and their section in the reports of artifacts and weight files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from weightswap_runtime.format.goldens import GoldensRecord
from weightswap_runtime.messages import plural
from weightswap_tools.reports.blocks import Column, Facts, Report, Section, Table, columns

from .facts import exactness, goldens_facts, machine
from .subject import GoldensSubject


def goldens_report(subject: GoldensSubject) -> Report:
    """Return a report with the facts of a goldens file and the types of the recorded values."""
    cases = tuple(subject.calls)
    heads = (Column("case", "number"), *columns("method", "inputs", "outputs"))
    overview = Section("Overview", (Facts(tuple(goldens_facts(subject))),))
    calls = Section("Recorded calls", (Table(heads, cases, "Inputs, and the outputs of the eager model"),))
    return Report(Path(subject.where).name, f"Goldens: {plural(len(cases), 'recorded call')}", (overview, calls))


def goldens_section(record: GoldensRecord | None) -> Iterator[Section]:
    """Yield a section about the goldens in an artifact or beside a weight file, if there are any."""
    if record is None:
        return
    facts = (
        ("weights id", record.weights_id or "none: inputs alone"),
        ("calls", plural(len(record.cases), "recorded call")),
        ("recorded on", machine(record)),
        ("compared", exactness(record)),
    )
    if record.has_outputs:
        yield Section("Goldens", (Facts(facts),), "Calls of the eager model that staged weights must reproduce.")
    else:
        yield Section("Inputs", (Facts(facts),), "Inputs for which every set of weights must give finite outputs.")
