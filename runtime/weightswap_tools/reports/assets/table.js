"use strict";

// Tables: sorted by headings, filtered by a search box, with further rows on demand.

const ROWS_AT_FIRST = 200;
const MORE_ROWS = 2000;
const LONG = 20; // letters from which a text keeps its column wide
const TEXT_ORDER = new Intl.Collator("en", { numeric: true });

function drawTable(figure, { columns, rows }) {
  const find = (part) => figure.querySelector(part);
  const [box, only, count, more] = ["[type=search]", "[type=checkbox]", "[role=status]", ".more"].map(find);
  const heads = [...figure.querySelectorAll("th")];
  const flagged = (row) => columns.some(({ flag }, at) => flag && row[at]);
  const long = columns.map(({ kind }, at) => kind === "text" && rows.some((row) => String(row[at]).length > LONG));
  const texts = new Map(); // row -> its text, which the filter searches
  let order = [...rows];
  let most;

  function matches(row, words) {
    if (!texts.has(row)) {
      const cells = row.map((value, at) => cellText(value, columns[at].kind));
      texts.set(row, cells.join("\n").toLowerCase());
    }
    return words.every((word) => texts.get(row).includes(word));
  }

  function draw(shownAtMost) {
    most = shownAtMost;
    const words = box?.value.toLowerCase().split(/\s+/).filter(Boolean) ?? [];
    const shown = order.filter((row) => (!only?.checked || flagged(row)) && (!words.length || matches(row, words)));
    const all = plural(rows.length, "row");
    if (count) count.textContent = shown.length === rows.length ? all : `${numberText(shown.length)} of ${all}`;
    more.hidden = shown.length <= most;
    more.textContent = `${numberText(Math.min(MORE_ROWS, shown.length - most))} more of ${plural(shown.length, "row")}`;
    const none = element("tr", {}, element("td", { colspan: columns.length, class: "muted" }, "no rows"));
    find("tbody").replaceChildren(...(shown.length ? shown.slice(0, most).map(drawRow) : [none]));
  }

  function drawRow(row) {
    const cells = row.map((value, at) => {
      const { kind, flag } = columns[at];
      const look = [kind, flag && value && "marked", long[at] && "long"].filter(Boolean).join(" ");
      return element(at ? "td" : "th", { class: look, scope: at ? null : "row" }, cellText(value, kind));
    });
    return element("tr", { class: flagged(row) ? "flagged" : null }, ...cells);
  }

  function restart() {
    find(".scroll").scrollTop = 0;
    draw(ROWS_AT_FIRST);
  }

  function sort(at) {
    const before = heads[at].ariaSort;
    const falling = before === "none" ? columns[at].kind !== "text" : before === "ascending";
    for (const head of heads) head.ariaSort = "none";
    heads[at].ariaSort = falling ? "descending" : "ascending";
    order = [...rows].sort((a, b) => compared(a[at], b[at], falling ? -1 : 1));
    restart();
  }

  heads.forEach((head, at) => (head.firstChild.onclick = () => sort(at)));
  for (const input of figure.querySelectorAll("input")) input.oninput = restart;
  more.onclick = () => draw(most + MORE_ROWS);
  restart();
}

function cellText(value, kind) {
  if (value === null) return "";
  if (typeof value === "boolean") return value ? "yes" : "no";
  return kind === "text" && typeof value === "string" ? value : amountText(value, kind);
}

/** Cells without a value come last, whatever the direction. */
function compared(a, b, direction) {
  if (a === null || b === null) return (a === null) - (b === null);
  if (typeof a === "number" && typeof b === "number") return direction * (a - b);
  return direction * TEXT_ORDER.compare(String(a), String(b));
}
