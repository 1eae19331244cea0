"use strict";

// Heat maps, drawn some rows at a time. Values are scaled here, as the chart knows linear scales alone; the legend is made
// of elements, which wrap where a window is narrow.

const HEAT_ROWS = 200;
const ROW_HEIGHT = 18;
const MOST_LEVEL_LABELS = 8;
const LEVEL_WIDTH = 120; // pixels of a column's label
const TILTED_WIDTH = 180;
const LETTER_WIDTH = 6.5; // pixels, about
const LEAST_SIGNED = 20; // pixels of a cell's width for a sign in it
const MOST_SIGNED = 4000; // cells
const MARK_HUES = [2, 3, 4, 6, 8]; // none that is like the scale's
const NOT_FINITE = {
  NaN: { told: "NaN", sign: "?", colour: ({ odd }) => odd },
  Infinity: { told: "infinite", sign: "∞", colour: ({ hues }) => hues[6] },
  "-Infinity": { told: "infinite, negative", sign: "-∞", colour: ({ hues }) => hues[6] },
};

drawers.heatmap = (figure, block) => {
  caption(figure, block.caption);
  new Heat(figure, block);
};

class Heat {
  constructor(figure, block) {
    this.figure = figure;
    this.block = block;
    this.from = 0;
    this.rotated = block.columns.length > MOST_LEVEL_LABELS;
    this.range = heatRange(block);
    this.marks = presentMarks(block);
    figure.append(this.legend());
    const label = block.caption || `Heat map of ${block.what}`;
    const widest = 320 + 110 * block.columns.length;
    this.chart = new Chart(figure, label, this.height(), (colours) => this.option(colours), widest);
    figure.append(pager(block.rows.length, HEAT_ROWS, "Rows of the heat map", (from) => this.show(from)).bar);
    const columns = [{ name: "row", kind: "text" }, ...block.columns.map((name) => ({ name, kind: "number" }))];
    alternative(figure, columns, () => block.rows.map((name, row) => [name, ...block.values[row].map(cellValue)]));
  }

  get rows() {
    return this.block.rows.slice(this.from, this.from + HEAT_ROWS);
  }

  height() {
    return ROW_HEIGHT * this.rows.length + (this.rotated ? 160 : 50);
  }

  show(from) {
    this.from = from;
    this.chart.resizeTo(this.height());
    this.chart.paint();
  }

  legend() {
    const bar = element("div", { class: "legend" }, element("span", {}, this.block.what));
    if (this.range) bar.append(ramp(this.range, this.block.scale));
    for (const mark of this.marks.values()) {
      mark.swatch = element("span", { class: "swatch", "aria-hidden": "true" }, mark.sign);
      bar.append(element("span", { class: "mark-key" }, mark.swatch, mark.told));
    }
    return bar;
  }

  option(colours) {
    for (const { swatch, colour } of this.marks.values()) {
      swatch.style.background = colour(colours);
      swatch.style.color = inkOn(colour(colours));
    }
    const { block, rows, from } = this;
    const labelWidth = Math.min(260, 0.35 * this.figure.clientWidth);
    return {
      grid: { left: 4, right: 16, top: 8, bottom: 4, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
      tooltip: tooltip(colours, ({ value: [column, row] }) => [
        rows[row],
        `${block.columns[column]}: ${cellText(block.values[from + row][column])}`,
      ]),
      xAxis: axis(colours, {
        label: { ...cutLabel(this.rotated ? TILTED_WIDTH : LEVEL_WIDTH), rotate: this.rotated ? 45 : 0 },
        axis: { type: "category", data: block.columns, splitLine: { show: false }, axisTick: { show: false } },
      }),
      yAxis: axis(colours, {
        label: { ...cutLabel(labelWidth), interval: 0 },
        axis: { type: "category", data: rows, inverse: true, splitLine: { show: false }, axisTick: { show: false } },
      }),
      visualMap: { show: false, dimension: 2, inRange: { color: colours.heat }, ...this.ends() },
      series: [
        { type: "heatmap", data: this.cells(colours), itemStyle: { borderWidth: 1, borderColor: colours.surface } },
      ],
    };
  }

  ends() {
    const [min, max] = (this.range ?? [1, 1]).map((value) => this.scaled(value));
    return { min, max };
  }

  scaled(value) {
    return this.block.scale === "log" ? Math.log10(value) : value;
  }

  cells(colours) {
    const { columns, values } = this.block;
    const width = (0.6 * this.figure.clientWidth) / Math.max(1, columns.length);
    const signed = width >= LEAST_SIGNED && columns.length * this.rows.length <= MOST_SIGNED;
    const looks = new Map([...this.marks].map(([key, mark]) => [key, markLook(mark, colours, signed)]));
    return this.rows.flatMap((_, row) =>
      values[this.from + row].flatMap((value, column) => {
        if (value === null) return [];
        const look = looks.get(markKey(value, this.block.scale));
        return look ? { value: [column, row, 0], ...look } : [[column, row, this.scaled(value)]];
      }),
    );
  }
}

/** The least and the largest value that have a colour of the scale; null where there is none. */
function heatRange({ values, scale }) {
  let range = null;
  for (const value of values.flat()) {
    if (value === null || markKey(value, scale) !== null) continue;
    range = range ? [Math.min(range[0], value), Math.max(range[1], value)] : [value, value];
  }
  return range;
}

/** What a value is that has no colour of the scale: its text, or "0" for what has no logarithm; else null. */
function markKey(value, scale) {
  if (typeof value !== "number") return value;
  return scale === "log" && value <= 0 ? "0" : null;
}

/** The marks that cells have, by key: those of the block, then zero, then what is not finite. */
function presentMarks({ values, scale, marks }) {
  const flat = values.flat();
  const present = new Set(flat.filter((value) => value !== null).map((value) => markKey(value, scale)));
  const told = flat.some((value) => value < 0) ? "zero or less" : "zero";
  const plain = marks.filter(({ kind }) => kind === "plain");
  const own = marks.map((mark) => {
    const hue = MARK_HUES[plain.indexOf(mark) % MARK_HUES.length] - 1;
    const colour = mark.kind === "bad" ? ({ odd }) => odd : ({ hues }) => hues[hue];
    return [mark.text, { told: mark.text, sign: mark.sign, colour }];
  });
  const zero = ["0", { told, sign: "0", colour: ({ raised }) => raised }];
  return new Map([...own, zero, ...Object.entries(NOT_FINITE)].filter(([key]) => present.has(key)));
}

function markLook({ sign, colour }, colours, signed) {
  const fill = colour(colours);
  const label = { show: signed && sign !== "", formatter: () => sign, color: inkOn(fill), fontSize: 11 };
  return { visualMap: false, itemStyle: { color: fill }, label };
}

/** A label that is cut in the middle, as names of weights are alike at their beginning. */
function cutLabel(width) {
  const most = Math.floor(width / LETTER_WIDTH);
  const end = Math.ceil(most * 0.6);
  const cut = (name) => (name.length > most ? `${name.slice(0, most - end - 1)}…${name.slice(-end)}` : name);
  return { formatter: cut, width: width + 20, overflow: "truncate", ellipsis: "…" };
}

function cellText(value) {
  return NOT_FINITE[value]?.told ?? numberText(value);
}

function cellValue(value) {
  return typeof value === "string" ? cellText(value) : value;
}

/** The colours of the scale over its ends and its middle. */
function ramp([least, most], scale) {
  const middle = scale === "log" ? 10 ** ((Math.log10(least) + Math.log10(most)) / 2) : least / 2 + most / 2;
  const texts = least === most ? [numberText(least)] : distinctTexts([least, middle, most]);
  const ticks = texts.map((text) => element("span", { class: "number" }, text));
  const colours = element("span", { class: least === most ? "colours one" : "colours", "aria-hidden": "true" });
  return element("span", { class: "ramp" }, colours, element("span", { class: "ticks" }, ...ticks));
}

/** Numbers with as many digits as it takes to tell them apart; few for round ones. */
function distinctTexts(values) {
  for (let digits = 2; digits < 17; digits += 1) {
    const texts = values.map((value) => shortText(value, digits));
    if (new Set(texts).size === values.length) return texts;
  }
  return values.map(String);
}
