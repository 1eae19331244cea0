"""What commands have in common: options, output for people and programs, errors, and signatures in words.

Texts may come from files of strangers, so everything printed goes through `say`, `print_table` or `print_json`, which
escape what would steer a terminal.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from weightswap_runtime.engines.choosing import EngineName
from weightswap_runtime.errors import MissingExtra, Unsupported, WeightswapError, encode_json, visible
from weightswap_runtime.format.cuts import part_of_rank
from weightswap_runtime.format.manifest import Cut, Manifest
from weightswap_runtime.format.names import Keys
from weightswap_runtime.format.signature import (
    Dict,
    Dimension,
    Integer,
    Items,
    Literal,
    Node,
    Signature,
    Size,
    Tensor,
    Tuple,
    key_text,
)
from weightswap_runtime.sources.writing import check_reportable, is_file
from weightswap_runtime.tensors import DTYPES

_CONTROLS = re.compile(rb"\x7f|\xc2[\x80-\x9f]")  # DEL and the C1 controls, which JSON leaves unescaped
_SHOWN_WARNINGS = (UserWarning, RuntimeWarning)
_USAGE_ERRORS = (MissingExtra, Unsupported)
_PLAIN = {"BOOL": "truth value", "BF16": "bfloat16 number", "C64": "64-bit complex number"}


# Options and arguments.


def _check_report_path(path: Path | None) -> Path | None:
    """Return the path of a report. Raises BadParameter, before any work is done, if it cannot be written."""
    if path is None:
        return None
    where = visible(str(path))
    try:
        check_reportable(path)
    except Unsupported as error:
        raise typer.BadParameter(str(error)) from error
    except OSError as error:
        raise typer.BadParameter(f"{where} cannot be written: {error.strerror}") from error
    if is_file(path):
        with path.open("rb") as file:
            beginning = file.read(64)
        if beginning and not beginning.lstrip().lower().startswith(b"<!doctype html"):
            raise typer.BadParameter(
                f"{where} exists and is not a report, so it is not overwritten; choose another file"
            )
    return path


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
LabelOption = Annotated[list[str] | None, typer.Option(help="A label name=text to store in the file; may be repeated.")]
OpLibraryOption = Annotated[
    list[str] | None,
    typer.Option("--op-library", help="A package or an .so file that registers operators; may be repeated."),
]
HtmlOption = Annotated[
    Path | None,
    typer.Option(callback=_check_report_path, help="Write an HTML report here; an existing report is replaced."),
]
LevelOption = Annotated[
    str | None,
    typer.Option(help="The place of the weights in a pickled or distributed checkpoint: dotted keys, such as ema."),
]
IgnoreOption = Annotated[
    list[str] | None,
    typer.Option(help="Ignore tensors whose names match, such as `*.position_ids` of an older model; may be repeated."),
]
DeviceOption = Annotated[str, typer.Option(help="The device that holds the model: cpu, cuda, cuda:1.")]
EngineOption = Annotated[EngineName, typer.Option(help="The engine for the graphs; auto takes the fastest available.")]
KeysOption = Annotated[
    Keys | None,
    typer.Option(help="How to read a checkpoint's names, if they would fit both ways with different results."),
]
ArtifactArgument = Annotated[str, typer.Argument(help="The artifact's folder or URL.")]
RequireSignatureOption = Annotated[
    list[str] | None,
    typer.Option(help="A public key (PEM); weights that none of the keys has signed are refused; repeatable."),
]
AllowNonfiniteOption = Annotated[
    list[str] | None, typer.Option(help="Allow NaN and infinities in weights of this name; `*` allows all.")
]
TokenOption = Annotated[
    Path | None,
    typer.Option(
        help="A file with the server's token; by default the token is $WEIGHTSWAP_ADMIN_TOKEN.", dir_okay=False
    ),
]
ModelOption = Annotated[str | None, typer.Option(help="The model, if the server has several.")]
LATEST = "latest"
RevisionOption = Annotated[
    str | None,
    typer.Option(
        metavar=f"N|{LATEST}",
        help=f"The revision of the desired state to replace; refused if outdated. `{LATEST}`: whichever is there.",
    ),
]


def parse_revision(text: str | None, latest: Callable[[], int | None] = lambda: None) -> int | None:
    """Return the revision of a `RevisionOption`: None without one, `latest()` for the latest. Raises BadParameter."""
    if text == LATEST:
        return latest()
    if text is not None and not (text.isascii() and text.isdecimal()):
        raise typer.BadParameter(f"--revision {text}: expected a number, or `{LATEST}`")
    return int(text) if text is not None else None


def parse_labels(texts: list[str] | None) -> dict[str, str]:
    """Return the labels of repeated `--label name=text` options. Raises BadParameter."""
    labels: dict[str, str] = {}
    for text in texts or ():
        name, equals, labels[name] = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"expected name=text, got {text!r}")
    return labels


# Output.


def say(line: str, err: bool = False) -> None:
    """Print one line on standard output or standard error, with terminal control characters escaped."""
    typer.echo(visible(line), err=err)


def print_facts(facts: Iterable[tuple[str, str]], width: int = 12) -> None:
    """Print a line for each fact: its name, and from column `width` on its text."""
    for name, text in facts:
        say(f"{name:<{width}}{text}")


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table on `table_console`, with terminal control characters escaped."""
    table = Table(title=escape(visible(title)), title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(visible(cell)) for cell in row))
    table_console().print(table)


def table_console() -> Console:
    """Return a console for standard output: as wide as the terminal, or unwrapped elsewhere, so that nothing is cut."""
    return _TableConsole(soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 200)


class _TableConsole(Console):
    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704 - rich calls this in its `except`; `program` handles the error as for other output


def print_json(document: Any) -> None:
    """Print a document as indented JSON."""
    typer.echo(msgspec.json.format(printable_json(document), indent=2).decode())


def printable_json(document: Any) -> bytes:
    """Return a document as one line of JSON, with terminal control characters escaped."""
    return _CONTROLS.sub(lambda letter: b"\\u00%02x" % letter[0][-1], encode_json(document))


def human_bytes(size: int) -> str:
    """Return a size as text, such as `1.2 MB`, in powers of a thousand."""
    value, units = float(size), iter(("B", "kB", "MB", "GB"))
    unit = next(units)
    for larger in units:
        if round(value, 1) < 1000:
            break
        value, unit = value / 1000, larger
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"


@contextmanager
def progress_bar(what: str, *, of_bytes: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal; the yielded function takes the amount done and the total, bytes or items."""
    console = Console(stderr=True)
    measures = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) if of_bytes else (MofNCompleteColumn(),)
    with Progress(
        "{task.description}", BarColumn(), *measures, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def status_line(what: str) -> Iterator[Callable[[str], object]]:
    """Show a status line on a terminal; the yielded function replaces its text."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(escape(visible(what))) as status:
        yield lambda text: status.update(escape(visible(text)))


@contextmanager
def warnings_said() -> Iterator[list[str]]:
    """Print the warnings of a block on standard error when it ends. Yields a list that then holds their texts."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        for category in _SHOWN_WARNINGS:
            warnings.simplefilter("always", category)
        try:
            yield texts
        finally:
            texts += [str(warning.message) for warning in caught if issubclass(warning.category, _SHOWN_WARNINGS)]
            for text in texts:
                say(f"warning: {text}", err=True)


@contextmanager
def errors_as_exit(as_json: bool, more: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Turn a WeightswapError or OSError into a message and an exit status: 2 for a wrong request, else 1.

    as_json: also print a WeightswapError as a JSON document, together with the fields of `more`.
    """
    try:
        yield
    except WeightswapError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        if as_json:
            kind, problems = type(error).__name__, getattr(error, "problems", ())
            document = {"error": kind, "reason": error.reason, "message": str(error), "problems": problems}
            print_json({**document, **(more or {})})
        raise typer.Exit(2 if isinstance(error, _USAGE_ERRORS) else 1) from error
    except BrokenPipeError:
        raise
    except OSError as error:
        say(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from error


# Signatures.


def ranks_text(manifest: Manifest) -> str:
    """Return how an artifact of several ranks is split."""
    assert manifest.ranks
    size, whole, cuts = manifest.ranks.size, manifest.ranks.whole, manifest.ranks.cuts
    rows = (part_of_rank(row, cuts[row.name], size) if row.name in cuts else row for row in manifest.weights)
    each = human_bytes(sum(row.nbytes for row in rows))
    return (
        f"{size}, each with {each} of the weights; {len(cuts)} of {len(manifest.weights)} are cut; weight files are "
        f"packed for the graph {whole[:12]}"
    )


def cut_text(cut: Cut, size: int) -> str:
    """Return how a weight is cut, such as `dimension 0 in 2`."""
    text = f"dimension {cut.dim} in {size // cut.repeat}"
    text += f", in each of {cut.groups} parts" if cut.groups > 1 else ""
    return text + (f", each on {cut.repeat} ranks" if cut.repeat > 1 else "")


def signature_text(name: str, signature: Signature) -> str:
    """Return a signature as `forward(x: F32[batch, 1, 8, 8]) -> F32[batch, 10], batch in 0..256`."""
    parameters = [f"{parameter}: {node_text(node)}" for parameter, node in signature.args]
    if signature.kwargs:
        parameters += ["*", *(f"{parameter}: {node_text(node)}" for parameter, node in signature.kwargs)]
    ranges = [
        f"{dim} in {limits.min}..{'any' if limits.max is None else limits.max}"
        for dim, limits in signature.dims.items()
    ]
    return ", ".join([f"{name}({', '.join(parameters)}) -> {node_text(signature.output)}", *ranges])


def node_text(node: Node) -> str:
    """Return a node as `F32[batch, 10]` or `{y: F32[3], n: int rows}`."""
    match node:
        case Tensor():
            return f"{node.dtype}[{', '.join(map(str, node.shape))}]"
        case Integer():
            return f"int {node.value}"
        case Literal():
            return repr(node.content)
        case Items():
            return f"[{', '.join(map(node_text, node.items))}]"
        case Tuple():
            return f"({', '.join(map(node_text, node.items))}{',' if len(node.items) == 1 else ''})"
        case Dict():
            of = node.kind.rpartition(".")[2] + (f"({node.context})" if node.context else "")
            return f"{of}{{{', '.join(f'{key_text(key)}: {node_text(item)}' for key, item in node.items)}}}"


def signature_sentence(name: str, signature: Signature) -> str:
    """Return `forward takes x (a tensor of 32-bit floats, batch × 64), and returns …; batch is from 0 to 256.`"""
    parts = [_argument(*parameter) for parameter in signature.args]
    keywords = [_argument(*parameter) for parameter in signature.kwargs]
    arguments = enumerated(parts) if parts else "" if keywords else "nothing"
    if keywords:
        arguments += f"{', and ' if parts else ''}by keyword only {enumerated(keywords)}"
    ranges = [_range_words(dim, limits) for dim, limits in signature.dims.items()]
    clauses = [enumerated(ranges)] if ranges else []
    clauses += [f"where {enumerated(signature.conditions)}"] if signature.conditions else []
    return "; ".join([f"{name} takes {arguments}, and returns {node_words(signature.output)}", *clauses]) + "."


def _argument(name: str, node: Node) -> str:
    return f"{name} ({f'fixed at {node.content!r}' if isinstance(node, Literal) else node_words(node)})"


def _range_words(dim: str, limits: Dimension) -> str:
    return f"{dim} is {limits.min} or more" if limits.max is None else f"{dim} is from {limits.min} to {limits.max}"


def node_words(node: Node) -> str:
    """Return a node as `a tensor of 32-bit floats, batch × 10` or `a dict with y (…)`."""
    match node:
        case Tensor():
            return _tensor_words(node)
        case Integer():
            return f"an integer, {node.value}"
        case Literal():
            return f"always {node.content!r}"
        case Items():
            return _sequence_words("list", node.items)
        case Tuple():
            return _sequence_words("tuple", node.items)
        case Dict():
            entries = enumerated([f"{key_text(key)} ({node_words(item)})" for key, item in node.items])
            kind = f"{node.kind.rpartition('.')[2]} {node.context}".strip() or "dict"
            return f"a {kind} with {entries}" if entries else f"an empty {kind}"


def _sequence_words(kind: str, nodes: Sequence[Node]) -> str:
    words = [node_words(node) for node in nodes]
    if not words:
        return f"an empty {kind}"
    if len(set(words)) == 1:
        return f"a {kind} of {len(words)}: {'each ' if len(words) > 1 else ''}{words[0]}"
    return f"a {kind} of {len(words)}: {enumerated([f'({text})' for text in words])}"


def _tensor_words(tensor: Tensor) -> str:
    if not tensor.shape:
        return f"a single {element_words(tensor.dtype)}"
    if len(tensor.shape) == 1:
        return f"a vector of {element_words(tensor.dtype)}s, {size_words(tensor.shape[0])} long"
    return f"a tensor of {element_words(tensor.dtype)}s, {' × '.join(map(size_words, tensor.shape))}"


def size_words(size: Size) -> str:
    """Return a size with `·` for `*`: `2·rows`."""
    return str(size).replace("*", "·")


def element_words(dtype: str) -> str:
    """Return the name of one element of a safetensors dtype, such as `32-bit float`."""
    if dtype in _PLAIN or dtype not in DTYPES:
        return _PLAIN.get(dtype, dtype)
    bits = DTYPES[dtype].bits
    family, _, variant = dtype.partition("_")
    kind = {"F": "float", "I": "integer", "U": "unsigned integer"}[family[0]]
    return f"{bits}-bit {kind}{f' ({variant})' if variant else ''}"


def enumerated(parts: Sequence[str]) -> str:
    """Join texts as `a, b and c`."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
