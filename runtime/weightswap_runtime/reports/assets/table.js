"use strict";

// Tables that are sorted by their headings, filtered by a box, and drawn a page of rows at a time.

const PAGE_ROWS = 200;
const FILTER_FROM = 11;
const LONG = 20; // letters in a text for which a column is kept wide

drawers.table = (figure, block) => {
  figure.classList.add("table-block");
  new DataTable(figure, block.columns, block.rows, block.caption);
};

class DataTable {
  constructor(figure, columns, rows, title) {
    this.columns = columns;
    this.rows = rows;
    this.order = rows.map((_, place) => place);
    this.shown = this.order;
    this.sorted = { column: -1, falling: false };
    this.long = columns.map(
      ({ kind }, place) => kind === "text" && rows.some((row) => String(row[place]).length > LONG),
    );
    this.flags = columns.flatMap((column, place) => (column.flag ? [place] : []));
    caption(figure, title);
    if (rows.length >= FILTER_FROM) figure.append(this.tools());
    this.body = element("tbody");
    const table = element(
      "table",
      { "aria-label": title || "Table" },
      element("thead", {}, this.headings()),
      this.body,
    );
    this.scroller = element(
      "div",
      { class: "scroll", tabindex: "0", role: "group", "aria-label": title || "Table" },
      table,
    );
    this.pager = pager(rows.length, PAGE_ROWS, "Rows", (from) => this.draw(from));
    figure.append(this.scroller, this.pager.bar);
    this.draw(0);
  }

  tools() {
    const search = searchBox("Filter rows", "Filter", () => this.filter());
    this.box = search.box;
    this.count = element("span", { class: "muted", role: "status" }, plural(this.rows.length, "row", "rows"));
    const bar = element("div", { class: "tools" }, ...search.parts);
    if (this.flags.length) bar.append(this.flagBox());
    bar.append(this.count);
    return bar;
  }

  flagBox() {
    this.only = element("input", { type: "checkbox", onchange: () => this.filter() });
    const names = this.flags.map((place) => this.columns[place].name).join(", ");
    return element("label", { class: "check" }, this.only, `only rows with: ${names}`);
  }

  headings() {
    this.heads = this.columns.map((column, place) => {
      const arrow = element("span", { class: "arrow", "aria-hidden": "true" });
      const parts = column.kind === "text" ? [column.name, arrow] : [arrow, column.name];
      const button = element("button", { type: "button", onclick: () => this.sort(place) }, ...parts);
      return element("th", { scope: "col", class: column.kind, "aria-sort": "none" }, button);
    });
    return element("tr", {}, ...this.heads);
  }

  sort(column) {
    const falling = this.sorted.column === column ? !this.sorted.falling : this.columns[column].kind !== "text";
    this.sorted = { column, falling };
    const direction = falling ? -1 : 1;
    this.order.sort((a, b) => compared(this.rows[a][column], this.rows[b][column], direction) || a - b);
    this.heads.forEach((head, place) => {
      head.setAttribute("aria-sort", place !== column ? "none" : falling ? "descending" : "ascending");
    });
    this.filter();
  }

  filter() {
    const words = (this.box?.value ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    const marked = this.only?.checked ?? false;
    this.shown = this.order.filter((place) => (!marked || this.flagged(place)) && this.matches(place, words));
    if (this.count) this.count.textContent = this.countText();
    this.pager.restart(this.shown.length);
    this.draw(0);
  }

  countText() {
    const all = plural(this.rows.length, "row", "rows");
    return this.shown.length === this.rows.length ? all : `${this.shown.length.toLocaleString("en")} of ${all}`;
  }

  matches(place, words) {
    if (!words.length) return true;
    this.texts ??= [];
    this.texts[place] ??= this.rows[place]
      .map((value, column) => this.text(value, column))
      .join("\n")
      .toLowerCase();
    return words.every((word) => this.texts[place].includes(word));
  }

  flagged(place) {
    return this.flags.some((column) => Boolean(this.rows[place][column]));
  }

  text(value, column) {
    if (value === null) return "";
    if (typeof value === "boolean") return value ? "yes" : "no";
    const { kind } = this.columns[column];
    return kind === "text" && typeof value === "string" ? value : amountText(value, kind);
  }

  draw(from) {
    const page = this.shown.slice(from, from + PAGE_ROWS).map((place) => this.row(place));
    if (!page.length)
      page.push(element("tr", {}, element("td", { colspan: this.columns.length, class: "muted" }, "no rows")));
    this.body.replaceChildren(...page);
    this.scroller.scrollTop = 0;
  }

  row(place) {
    const cells = this.rows[place].map((value, column) => this.cell(value, column));
    return element("tr", { class: this.flagged(place) ? "flagged" : null }, ...cells);
  }

  cell(value, column) {
    const { kind, flag } = this.columns[column];
    const classes = [kind, flag && value ? "marked" : "", this.long[column] ? "long" : ""].filter(Boolean);
    const tag = column === 0 ? "th" : "td";
    return element(tag, { class: classes.join(" "), scope: column === 0 ? "row" : null }, this.text(value, column));
  }
}

/** Cells without a value come last, whatever the direction. */
function compared(a, b, direction) {
  if (a === null || b === null) return (a === null) - (b === null);
  if (typeof a === "number" && typeof b === "number") return direction * (a - b);
  return direction * TEXT_ORDER.compare(String(a), String(b));
}

const TEXT_ORDER = new Intl.Collator("en", { numeric: true });
