// Latency, throughput and errors over time, with commits marked.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm/preact.js";
import { clock, duration, number } from "./parts.js";

const LONGEST = 600; // seconds of the time axis
const SHORTEST = 30;
const HEIGHT = 150;
const SPACE = 14; // pixels above the plot, for the names of commits
const HALF_A_TIME = 36; // pixels beside it, for half of a time's label at its end

/** Return the colours of CSS variables, as a canvas takes them. */
function colours(element, names) {
  const probe = element.appendChild(document.createElement("span"));
  const resolved = names.map((name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  });
  probe.remove();
  return resolved;
}

/** Scales: from zero, with room above; or logarithmic, for values of very different sizes. */
const SCALES = {
  even: (least) => ({ scale: { range: (_plot, _low, high) => [0, Math.max(high * 1.1, least)] }, axis: {} }),
  powers: (least) => ({
    scale: { distr: 3, range: (_plot, low, high) => [power(low ?? least, 0), power((high ?? least) * 1.1, 1)] },
    axis: { splits: (_plot, _axis, low, high) => powers(low, high), filter: (_plot, splits) => splits },
  }),
};

const power = (value, more) => 10 ** (Math.floor(Math.log10(value)) + more);

function powers(low, high) {
  const first = Math.round(Math.log10(low));
  return Array.from({ length: Math.round(Math.log10(high)) - first + 1 }, (_, index) => 10 ** (first + index));
}

function options(element, { series, format, scale, least }, marks) {
  const [text, line, ...hues] = colours(element, ["muted", "line", ...series.map(({ hue }) => hue)]);
  const { scale: across, axis: along } = SCALES[scale](least);
  const axis = { stroke: text, font: "11px system-ui", grid: { stroke: line, width: 1 }, ticks: { show: false } };
  return {
    width: element.clientWidth,
    height: HEIGHT,
    padding: [SPACE, HALF_A_TIME, 0, 0],
    legend: { show: false },
    cursor: { drag: { setScale: false }, sync: { key: "load" }, y: false },
    select: { show: false },
    scales: { y: across },
    axes: [
      { ...axis, space: 100, size: 28, values: (_, times) => times.map((time) => clock.format(time * 1000)) },
      { ...axis, ...along, size: 62, space: 32, values: (_, values) => values.map(format) },
    ],
    series: [{}, ...hues.map((stroke) => ({ stroke, width: 1.5, points: { show: false } }))],
    hooks: { draw: [(plot) => drawMarks(plot, marks.current, text)] },
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
  let free = Infinity; // names left of this have room; the latest come first
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

/** One chart. Its legend has the values at the cursor, or else the latest.
 *
 * series: name, hue, values; scale: a key of SCALES; least: the smallest upper end of the axis.
 */
function Chart(props) {
  const { title, times, series, format, marks } = props;
  const element = useRef();
  const plot = useRef();
  const latest = useRef();
  const [at, setAt] = useState(null);
  const data = [times, ...series.map(({ values }) => values)];
  latest.current = marks;
  useLayoutEffect(() => {
    const build = () => {
      plot.current?.destroy();
      const settings = options(element.current, props, latest);
      settings.hooks.setCursor = [({ cursor }) => setAt(cursor.idx ?? null)];
      plot.current = new uPlot(settings, null, element.current);
    };
    build();
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", build);
    const observer = new ResizeObserver(() =>
      plot.current.setSize({ width: element.current.clientWidth, height: HEIGHT }),
    );
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

/** The three charts of a model. points: of the stream's `load` events; commits: receipts. */
export function Load({ points, commits }) {
  const times = points.map(({ time }) => time);
  const marks = commits.map((receipt) => ({ at: receipt.committed_at, name: `gen ${receipt.generation}` }));
  const line = (name, hue, value) => ({ name, hue, values: points.map(value) });
  const per = (field) => (point) => point[field] / point.seconds;
  const rates = { times, marks, format: rate, scale: "even", least: 1 };
  return html`<div class="charts">
    <${Chart}
      ...${{ times, marks, format: duration, scale: "powers", least: 0.001 }}
      title="Latency"
      series=${[line("p50", "hue-1", ({ p50 }) => p50), line("p99", "hue-2", ({ p99 }) => p99)]}
    />
    <${Chart}
      ...${rates}
      title="Throughput"
      series=${[line("answered", "hue-3", per("answered"))]}
    />
    <${Chart}
      ...${rates}
      title="Errors"
      series=${[line("failed (5xx)", "bad", per("failed")), line("refused (4xx)", "hue-7", per("refused"))]}
    />
  </div>`;
}

/** The share of answers of the last minute, by weights. */
export function Answering({ points, now, model }) {
  const names = { [model.served?.weights_id]: "what is served", [model.canary?.weights_id]: "the canary" };
  const counts = { "what is served": 0, "the canary": 0, others: 0 };
  let total = 0;
  for (const [id, count] of points
    .filter(({ time }) => time > now - 60)
    .flatMap(({ weights }) => Object.entries(weights))) {
    counts[names[id] ?? "others"] += count;
    total += count;
  }
  if (!total)
    return html`<p class="hint">
      Nothing was answered in the last minute. Requests come as <code>POST /v2/models/${model.name}/infer</code> to the
      port of clients.
    </p>`;
  const parts = Object.entries(counts)
    .filter(([, count]) => count)
    .map(([name, count]) => `${name} ${number(count)} (${number((100 * count) / total)} %)`);
  return html`<p class="hint">Answered in the last minute, by weights: ${parts.join(", ")}</p>`;
}
