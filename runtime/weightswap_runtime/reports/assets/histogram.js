"use strict";

// Histograms: bins as wide as they are, or all equally wide where edges are orders of magnitude or infinite.

drawers.histogram = (figure, block) => {
  const { edges, counts, what } = block;
  caption(figure, block.caption);
  const equal = block.scale === "log" || edges.some((edge) => typeof edge !== "number"); // an edge may be infinite
  const place = (edge) => (equal ? edge : edges[edge]);
  const bins = counts.map((count, bin) => [place(bin), place(bin + 1), count]);
  const ranged = (bin) => `${numberText(edges[bin])} to ${numberText(edges[bin + 1])}`;
  const edgeText = (value) => (typeof edges[value] === "number" ? shortText(edges[value], 3) : (edges[value] ?? ""));
  const option = (colours) => ({
    grid: { left: 28, right: 32, top: 30, bottom: 34, containLabel: true },
    tooltip: {
      ...tooltip(colours, (item) => [ranged(item.dataIndex), plural(counts[item.dataIndex], "value", "values")]),
      trigger: "item",
    },
    xAxis: axis(colours, {
      label: { formatter: equal ? edgeText : numberText },
      axis: {
        type: "value",
        min: place(0),
        max: place(counts.length),
        name: what,
        nameLocation: "middle",
        nameGap: 30,
        splitLine: { show: false },
        minInterval: equal ? 1 : undefined,
      },
    }),
    yAxis: axis(colours, { label: { formatter: numberText }, axis: { type: "value", minInterval: 1, name: "count" } }),
    series: [{ type: "custom", encode: { x: [0, 1], y: 2 }, data: bins, renderItem: (_, api) => bar(api, colours) }],
  });
  new Chart(figure, block.caption || `Histogram of ${what}`, 280, option);
  const columns = [
    { name: "from", kind: "number" },
    { name: "to", kind: "number" },
    { name: "count", kind: "number" },
  ];
  alternative(figure, columns, () => counts.map((count, bin) => [edges[bin], edges[bin + 1], count]));
};

function bar(api, colours) {
  const [left, top] = api.coord([api.value(0), api.value(2)]);
  const [right, bottom] = api.coord([api.value(1), 0]);
  const shape = { x: left + 0.5, y: top, width: Math.max(1, right - left - 1), height: bottom - top };
  return { type: "rect", shape, style: { fill: colours.hues[0] } };
}
