"use strict";

// Line plots: a colour and a symbol for each group of lines, a dash for each style. Both are hidden by buttons.

const LINES_HEIGHT = 320;
const SYMBOLS = { circle: "●", rect: "■", triangle: "▲", diamond: "◆" }; // and how they look in a text
const HUES = [1, 2, 3, 4, 7, 6, 5, 8]; // so that what has the same symbol looks least alike
const DASHES = ["solid", "dashed", "dotted"];
const MOST_TICKS = 12; // one for each x, if there are no more

drawers.lines = (figure, block) => {
  caption(figure, block.caption);
  new Lines(figure, block);
};

class Lines {
  constructor(figure, block) {
    this.block = block;
    this.groups = distinct(block.lines.map((line) => line.group));
    this.styles = distinct(block.lines.map((line) => line.style));
    this.hiddenGroups = new Set();
    this.hiddenStyles = new Set();
    const label = block.caption || `${block.y.what} over ${block.x.what}`;
    figure.append(this.legend(label));
    this.chart = new Chart(figure, label, LINES_HEIGHT, (colours) => this.option(colours));
    const columns = [
      { name: "line", kind: "text" },
      { name: measured(block.x), kind: "number" },
      { name: measured(block.y), kind: "number" },
    ];
    alternative(figure, columns, () =>
      block.lines.flatMap((line) => line.points.map(([x, y]) => [lineName(line), x, y])),
    );
  }

  legend(label) {
    const groups = this.groups.map((name, place) => this.key(name, groupMark(place), this.hiddenGroups));
    const named = this.styles.filter(Boolean);
    const styles = named.map((name) => this.key(name, dashMark(this.styles.indexOf(name)), this.hiddenStyles));
    const bar = element("div", { class: "keys", role: "group", "aria-label": `Lines of: ${label}` }, ...groups, ...styles);
    bar.hidden = !this.groups.length;
    return bar;
  }

  key(name, mark, hidden) {
    const button = element("button", { type: "button", class: "key", "aria-pressed": "true" }, mark, name);
    button.addEventListener("click", () => {
      const shown = hidden.delete(name);
      if (!shown) hidden.add(name);
      button.setAttribute("aria-pressed", String(shown));
      this.chart.paint();
    });
    return button;
  }

  option(colours) {
    const { x, y, lines } = this.block;
    const shown = lines.filter(({ group, style }) => !this.hiddenGroups.has(group) && !this.hiddenStyles.has(style));
    const points = lines.flatMap((line) => drawable(line.points, x, y));
    const [across, up] = [0, 1].map((side) => distinct(points.map((point) => point[side])).sort((a, b) => a - b));
    const own = across.length <= MOST_TICKS ? across : [];
    return {
      grid: { left: 20, right: 28, top: 34, bottom: 34, containLabel: true },
      tooltip: { ...tooltip(colours, (items) => this.told(items)), trigger: "axis" },
      xAxis: lineAxis(x, own, colours, { nameLocation: "middle", nameGap: 30 }),
      yAxis: lineAxis(y, steps(y, up), colours, { nameTextStyle: { color: colours.muted, align: "left" } }),
      series: shown.map((line) => this.series(line, colours)),
    };
  }

  series(line, colours) {
    const group = this.groups.indexOf(line.group);
    const dash = DASHES[this.styles.indexOf(line.style) % DASHES.length];
    const colour = colours.hues[hue(group) - 1];
    return {
      type: "line",
      name: lineName(line),
      data: drawable(line.points, this.block.x, this.block.y),
      symbol: Object.keys(SYMBOLS)[group % Object.keys(SYMBOLS).length],
      symbolSize: 8,
      lineStyle: { type: dash, width: 2, color: colour },
      itemStyle: { color: colour },
    };
  }

  /** What is at one place of the axis, as the lines lie above each other. */
  told(items) {
    const { x, y } = this.block;
    const [{ value }] = items;
    const order = [...items].sort((a, b) => b.value[1] - a.value[1]);
    return [
      `${x.what}: ${withUnit(value[0], x)}`,
      ...order.map(({ seriesName, value: [, height] }) => `${seriesName}: ${withUnit(height, y)}`),
    ];
  }
}

/** Values, each once, in the order of the first. */
function distinct(values) {
  return [...new Set(values)];
}

/** The number of a group's colour. */
function hue(place) {
  return HUES[place % HUES.length];
}

function groupMark(place) {
  const texts = Object.values(SYMBOLS);
  const mark = element("span", { class: "mark", "aria-hidden": "true" }, texts[place % texts.length]);
  mark.style.color = `var(--hue-${hue(place)})`;
  return mark;
}

function dashMark(place) {
  const mark = element("span", { class: "dash", "aria-hidden": "true" });
  mark.style.borderTopStyle = DASHES[place % DASHES.length];
  return mark;
}

function lineName({ group, style }) {
  return [group, style].filter(Boolean).join(", ");
}

function measured({ what, unit }) {
  return unit ? `${what} (${unit})` : what;
}

function withUnit(value, { unit }) {
  return unit ? `${numberText(value)} ${unit}` : numberText(value);
}

/** The points that have a place on both axes. */
function drawable(points, x, y) {
  const placed = (value, { scale }) => typeof value === "number" && (scale !== "log" || value > 0);
  return points.filter(([across, up]) => placed(across, x) && placed(up, y));
}

/** An axis with ticks at given places and nothing beyond them; without places the chart chooses both. */
function lineAxis(what, places, colours, more) {
  const customValues = places.length > 1 ? places : undefined;
  const ends = customValues && { min: places[0], max: places.at(-1) };
  const made = axis(colours, { label: { formatter: numberText, customValues }, axis: { ...more, ...ends } });
  const type = what.scale === "log" ? "log" : "value";
  return { ...made, type, name: measured(what), axisTick: { ...made.axisTick, customValues } };
}

/** Round numbers around rising values for a logarithmic axis, fewer where the range is wide; none for another axis. */
function steps({ scale }, values) {
  if (scale !== "log" || !values.length) return [];
  const decade = (value) => Math.floor(Math.log10(value));
  const [low, high] = [decade(values[0]), decade(values.at(-1)) + 1];
  const factors = high - low > 3 ? [1] : [1, 2, 5];
  const stride = Math.ceil((high - low) / MOST_TICKS);
  const places = [];
  for (let exponent = low; exponent < high + stride; exponent += stride) {
    places.push(...factors.map((factor) => Number(`${factor}e${exponent}`)));
  }
  const first = places.findLastIndex((place) => place <= values[0]);
  const last = places.findIndex((place) => place >= values.at(-1));
  return places.slice(Math.max(0, first), last + 1).filter((place) => place > 0 && place < Infinity);
}
