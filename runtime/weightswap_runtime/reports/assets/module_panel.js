"use strict";

// What is told of one module of a graph, or of a run of modules that are alike.

function describeModule(panel, node) {
  const facts = [
    ["Path", node.path || "(model)"],
    ["Class", node.kind],
    ["Calls", callsText(node)],
    ["Modules", node.alike ? `${node.alike} alike; open it to see what each takes and gives` : ""],
  ];
  const list = element("dl", { class: "facts" });
  for (const [name, value] of facts) {
    if (value) list.append(element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  }
  panel.replaceChildren(element("h3", {}, node.name || "(model)"));
  if (node.detail) panel.append(element("p", { class: "muted" }, node.detail));
  panel.append(list, ...flow("Takes", node.takes), ...flow("Gives", node.gives), ...operators(node.ops));
}

function callsText(node) {
  if (!node.calls) return "none of its own";
  if (node.alike) return `${rangeText(node.children.map(({ calls }) => calls))} each, ${numberText(node.calls)} in all`;
  return node.own === node.calls
    ? numberText(node.calls)
    : `${numberText(node.own)} of its own, ${numberText(node.calls)} with those of its modules`;
}

function rangeText(counts) {
  const [least, most] = [Math.min(...counts), Math.max(...counts)];
  return least === most ? numberText(least) : `${numberText(least)} to ${numberText(most)}`;
}

function flow(title, texts) {
  if (!texts.length) return [];
  return [element("h4", {}, title), element("ul", { class: "flow" }, ...texts.map((text) => element("li", {}, text)))];
}

function operators(ops) {
  if (!ops.length) return [];
  const most = Math.max(...ops.map(([, count]) => count));
  const rows = ops.map(([name, count]) => {
    const bar = element("meter", { min: 0, max: most, value: count, "aria-hidden": "true" });
    return element(
      "li",
      {},
      element("span", { class: "name" }, name),
      bar,
      element("span", { class: "number" }, numberText(count)),
    );
  });
  return [element("h4", {}, "Operators"), element("ul", { class: "ops" }, ...rows)];
}
