"use strict";

// Passes the options of a report to ECharts. It draws SVG, so that colours can be variables of the style sheet. Tooltips
// are elements, never HTML strings. Each chart comes with a table of its numbers.

const LINE = { lineStyle: { color: "var(--line)" } };
const LABEL = { color: "var(--muted)", hideOverlap: true };
const AXIS = { axisLine: LINE, axisTick: LINE, splitLine: LINE, axisLabel: LABEL, nameTextStyle: LABEL };
const NUMBERS = { ...AXIS, axisLabel: { ...LABEL, formatter: numberText } };
const THEME = {
  animation: false,
  categoryAxis: AXIS,
  valueAxis: NUMBERS,
  logAxis: NUMBERS,
  legend: { textStyle: { color: "var(--text)" } },
  dataZoom: {
    borderColor: "var(--line)",
    fillerColor: "var(--accent-soft)",
    handleStyle: { color: "var(--surface)", borderColor: "var(--accent)" },
    moveHandleStyle: { color: "var(--line)" },
    emphasis: { handleStyle: { borderColor: "var(--text)" }, moveHandleStyle: { color: "var(--muted)" } },
  },
};
const TOOLTIP = {
  confine: true,
  borderWidth: 1,
  borderColor: "var(--line)",
  backgroundColor: "var(--surface)",
  textStyle: { color: "var(--text)", fontSize: 13 },
  extraCssText: "max-width: 24rem; white-space: normal; overflow-wrap: anywhere;",
};
const FEW_HUES = 8;
const MOST_SIGNED = 4000; // cells of a heat map
const LEAST_NESTED = 4000; // square pixels from which an area shows its children
const LEAST_NAMED = 1500; // from which it shows its name
const LEAST_MEASURED = 4500; // from which it shows its size, too

function drawChart(figure, block) {
  const box = figure.querySelector(".chart");
  const chart = echarts.init(box, THEME, { renderer: "svg" });
  const { fontFamily } = getComputedStyle(document.body);
  const { option } = block;
  for (const series of option.series) {
    series.emphasis = { disabled: true }; // else the library would compute with colours, which are variables here
    series.renderItem = bar; // of custom series
    if (series.type === "heatmap") addSigns(series, option);
  }
  const tooltipOption = { ...TOOLTIP, ...option.tooltip, formatter: (items) => tooltip(block, [items].flat()) };
  chart.setOption({ ...option, tooltip: tooltipOption, textStyle: { fontFamily, color: "var(--text)" } });
  new ResizeObserver(() => box.clientWidth === chart.getWidth() || chart.resize()).observe(box);
  if (block.root) enterAreas(figure, block, chart);
  const keys = figure.querySelectorAll(".key");
  for (const key of keys) key.onclick = () => press(key, keys, chart);
  for (const button of figure.querySelectorAll(".moves button")) button.onclick = () => move(chart, button.dataset);
  const table = figure.querySelector("details");
  table.addEventListener("toggle", () => drawTable(table, block), { once: true });
}

/** The more legible text colour on a background: black from this lightness on, else white. */
function inkOn(colour) {
  return `lab(from ${colour} calc((49.4 - l) * infinity) 0 0)`;
}

/** A tooltip with a heading and lines: those of the data, or the cell of the table. */
function tooltip(block, items) {
  if (block.root && !items[0].data.told) return ""; // between areas
  const texts = items
    .sort((a, b) => b.value[1] - a.value[1])
    .map((item) => item.data.told ?? cellTexts(block, item.value));
  const lines = [texts[0][0], ...texts.flatMap(([, ...lines]) => lines)];
  return element("div", {}, ...lines.map((line, index) => element(index ? "div" : "strong", {}, line)));
}

function cellTexts({ columns, rows }, [column, row]) {
  return [rows[row][0], `${columns[column + 1].name}: ${numberText(rows[row][column + 1])}`];
}

/** Label the cells that are off the colour scale, unless there are too many cells to read signs in. */
function addSigns(series, { visualMap: { pieces }, xAxis, yAxis }) {
  if (xAxis.data.length * yAxis.data.length > MOST_SIGNED) return;
  series.data = series.data.map((value) => {
    const { color, sign } = pieces[value[2]];
    return sign ? { value, label: { show: true, formatter: sign, color: inkOn(color), fontSize: 11 } } : value;
  });
}

/** A bar between two corners, at least two pixels wide. */
function bar(at, api) {
  const [left, bottom] = api.coord([api.value(0), api.value(2)]);
  const [right, top] = api.coord([api.value(1), api.value(3)]);
  const shape = { x: left, y: top, width: Math.max(2, right - left - 1), height: bottom - top };
  return { type: "rect", shape, style: { fill: api.visual("color") }, emphasisDisabled: true };
}

/** Toggle a key. A line is shown while all keys that name it are pressed. */
function press(key, keys, chart) {
  key.ariaPressed = String(key.ariaPressed !== "true");
  const selected = {};
  for (const { ariaPressed, dataset } of keys) {
    for (const line of dataset.lines.split(" ")) selected[line] = ariaPressed === "true" && (selected[line] ?? true);
  }
  chart.setOption({ legend: { selected } });
}

/** Shift the visible range of an axis by a fraction of its width, and scale the width. */
function move(chart, { shift, scale }) {
  const [{ start, end }] = chart.getOption().dataZoom;
  const width = Math.min(100, Math.max(0.01, (end - start) * scale));
  const to = (start + end) / 2 + shift * (end - start) + width / 2;
  const last = Math.min(100, Math.max(width, to));
  chart.dispatchAction({ type: "dataZoom", start: last - width, end: last });
}

/** Show the areas of one node at a time. A click enters an area, a path of buttons leads back, a list names all. */
function enterAreas(figure, { root, columns }, chart) {
  const trail = figure.querySelector(".trail");
  const list = figure.querySelector(".parts");
  const size = ({ value }) => amountText(value, columns[1].kind);
  const share = (node, whole) => (whole.value ? `${((100 * node.value) / whole.value).toFixed(1)} %` : "");
  let path;

  function go(...nodes) {
    path = nodes;
    const node = path.at(-1);
    trail.replaceChildren(...path.map(step));
    list.replaceChildren(...node.children.map((child) => element("li", { title: child.detail }, part(child, node))));
    const data = node.children.map((child, index) => {
      const colour = colourOf(index, node.children.length);
      const shade = (rank) => mixed(colour, 82 - (40 * rank) / child.children.length);
      const areas = child.children.map((inner, rank) => area(inner, index, shade(rank)));
      return { ...area(child, index, colour), children: pixels(child) < LEAST_NESTED ? [] : areas.reverse() };
    });
    data.reverse(); // the library draws the last of equal areas first
    const fontSize = data.length > 60 ? 10 : 12;
    const labels = (separator) => ({ fontSize, formatter: ({ data: item }) => areaText(item, separator) });
    chart.setOption({ series: [{ data, label: labels("\n"), upperLabel: labels("   ") }] });
  }

  function enter(...nodes) {
    if (!nodes.at(-1)?.children.length) return;
    go(...nodes);
    trail.querySelector("[aria-current]").focus();
  }

  function step(node, index) {
    const here = index === path.length - 1;
    const attributes = { type: "button", "aria-current": here && "location" };
    const button = element("button", { ...attributes, onclick: () => enter(...path.slice(0, index + 1)) }, node.name);
    return element("li", {}, button, here ? element("span", { class: "muted" }, ` ${size(node)}`) : "");
  }

  function part(child, node) {
    const texts = { name: child.name, number: size(child), "number muted": share(child, node) };
    const enters = { type: "button", onclick: () => enter(...path, child) };
    const [tag, attributes] = child.children.length ? ["button", enters] : ["div", {}];
    return barRow(tag, attributes, child.value, node.value, texts);
  }

  function area({ name, value, detail }, index, color) {
    const label = { color: inkOn(color) };
    const told = [name, `${size({ value })}, ${share({ value }, root)} of all`, detail].filter(Boolean);
    return { name, value, told, index, itemStyle: { color, borderColor: color }, label, upperLabel: label };
  }

  function pixels({ value }) {
    return (chart.getWidth() * chart.getHeight() * value) / Math.max(1, path.at(-1).value);
  }

  function areaText(item, separator) {
    if (pixels(item) < LEAST_NAMED) return "";
    return pixels(item) < LEAST_MEASURED ? item.name : `${item.name}${separator}${size(item)}`;
  }

  chart.on("click", ({ data }) => data && enter(...path, path.at(-1).children[data.index]));
  go(root);
}

/** A hue for each of a few parts; shades of one hue for many, such as the layers of a model. */
function colourOf(index, count) {
  return count > FEW_HUES ? mixed("var(--hue-1)", 95 - (50 * index) / count) : `var(--hue-${index + 1})`;
}

function mixed(colour, share) {
  return `color-mix(in srgb, ${colour} ${share.toFixed(1)}%, var(--surface))`;
}
