// Latency, throughput and errors over time, with commits marked.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm/preact.js";
import { clock, duration, number } from "./parts.js";

const LONGEST = 600; // seconds that are shown
const SHORTEST = 60;
const HEIGHT = 150;
const SPACE = 14; // above the plot, for the names of commits

/** Colours as a canvas takes them; by the names of variables. */
function colours(element, names) {
  const probe = element.appendChild(document.createElement("span"));
  const found = names.map((name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  });
  probe.remove();
  return found;
}

function options(element, series, format, marks) {
  const [text, line, mark, ...hues] = colours(element, ["muted", "line", "mark", ...series.map(({ hue }) => hue)]);
  const axis = { stroke: text, font: "11px system-ui", grid: { stroke: line, width: 1 }, ticks: { show: false } };
  return {
    width: element.clientWidth,
    height: HEIGHT,
    padding: [SPACE, 8, 0, 0],
    legend: { show: false },
    cursor: { drag: { setScale: false }, sync: { key: "load" }, y: false },
    select: { show: false },
    scales: { y: { range: (_, _low, high) => [0, Math.max(high * 1.1, series[0].least)] } },
    axes: [
      { ...axis, space: 100, size: 28, values: (_, times) => times.map((time) => clock.format(time * 1000)) },
      { ...axis, size: 62, space: 32, values: (_, values) => values.map(format) },
    ],
    series: [{}, ...hues.map((stroke) => ({ stroke, width: 1.5, points: { show: false } }))],
    hooks: { draw: [(plot) => drawMarks(plot, marks.current, mark)] },
  };
}

function drawMarks(plot, marks, colour) {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.fillStyle = ctx.strokeStyle = colour;
  ctx.font = `${11 * ratio}px system-ui`;
  ctx.textAlign = "center";
  ctx.setLineDash([4 * ratio, 3 * ratio]);
  let free = Infinity; // to the left of it, a name has room; the youngest have theirs
  for (const { at, name } of marks.toReversed()) {
    if (at < plot.scales.x.min || at > plot.scales.x.max) continue;
    const x = plot.valToPos(at, "x", true);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    if (x > free) continue;
    ctx.fillText(name, x, bbox.top - 3 * ratio);
    free = x - 38 * ratio;
  }
  ctx.restore();
}

/** One chart. series: name, hue, values; at the cursor, or at the end, its legend has their numbers. */
function Chart({ title, times, series, format, marks }) {
  const element = useRef();
  const plot = useRef();
  const latest = useRef();
  const [at, setAt] = useState(null);
  const data = [times, ...series.map(({ values }) => values)];
  latest.current = marks;
  useLayoutEffect(() => {
    const build = () => {
      plot.current?.destroy();
      const made = options(element.current, series, format, latest);
      made.hooks.setCursor = [({ cursor }) => setAt(cursor.idx ?? null)];
      plot.current = new uPlot(made, null, element.current);
    };
    build();
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", build);
    const observer = new ResizeObserver(() => plot.current.setSize({ width: element.current.clientWidth, height: HEIGHT }));
    observer.observe(element.current);
    return () => {
      scheme.removeEventListener("change", build);
      observer.disconnect();
      plot.current.destroy();
    };
  }, []);
  useEffect(() => {
    const end = times.at(-1) ?? Date.now() / 1000;
    const span = Math.min(LONGEST, Math.max(SHORTEST, end - (times[0] ?? end)));
    plot.current.setData(data, false);
    plot.current.setScale("x", { min: end - span, max: end });
  });
  const shown = (values) => values[at ?? values.length - 1] ?? null;
  const text = (values) => (shown(values) === null ? "–" : format(shown(values)));
  const highest = (values) => format(Math.max(0, ...values.filter((value) => value !== null)));
  const summary = series.map(({ name, values }) => `${name} ${text(values)}, highest ${highest(values)}`).join("; ");
  return html`<figure class="chart">
    <figcaption>
      <span class="title">${title}</span>
      ${series.map(
        ({ name, hue, values }) =>
          html`<span class="key" key=${name}><i class=${hue}></i>${name} <b>${text(values)}</b></span>`,
      )}
    </figcaption>
    <div class="plot" ref=${element} role="img" aria-label=${`${title}: ${summary}`}></div>
  </figure>`;
}

const rate = (value) => `${number(value)}/s`;

/** The three charts of a model. points: as the stream has them; commits: receipts. */
export function Load({ points, commits }) {
  const times = points.map(({ time }) => time);
  const marks = commits.map((receipt) => ({ at: receipt.committed_at, name: `gen ${receipt.generation}` }));
  const each = (name, hue, value, least) => ({ name, hue, least, values: points.map(value) });
  const per = (field) => (point) => point[field] / point.seconds;
  const common = { times, marks };
  return html`<div class="charts">
    <${Chart}
      ...${common}
      title="Latency"
      format=${duration}
      series=${[each("p50", "hue-1", ({ p50 }) => p50, 0.001), each("p99", "hue-2", ({ p99 }) => p99, 0.001)]}
    />
    <${Chart}
      ...${common}
      title="Throughput"
      format=${rate}
      series=${[each("answered", "hue-3", per("answered"), 1)]}
    />
    <${Chart}
      ...${common}
      title="Errors"
      format=${rate}
      series=${[each("failed (5xx)", "bad", per("failed"), 1), each("refused (4xx)", "hue-7", per("refused"), 1)]}
    />
  </div>`;
}

/** Which weights have answered in the last minute. */
export function Answering({ points, now, model }) {
  const counts = {};
  for (const { time, weights } of points)
    if (time > now - 60) for (const [id, count] of Object.entries(weights)) counts[id] = (counts[id] ?? 0) + count;
  const total = Object.values(counts).reduce((sum, count) => sum + count, 0);
  if (!total)
    return html`<p class="hint">
      Nothing was answered in the last minute. Requests come as <code>POST /v2/models/${model.name}/infer</code> to the
      port of clients.
    </p>`;
  const told = Object.entries(counts).map(([id, count]) => {
    const name = { [model.served?.weights_id]: "what is served", [model.canary?.weights_id]: "the canary" }[id] ?? id.slice(0, 12);
    return `${name} ${number(count)} (${((100 * count) / total).toFixed(count === total ? 0 : 1)} %)`;
  });
  return html`<p class="hint">Answered in the last minute, by weights: ${told.join(", ")}</p>`;
}
