"use strict";

// A graph by module, as a tree (https://www.w3.org/WAI/ARIA/apg/patterns/treeview/) beside what is told of one module.

const MOST_ROWS = 1000;
const EDGE_ROWS = 50; // of the rows that are drawn
const ROWS_AT_FIRST = 26;

drawers.modules = (figure, block) => {
  caption(figure, block.caption);
  new ModuleTree(figure, block.root);
};

class ModuleTree {
  constructor(figure, root) {
    this.root = this.linked(root, null);
    this.open = new Set(firstOpened(this.root));
    this.current = this.root;
    this.found = null; // while something is searched for: the modules to show
    this.tree = element("ul", { class: "tree", role: "tree", "aria-label": "Modules" });
    this.tree.addEventListener("keydown", (event) => this.key(event));
    this.tree.addEventListener("click", (event) => this.click(event));
    this.panel = element("div", { class: "panel", role: "region", "aria-label": "The selected module", tabindex: "0" });
    this.left = element("p", { class: "muted" });
    const side = element("div", { class: "side" }, this.tree, this.left);
    figure.append(this.tools(), element("div", { class: "modules" }, side, this.panel));
    this.draw();
  }

  /** The module, or the run of modules, with its parent, its path, and the calls in it and below. */
  linked(item, parent, position = 1) {
    const run = item.modules && runOf(item.modules, parent);
    const module = run ?? item;
    const node = { ...module, parent, position, level: parent ? parent.level + 1 : 1 };
    node.path = joined(parent?.inside ?? "", run ? run.range : parent ? module.name : "");
    node.inside = run ? parent.inside : node.path; // what the paths of its modules begin with
    node.children = module.children.map((child, place) => this.linked(child, node, place + 1));
    node.own = module.ops.reduce((sum, [, count]) => sum + count, 0);
    node.calls = node.children.reduce((sum, child) => sum + child.calls, node.own);
    return node;
  }

  tools() {
    const search = searchBox("Search modules", "Search modules, classes, operators", () => this.search());
    this.box = search.box;
    this.count = element("span", { class: "muted", role: "status" });
    const button = (name, act) => element("button", { type: "button", class: "button", onclick: act }, name);
    return element(
      "div",
      { class: "tools" },
      ...search.parts,
      button("Expand all", () => this.expandAll()),
      button("Collapse all", () => this.collapseAll()),
      this.count,
    );
  }

  *all(node = this.root) {
    yield node;
    for (const child of node.children) yield* this.all(child);
  }

  search() {
    const word = this.box.value.trim().toLowerCase();
    this.found = null;
    this.count.textContent = "";
    if (word) {
      const hits = [...this.all()].filter((node) => !node.alike && textOf(node).includes(word));
      this.found = new Set(hits);
      for (const hit of hits) {
        for (let node = hit.parent; node && !this.found.has(node); node = node.parent) this.found.add(node);
      }
      this.hits = new Set(hits);
      this.count.textContent = plural(hits.length, "module", "modules");
      if (hits.length && !this.hits.has(this.current)) this.current = hits[0];
    } else {
      for (let node = this.current.parent; node; node = node.parent) this.open.add(node);
    }
    this.draw();
  }

  expandAll() {
    for (const node of this.all()) if (node.children.length) this.open.add(node);
    this.draw();
  }

  collapseAll() {
    this.open = new Set();
    this.current = this.root;
    this.draw();
  }

  isOpen(node) {
    return this.found ? node.children.some((child) => this.found.has(child)) : this.open.has(node);
  }

  *visible(node = this.root) {
    if (this.found && !this.found.has(node)) return;
    yield node;
    if (this.isOpen(node)) for (const child of node.children) yield* this.visible(child);
  }

  /** Draw the rows anew: all that are visible, or of very many those around the chosen one. */
  draw(focus = false) {
    this.shown = [...this.visible()];
    if (!this.shown.includes(this.current)) this.current = this.shown[0] ?? this.root;
    const first = this.shown.indexOf(this.current) - MOST_ROWS / 2;
    this.start = Math.max(0, Math.min(first, this.shown.length - MOST_ROWS));
    const rows = this.shown.slice(this.start, this.start + MOST_ROWS);
    this.stale = false;
    this.tree.replaceChildren(...rows.map((node) => this.item(node)));
    this.left.textContent = this.leftText(this.shown.length - rows.length);
    describeModule(this.panel, this.current);
    if (focus) this.tree.querySelector("[tabindex='0']")?.focus();
  }

  leftText(more) {
    if (!this.shown.length) return "No module is called so.";
    return more ? `${plural(more, "more module", "more modules")}; search to see fewer.` : "";
  }

  /** Choose a module. Rows are drawn anew only if they are others now, or the chosen one is at the edge of those drawn. */
  choose(node) {
    const [before, now] = [this.current, node].map((one) => this.shown.indexOf(one) - this.start);
    this.current = node;
    const rows = this.tree.children;
    const above = this.start > 0 && now < EDGE_ROWS;
    const below = this.start + rows.length < this.shown.length && now >= rows.length - EDGE_ROWS;
    if (this.stale || above || below) return this.draw(true);
    markChosen(rows[before], false);
    markChosen(rows[now], true);
    describeModule(this.panel, this.current);
    rows[now].focus();
  }

  item(node) {
    const attributes = {
      role: "treeitem",
      "aria-level": node.level,
      "aria-setsize": node.parent?.children.length ?? 1,
      "aria-posinset": node.position,
      "aria-expanded": node.children.length ? String(this.isOpen(node)) : null,
      class: this.found && this.hits.has(node) ? "hit" : null,
    };
    const made = element("li", attributes, element("span", { class: "twist", "aria-hidden": "true" }));
    made.style.setProperty("--level", node.level - 1);
    made.append(
      element("span", { class: "name" }, node.name || "(model)"),
      element("span", { class: "kind" }, node.kind),
    );
    if (node.alike) made.append(element("span", { class: "kind" }, `(${node.alike} alike)`));
    if (node.calls) made.append(element("span", { class: "calls" }, plural(node.calls, "call", "calls")));
    markChosen(made, node === this.current);
    return made;
  }

  click(event) {
    const item = event.target.closest("[role=treeitem]");
    if (!item) return;
    const node = this.shown[this.start + [...this.tree.children].indexOf(item)];
    if (event.target.classList.contains("twist") || node === this.current) this.toggle(node);
    this.choose(node);
  }

  toggle(node, open = !this.open.has(node)) {
    if (this.found || !node.children.length) return;
    this.stale = true;
    if (open) this.open.add(node);
    else this.open.delete(node);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const place = this.shown.indexOf(this.current);
    const moves = {
      ArrowDown: () => this.shown[place + 1],
      ArrowUp: () => this.shown[place - 1],
      Home: () => this.shown[0],
      End: () => this.shown.at(-1),
      ArrowRight: () => this.inward(),
      ArrowLeft: () => this.outward(),
      Enter: () => this.toggled(),
      " ": () => this.toggled(),
      "*": () => this.siblingsOpened(),
    };
    const move = moves[event.key] ?? (/^\S$/.test(event.key) ? () => this.startingWith(event.key, place) : null);
    if (!move) return;
    event.preventDefault();
    this.choose(move() ?? this.current);
  }

  inward() {
    if (!this.isOpen(this.current)) this.toggle(this.current, true);
    else return this.current.children.find((child) => !this.found || this.found.has(child));
  }

  outward() {
    if (this.isOpen(this.current) && !this.found) this.toggle(this.current, false);
    else return this.current.parent;
  }

  toggled() {
    this.toggle(this.current);
  }

  siblingsOpened() {
    for (const node of this.current.parent?.children ?? [this.current]) this.toggle(node, true);
  }

  startingWith(letter, place) {
    const rows = [...this.shown.slice(place + 1), ...this.shown.slice(0, place)];
    return rows.find((node) => node.name.toLowerCase().startsWith(letter.toLowerCase()));
  }
}

/** One row is selected, and in the order of the tab key. */
function markChosen(row, chosen) {
  row.setAttribute("aria-selected", String(chosen));
  row.setAttribute("tabindex", chosen ? "0" : "-1");
}

/** What is told of modules that are alike: the class and the weights that each of them has. */
function runOf(modules, parent) {
  const [first, last] = [modules[0], modules.at(-1)];
  const range = `${first.name}-${last.name}`;
  const detail = first.detail && `each: ${first.detail}`;
  const name = joined(parent.name, range);
  return { name, range, kind: first.kind, detail, alike: modules.length, children: modules, ops: [], takes: [], gives: [] };
}

function joined(path, name) {
  return path && name ? `${path}.${name}` : name;
}

/** The levels next to the model that fit on a screen when they are open; what is alike stays folded. */
function firstOpened(root) {
  const opened = [];
  let rows = 1;
  for (let level = [root]; level.length; level = level.flatMap((node) => node.children).filter((node) => !node.alike)) {
    rows += level.reduce((sum, node) => sum + node.children.length, 0);
    if (rows > ROWS_AT_FIRST && opened.length) break;
    opened.push(...level);
  }
  return opened;
}

/** What a module is found by. */
function textOf(node) {
  node.text ??= [node.path || node.name, node.kind, ...node.ops.map(([name]) => name)].join("\n").toLowerCase();
  return node.text;
}
