"""Reports of every kind of block, with names that are markup, templates and control characters."""

from __future__ import annotations

import math

from weightswap_tools.reports.blocks import (
    Axis,
    Block,
    Column,
    Facts,
    HeatMap,
    Histogram,
    Line,
    LinePlot,
    ModuleGraph,
    ModuleNode,
    ModuleRun,
    Note,
    Report,
    Section,
    Table,
    Treemap,
    TreemapNode,
)

EVIL = "<img src=x onerror=alert(1)>"
ODD = (EVIL, "{b} {c|d}", "</script><script>alert(2)</script>", "\u202eback\x1b[31m", "\u2028line", "\ud800", "&amp;")


def report_of(*blocks: Block) -> Report:
    return Report("A report", "of a test", (Section("Section", blocks),))


def table(rows: int) -> Table:
    columns = (Column("name"), Column("error", "number"), Column("size", "bytes"), Column("changed", flag=True))
    cells = tuple((f"layer.{place}", (place * 7 % 10) / 4, 1000 * place, place % 5 == 0) for place in range(rows))
    return Table(columns, cells, "Weights")


def leaf(name: str, size: int) -> TreemapNode:
    return TreemapNode(name, size, "F32[2]")


LAYERS = tuple(TreemapNode(str(place), 50, "", (leaf("weight", 40), leaf("bias", 10))) for place in range(12))
MAP = Treemap(
    TreemapNode("model", 1000, "", (TreemapNode("encoder", 600, "", LAYERS), leaf(EVIL, 400))), "bytes", "Areas"
)


def module(name: str, kind: str, *children: ModuleNode | ModuleRun) -> ModuleNode:
    operators = () if children else ((f"aten.{kind.lower()}.default", 2),)
    return ModuleNode(name, kind, "2 weights", operators, ("F32[3] from the input x",), ("F32[4] to head",), children)


BLOCK = (module("attention", "Attention"), module("mlp", "Linear"))
REPEATED = tuple(module(str(place), "Block", *BLOCK) for place in range(15))
GRAPH = ModuleGraph(module("", "Net", module("embed", "Embedding"), module("layers", "", *REPEATED)), "Modules")
FOLDED = ModuleGraph(
    module("", "Net", module("embed", "Embedding"), module("layers", "", ModuleRun(REPEATED)), module("head", "Linear"))
)
HEAT = HeatMap(
    ("encoder", EVIL, "head"), ("cpu", "aoti"), ((1e-7, 1e-3), (None, math.nan), (0.0, 2.0)), "error", "Errors"
)
BINS = Histogram((0.0, 1e-8, 1e-4, 1.0), (5, 0, 7), "difference", "Differences")
BATCH, LATENCY = Axis("size of batch", "", "log"), Axis("time of a call", "ms", "log")
LINES = LinePlot(
    (
        Line("torch", ((1, 0.2), (8, 0.5), (32, 2.0)), "p50"),
        Line("torch", ((1, 0.4), (8, 1.0), (32, 90.0)), "p99"),
        Line(EVIL, ((1, 0.1), (32, 1.5)), "p50"),
    ),
    BATCH,
    LATENCY,
    "Latency",
)
CHARTS = {"treemap": MAP, "heat map": HEAT, "bins": BINS, "lines": LINES}
EVERYTHING = Report(
    EVIL,
    "\n".join(ODD),
    (
        Section(EVIL, (Facts(tuple((text, text) for text in ODD)), *(Note(text, "bad") for text in ODD)), EVIL),
        Section("Tables", (table(30), Table((Column(EVIL),), tuple((text,) for text in ODD), EVIL))),
        Section("Charts", tuple(CHARTS.values())),
        Section("Modules", (GRAPH, ModuleGraph(module(EVIL, EVIL, *(module(text, text) for text in ODD)), EVIL))),
    ),
    EVIL,
    False,
)

NOTHING = (
    Table((), ()),
    Table((Column("a"),), ()),
    HeatMap((), (), (), "x"),
    Histogram((0.0,), (), "x"),
    LinePlot((), Axis("x"), Axis("y")),
    LinePlot((Line("a", ()),), BATCH, LATENCY),
    Treemap(TreemapNode("r", 0), "bytes"),
    ModuleGraph(ModuleNode("", "", "", (), (), ())),
    ModuleGraph(ModuleNode("", "", "", (), (), (), (ModuleRun((ModuleNode("0", "", "", (), (), ()),)),))),
)
ODD_NUMBERS = (
    HeatMap(("a",), ("b",), ((0.0,),), "x"),
    HeatMap(("a",), ("b",), ((3.0,),), "x"),
    HeatMap(("a", "a"), ("b", "b"), ((None, math.inf), (-1.0, math.nan)), "x"),
    LinePlot((Line("a", ((1, 1), (math.inf, 2), (3, math.nan))),), Axis("x"), Axis("y")),
    LinePlot((Line("a", ((0, 1), (1, 0), (5, 1), (7, -1))),), BATCH, LATENCY),
    LinePlot((Line("a", ((1, 5e-324), (2, 1.7e308))),), BATCH, LATENCY),
    LinePlot((Line("a", ((-1e308, 1e308), (1e308, -1e308))),), Axis("x"), Axis("y")),
    Histogram((0.0, 1.0), (0,), "x"),
    Histogram((5.0, 5.0), (3,), "x"),
    Histogram((-math.inf, 0.0, math.inf), (1, 2), "x"),
    Treemap(TreemapNode("r", 0, "", (TreemapNode("a", 0), TreemapNode("b", 0, "", (TreemapNode("c", 0),)))), "bytes"),
)
