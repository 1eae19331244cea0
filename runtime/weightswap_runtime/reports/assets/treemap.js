"use strict";

// Nested areas, zoomed one level at a time by the chart, by a path of buttons, or by a list of what is inside.

const MOST_PARTS = 150;
const MOST_AREAS = 600; // drawn at once
const MAP_HEIGHT = 420;
const MOST_ROOMY = 60; // with more areas, labels are smaller
const LEAST_NAMED = 1500; // square pixels of an area in which its name is told
const LEAST_MEASURED = 4500; // and its size, too

const AREAS = {
  type: "treemap",
  animation: false, // areas and labels would fly through each other
  sort: false,
  left: 0,
  right: 0,
  top: 0,
  bottom: 0,
  roam: false,
  nodeClick: false,
  breadcrumb: { show: false },
  visibleMin: 1,
};
const INSIDE = { lineHeight: 16, padding: [4, 3], position: "insideTopLeft" };
const ABOVE = { height: 22, padding: [0, 3] };

drawers.treemap = (figure, block) => {
  caption(figure, block.caption);
  new Zoom(figure, block);
};

class Zoom {
  constructor(figure, block) {
    this.what = block.what;
    this.path = [block.root];
    this.root = block.root;
    this.trail = element("ol", { class: "trail" });
    this.list = element("ul", { class: "parts" });
    this.map = element("div", { class: "map" });
    const side = element("nav", { class: "side", "aria-label": "What is inside", tabindex: "-1" }, this.list);
    figure.append(
      element("nav", { "aria-label": "Path" }, this.trail),
      element("div", { class: "zoom" }, this.map, side),
    );
    this.label = block.caption || `Areas of ${block.what}`;
    this.chart = new Chart(this.map, this.label, MAP_HEIGHT, (colours) => this.option(colours));
    this.chart.chart.on("click", ({ data }) => data && this.into(data.place));
    this.navigate();
    alternative(
      figure,
      [
        { name: "name", kind: "text" },
        { name: block.what, kind: block.what === "bytes" ? "bytes" : "number" },
        { name: "detail", kind: "text" },
      ],
      () => [...leafRows(block.root, "")],
    );
  }

  get node() {
    return this.path.at(-1);
  }

  into(place) {
    const child = largest(this.node)[place];
    if (child?.children.length) this.go([...this.path, child]);
  }

  go(path) {
    this.path = path;
    this.navigate();
    this.chart.paint();
    this.trail.querySelector("[aria-current]")?.focus();
  }

  navigate() {
    const steps = this.path.map((node, place) => this.step(node, this.path.slice(0, place + 1)));
    this.trail.replaceChildren(...steps);
    const children = largest(this.node);
    this.list.replaceChildren(...children.map((child, place) => this.part(child, place)));
  }

  step(node, path) {
    const here = node === this.node;
    const button = element(
      "button",
      { type: "button", class: "link", "aria-current": here ? "location" : null, onclick: () => this.go(path) },
      node.name,
    );
    return element("li", {}, button, here ? element("span", { class: "muted" }, ` ${this.amount(node)}`) : "");
  }

  part(child, place) {
    const name = element("span", { class: "name" }, child.name);
    const size = element("span", { class: "number" }, this.amount(child));
    const share = element("span", { class: "number muted" }, shareText(child.size, this.node.size));
    const bar = element("meter", {
      min: 0,
      max: Math.max(1, this.node.size),
      value: child.size,
      "aria-hidden": "true",
    });
    const inside = [name, size, share, bar];
    if (!child.children.length)
      return element("li", { title: child.detail || null }, element("div", { class: "leaf" }, ...inside));
    return element("li", {}, element("button", { type: "button", onclick: () => this.into(place) }, ...inside));
  }

  amount(node) {
    return amountText(node.size, this.what);
  }

  option(colours) {
    const children = largest(this.node);
    const most = Math.ceil(MOST_AREAS / Math.max(1, children.length));
    const data = children.map((child, place) => {
      return this.area(child, place, largest(child, most), hueOf(children, place, colours), colours);
    });
    const label = { show: true, overflow: "truncate", ellipsis: "…", fontSize: children.length > MOST_ROOMY ? 10 : 12 };
    const levels = [
      { itemStyle: { gapWidth: 3, borderWidth: 0, borderColor: colours.surface }, upperLabel: { show: false } },
      { itemStyle: { gapWidth: 1, borderWidth: 2 } },
      {},
    ];
    const series = {
      ...AREAS,
      data,
      levels,
      label: { ...label, ...INSIDE, formatter: ({ data: item }) => this.areaLabel(item, "\n") },
      upperLabel: { ...label, ...ABOVE, formatter: ({ data: item }) => this.areaLabel(item, "   ") },
    };
    return { tooltip: tooltip(colours, ({ data: item }) => this.areaLines(item)), series: [series] };
  }

  areaLines({ name, value, detail }) {
    const share = `${amountText(value, this.what)}, ${shareText(value, this.root.size)} of all`;
    return detail ? [name, share, detail] : [name, share];
  }

  areaLabel({ name, value }, between) {
    const pixels = (this.map.clientWidth * MAP_HEIGHT * value) / Math.max(1, this.node.size);
    if (pixels < LEAST_NAMED) return "";
    return pixels < LEAST_MEASURED ? name : `${name}${between}${amountText(value, this.what)}`;
  }

  /** A child as an area, with its own children in it. */
  area(child, place, inner, hue, colours) {
    const shade = (rank) => mixed(hue, colours.surface, 0.82 - (0.4 * rank) / Math.max(1, inner.length));
    const look = (colour) => ({
      itemStyle: { color: colour, borderColor: colour },
      label: { color: inkOn(colour) },
      upperLabel: { color: inkOn(colour) },
    });
    const made = (node, colour) => ({ name: node.name, value: node.size, detail: node.detail, place, ...look(colour) });
    return { ...made(child, hue), children: inner.map((node, rank) => made(node, shade(rank))) };
  }
}

/** Few parts have a hue each; many, as the layers of a model, are shades of one. */
function hueOf(children, place, colours) {
  if (children.length <= colours.hues.length) return colours.hues[place];
  return mixed(colours.hues[0], colours.surface, 0.95 - (0.5 * place) / children.length);
}

/** A node's children by falling size, then by name; the smallest of more than `most` become one. */
function largest(node, most = MOST_PARTS) {
  const order = [...node.children].sort((a, b) => b.size - a.size || TEXT_ORDER.compare(a.name, b.name));
  if (order.length <= most) return order;
  const rest = order.splice(most);
  const size = rest.reduce((sum, child) => sum + child.size, 0);
  return [
    ...order,
    { name: `${rest.length.toLocaleString("en")} more`, size, detail: "the smallest ones", children: [] },
  ];
}

function* leafRows(node, path) {
  if (!node.children.length) yield [path || node.name, node.size, node.detail];
  for (const child of node.children) yield* leafRows(child, path ? `${path}.${child.name}` : child.name);
}
