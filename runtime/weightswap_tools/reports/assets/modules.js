"use strict";

// A graph by module: a tree (https://www.w3.org/WAI/ARIA/apg/patterns/treeview/) beside a panel about one module.

const MOST_ROWS = 1000;
const EDGE_ROWS = 50; // at either end of the drawn rows, where they move on

function drawModules(figure, block) {
  const [tree, remainder, panel, box, count] = [".tree", ".side > p", ".panel", "input", "[role=status]"].map((part) =>
    figure.querySelector(part),
  );
  const { root } = block;
  const modules = [...linked(root, null, 1)];
  let open = new Set(modules.filter((node) => node.open));
  let current = root;
  let found = null; // during a search: the modules to show
  let hits = new Set();
  let shown = [];
  let start = 0;

  const isOpen = (node) => (found ? node.children.some((child) => found.has(child)) : open.has(node));

  function* visible(node = root) {
    if (found && !found.has(node)) return;
    yield node;
    if (isOpen(node)) for (const child of node.children) yield* visible(child);
  }

  /** Redraw the visible rows, or of very many those around the selected one. */
  function draw() {
    shown = [...visible()];
    if (!shown.includes(current)) current = shown[0] ?? root;
    const at = shown.indexOf(current);
    if (at < start + EDGE_ROWS || at >= start + MOST_ROWS - EDGE_ROWS) start = at - MOST_ROWS / 2;
    start = Math.max(0, Math.min(start, shown.length - MOST_ROWS));
    const rows = shown.slice(start, start + MOST_ROWS);
    const { scrollTop } = tree.parentElement;
    tree.replaceChildren(...rows.map(drawRow));
    tree.parentElement.scrollTop = scrollTop;
    const more = plural(shown.length - rows.length, "more module");
    remainder.textContent = rows.length < shown.length ? `${more}; search to see fewer.` : "";
    if (!rows.length) remainder.textContent = "No module matches.";
    panel.replaceChildren(...description(current));
  }

  function drawRow(node) {
    const chosen = node === current;
    const attributes = {
      role: "treeitem",
      "aria-level": node.level,
      "aria-setsize": node.parent?.children.length ?? 1,
      "aria-posinset": node.position,
      "aria-expanded": node.children.length ? String(isOpen(node)) : null,
      "aria-selected": String(chosen),
      tabindex: chosen ? "0" : "-1",
      class: found && hits.has(node) ? "hit" : null,
      style: `--level: ${node.level - 1}`,
    };
    const texts = {
      name: node.name || "(model)",
      kind: node.kind,
      "kind alike": node.alike && `(${node.alike} alike)`,
      calls: node.calls && plural(node.calls, "call"),
    };
    return element("li", attributes, element("span", { class: "twist", "aria-hidden": "true" }), ...spans(texts));
  }

  function choose(node) {
    current = node;
    draw();
    const row = tree.querySelector("[tabindex='0']");
    row.focus({ preventScroll: true });
    row.scrollIntoView({ block: "nearest" });
  }

  function toggle(node, opened = !open.has(node)) {
    if (!found && node.children.length) open[opened ? "add" : "delete"](node);
  }

  function inward() {
    if (isOpen(current)) return current.children.find((child) => !found || found.has(child));
    toggle(current, true);
  }

  function outward() {
    if (found || !isOpen(current)) return current.parent;
    toggle(current, false);
  }

  function startingWith(letter) {
    const index = shown.indexOf(current);
    const rows = [...shown.slice(index + 1), ...shown.slice(0, index)];
    return rows.find(({ name }) => name.toLowerCase().startsWith(letter.toLowerCase()));
  }

  const moves = {
    ArrowDown: () => shown[shown.indexOf(current) + 1],
    ArrowUp: () => shown[shown.indexOf(current) - 1],
    Home: () => shown[0],
    End: () => shown.at(-1),
    ArrowRight: inward,
    ArrowLeft: outward,
    Enter: () => toggle(current),
    " ": () => toggle(current),
    "*": () => (current.parent?.children ?? [current]).forEach((node) => toggle(node, true)),
  };

  tree.onkeydown = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const move = moves[event.key] ?? (/^\S$/.test(event.key) ? () => startingWith(event.key) : null);
    if (!move) return;
    event.preventDefault();
    choose(move() ?? current);
  };

  tree.onclick = ({ target }) => {
    const row = target.closest("[role=treeitem]");
    if (!row) return;
    const node = shown[start + [...tree.children].indexOf(row)];
    if (target.className === "twist" || node === current) toggle(node);
    choose(node);
  };

  box.oninput = () => {
    const word = box.value.trim().toLowerCase();
    hits = new Set(modules.filter((node) => word && !node.alike && textOf(node).includes(word)));
    found = word ? new Set([...hits].flatMap((node) => [node, ...above(node)])) : null;
    count.textContent = word ? plural(hits.size, "module") : "";
    if (hits.size && !hits.has(current)) [current] = hits;
    if (!word) above(current).forEach((node) => open.add(node));
    draw();
  };

  figure.querySelector(".expand").onclick = () => {
    open = new Set(modules);
    draw();
  };

  figure.querySelector(".collapse").onclick = () => {
    open = new Set();
    current = root;
    draw();
  };

  draw();
}

/** Add its position to a module and all below, and yield them. */
function* linked(node, parent, position) {
  yield Object.assign(node, { parent, position, level: parent ? parent.level + 1 : 1 });
  for (const [index, child] of node.children.entries()) yield* linked(child, node, index + 1);
}

function above(node) {
  return node.parent ? [node.parent, ...above(node.parent)] : [];
}

/** The text that a search for a module looks at. */
function textOf(node) {
  node.text ??= [node.path || node.name, node.kind, ...node.ops.map(([name]) => name)].join("\n").toLowerCase();
  return node.text;
}

/** The content of the panel for a module, or for a run of equal modules. */
function description(node) {
  const facts = {
    Path: node.path || "(model)",
    Class: node.kind,
    Calls: node.told,
    Modules: node.alike ? `${node.alike} alike; open it to see what each takes and gives` : "",
  };
  const known = Object.entries(facts).filter(([, text]) => text);
  const fact = ([name, text]) => element("div", {}, element("dt", {}, name), element("dd", {}, text));
  const most = Math.max(...node.ops.map(([, calls]) => calls));
  const item = (text) => element("li", {}, text);
  const operator = ([name, calls]) => barRow("li", {}, calls, most, { name, number: numberText(calls) });
  return [
    element("h3", {}, node.name || "(model)"),
    element("p", { class: "muted" }, node.detail),
    element("dl", { class: "facts" }, ...known.map(fact)),
    ...list("Takes", "flow", node.takes.map(item)),
    ...list("Gives", "flow", node.gives.map(item)),
    ...list("Operators", "ops", node.ops.map(operator)),
  ];
}

function list(title, look, items) {
  return items.length ? [element("h4", {}, title), element("ul", { class: look }, ...items)] : [];
}
