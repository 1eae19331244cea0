"use strict";

// Timelines: a lane for each row, a colour for each kind of span.

const LANE_HEIGHT = 44;
const MOST_UNZOOMED = 12; // spans

drawers.timeline = (figure, block) => {
  caption(figure, block.caption);
  const spans = block.lanes.flatMap((lane, row) => lane.spans.map((span) => ({ ...span, row, lane: lane.name })));
  const kinds = [...new Set(spans.map((span) => span.kind))];
  const zoomed = spans.length > MOST_UNZOOMED;
  const shown = { start: 0, end: 100 }; // percent of the time
  const option = (colours) => timelineOption(block.lanes, spans, kinds, zoomed && shown, colours);
  const height = LANE_HEIGHT * block.lanes.length + (zoomed ? 120 : 84);
  const { chart } = new Chart(figure, block.caption || "Timeline", height, option);
  if (zoomed) figure.append(zoomButtons(chart, shown));
  const columns = [
    { name: "lane", kind: "text" },
    { name: "label", kind: "text" },
    { name: "kind", kind: "text" },
    { name: "start (s)", kind: "number" },
    { name: "end (s)", kind: "number" },
    { name: "seconds", kind: "number" },
  ];
  alternative(figure, columns, () =>
    spans.map((span) => [span.lane, span.label, span.kind, span.start, span.end, span.end - span.start]),
  );
};

/** Buttons that do what the bar below the chart does. `shown` follows both. */
function zoomButtons(chart, shown) {
  chart.on("datazoom", () => {
    const [{ start, end }] = chart.getOption().dataZoom;
    Object.assign(shown, { start, end });
  });
  const show = (middle, width) => {
    const end = Math.min(100, Math.max(width, middle + width / 2));
    chart.dispatchAction({ type: "dataZoom", start: end - width, end });
  };
  const moves = {
    Earlier: (middle, width) => show(middle - width / 2, width),
    Later: (middle, width) => show(middle + width / 2, width),
    "Zoom in": (middle, width) => show(middle, Math.max(0.01, width / 2)),
    "Zoom out": (middle, width) => show(middle, Math.min(100, width * 2)),
  };
  const buttons = Object.entries(moves).map(([name, move]) => {
    const act = () => move((shown.start + shown.end) / 2, shown.end - shown.start);
    return element("button", { type: "button", class: "button", onclick: act }, name);
  });
  return element("div", { class: "pager", role: "group", "aria-label": "Part of the time" }, ...buttons);
}

function timelineOption(lanes, spans, kinds, zoomed, colours) {
  const colour = (kind) => colours.hues[kinds.indexOf(kind) % colours.hues.length];
  const series = kinds.map((kind) => {
    const own = spans.filter((span) => span.kind === kind);
    return {
      type: "custom",
      name: kind,
      itemStyle: { color: colour(kind) },
      encode: { x: [1, 2], y: 0 },
      data: own.map((span) => [span.row, span.start, span.end]),
      renderItem: (at, api) => spanShape(at, api, own, colour(kind), colours.font),
      tooltip: tooltip(colours, ({ dataIndex }) => spanLines(own[dataIndex])),
    };
  });
  return {
    legend: {
      bottom: zoomed ? 36 : 4,
      textStyle: { color: colours.text },
      data: kinds,
      type: "scroll",
      selectedMode: false,
    },
    grid: { left: 16, right: 32, top: 8, bottom: zoomed ? 84 : 48, containLabel: true },
    tooltip: { trigger: "item" },
    dataZoom: zoomed ? [{ ...zoomBar(colours), ...zoomed }] : [],
    xAxis: axis(colours, {
      label: { formatter: secondsText, showMaxLabel: false },
      axis: { type: "value", min: "dataMin", max: "dataMax" },
    }),
    yAxis: axis(colours, {
      label: { width: 160, overflow: "truncate", ellipsis: "…", interval: 0 },
      axis: {
        type: "category",
        inverse: true,
        data: lanes.map((lane) => lane.name),
        splitLine: { show: true, lineStyle: { color: colours.line } },
      },
    }),
    series,
  };
}

/** A bar for the part of the time that is shown; spans that are partly in it stay. */
function zoomBar(colours) {
  return {
    type: "slider",
    filterMode: "weakFilter",
    bottom: 6,
    height: 20,
    labelFormatter: secondsText,
    textStyle: { color: colours.muted },
    borderColor: colours.line,
    fillerColor: colours.soft,
    handleStyle: { color: colours.surface, borderColor: colours.accent },
    moveHandleStyle: { color: colours.line },
    emphasis: { handleStyle: { borderColor: colours.text }, moveHandleStyle: { color: colours.muted } },
  };
}

function spanShape(at, api, spans, colour, font) {
  const [left, middle] = api.coord([api.value(1), api.value(0)]);
  const [right] = api.coord([api.value(2), api.value(0)]);
  const { x, width } = at.coordSys;
  const shape = echarts.graphic.clipRectByRect(
    { x: left, y: middle - 12, width: Math.max(2, right - left), height: 24 },
    { x, y: at.coordSys.y, width, height: at.coordSys.height },
  );
  if (!shape) return null;
  const label = shape.width > 40 ? spans[at.dataIndex].label : "";
  const text = {
    type: "text",
    style: {
      text: label,
      fill: inkOn(colour),
      width: shape.width - 10,
      overflow: "truncate",
      ellipsis: "…",
      fontFamily: font,
      fontSize: 12,
    },
  };
  return {
    type: "rect",
    shape: { ...shape, r: 3 },
    style: { fill: colour },
    textContent: text,
    textConfig: { position: "insideLeft", distance: 5 },
  };
}

function spanLines(span) {
  return [
    span.label,
    span.kind,
    `${secondsText(span.start)} to ${secondsText(span.end)}`,
    `lasts ${secondsText(span.end - span.start)}`,
  ];
}

function secondsText(value) {
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${Number((value * 1e6).toPrecision(4))} µs`;
  if (size < 1) return `${Number((value * 1e3).toPrecision(4))} ms`;
  return `${Number(value.toPrecision(5))} s`;
}
