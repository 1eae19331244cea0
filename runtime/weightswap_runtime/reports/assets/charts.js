"use strict";

// Charts, drawn as SVG by ECharts. Each has the same data beside it as a table. Tooltips are elements, never HTML texts.

/** The colours of the page, as its style sheet has them. */
function palette() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const series = (name, count) => Array.from({ length: count }, (_, place) => colour(`${name}-${place + 1}`));
  return {
    text: colour("text"),
    muted: colour("muted"),
    line: colour("line"),
    surface: colour("surface"),
    raised: colour("raised"),
    odd: colour("bad"),
    accent: colour("accent"),
    soft: colour("accent-soft"),
    font: getComputedStyle(document.body).fontFamily,
    hues: series("hue", 8),
    heat: series("heat", 5),
  };
}

/** A chart in a figure: `option(colours)` is asked for again when the colours change. */
class Chart {
  constructor(figure, label, height, option, widest) {
    this.option = option;
    this.box = element("div", { class: "chart", role: "img", "aria-label": label });
    this.box.style.height = `${height}px`;
    if (widest) this.box.style.maxWidth = `${widest}px`;
    figure.append(this.box);
    this.chart = echarts.init(this.box, null, { renderer: "svg" });
    this.paint();
    repainters.push(() => this.paint());
    new ResizeObserver(() => this.fit()).observe(this.box);
  }

  fit() {
    if (this.box.clientWidth !== this.chart.getWidth()) this.chart.resize();
  }

  paint() {
    const colours = palette();
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const common = {
      animation: !still,
      animationDuration: 200,
      animationDurationUpdate: 200,
      textStyle: { fontFamily: colours.font, color: colours.text },
    };
    this.chart.setOption({ ...common, ...this.option(colours) }, { notMerge: true });
  }

  resizeTo(height) {
    this.box.style.height = `${height}px`;
    this.chart.resize();
  }
}

/** A tooltip of lines; the first is its heading. */
function tooltip(colours, linesOf) {
  return {
    confine: true,
    borderWidth: 1,
    borderColor: colours.line,
    backgroundColor: colours.surface,
    textStyle: { color: colours.text, fontSize: 13 },
    extraCssText: "max-width: 24rem; white-space: normal; overflow-wrap: anywhere;",
    formatter: (item) => {
      const [first, ...more] = linesOf(item);
      return element("div", {}, element("strong", {}, first), ...more.map((line) => element("div", {}, line)));
    },
  };
}

/** The data of a chart as a table, which is made when it is first asked for. */
function alternative(figure, columns, rows) {
  const place = element("div");
  const made = element("details", { class: "alternative" }, element("summary", {}, "The same as a table"), place);
  made.addEventListener("toggle", () => place.firstChild || new DataTable(place, columns, rows(), ""));
  figure.append(made);
}

function axis(colours, more) {
  return {
    axisLine: { lineStyle: { color: colours.line } },
    axisTick: { lineStyle: { color: colours.line } },
    axisLabel: { color: colours.muted, hideOverlap: true, ...more.label },
    splitLine: { lineStyle: { color: colours.line } },
    nameTextStyle: { color: colours.muted },
    ...more.axis,
  };
}

/** The colour of a text that is read well on a background: the one of the greater contrast. */
function inkOn(colour) {
  const light = luminance(colour);
  return (light + 0.05) / 0.05 > 1.05 / (light + 0.05) ? "#000000" : "#ffffff";
}

/** https://www.w3.org/TR/WCAG21/#dfn-relative-luminance of `#rrggbb`. */
function luminance(colour) {
  const [red, green, blue] = channels(colour).map((value) => {
    const part = value / 255;
    return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function channels(colour) {
  return [1, 3, 5].map((place) => parseInt(colour.slice(place, place + 2), 16));
}

/** `share` of the first colour, the rest of the second. */
function mixed(colour, other, share) {
  const rest = channels(other);
  const sum = channels(colour).map((value, place) => Math.round(share * value + (1 - share) * rest[place]));
  return `#${sum.map((value) => value.toString(16).padStart(2, "0")).join("")}`;
}
