// Tables that are sorted by their heads and filtered by words. Of long ones the first rows are shown, more when asked for.

import { h, replace } from "./dom.js";
import { count, counted } from "./format.js";

const PAGE_ROWS = 200;

/** Return whether a text has all words of a filter; case does not count. */
function fits(text, filter) {
  const lower = text.toLowerCase();
  return filter
    .toLowerCase()
    .split(/\s+/)
    .every((word) => lower.includes(word));
}

/**
 * A table. `columns`: `{key, label, value, cell, text, numeric, wide, hint}`: `value(row)`, or the row's property `key`, is what it
 * is sorted by; `cell(row)`, or `text(value)`, is shown. A `wide` one is left out on a phone. The first column names the row.
 */
export class Table {
  /**
   * @param {object} options
   * @param {string} options.label What it is a table of, for screen readers.
   * @param {string} options.noun Of a row: "array".
   * @param {string} options.test Value of `data-test` of its body's rows.
   * @param {(row: object) => string} options.key One of its kind in the table.
   * @param {string} options.sort Key of the column to sort by at first, with `-` for the largest first.
   * @param {((row: object) => string) | null} options.text What a filter looks in; null: there is none.
   * @param {(rows: object[]) => string} options.total What to say of the rows that are shown, behind their number.
   */
  constructor({ columns, label, noun, test, key, sort = "", text = null, total = () => "" }) {
    Object.assign(this, { columns, noun, test, keyOf: key, text, total, rows: [], kept: new Map(), most: PAGE_ROWS });
    [this.sortKey, this.isDown] = [sort.replace("-", ""), sort.startsWith("-")];
    this.field = h("input", { type: "search", "aria-label": `Filter ${noun}s`, placeholder: "Filter", test: "filter" });
    this.field.addEventListener("input", () => this.draw());
    this.said = h("span", { class: "muted", role: "status", test: "found" });
    this.heads = columns.map((column) => this.head(column));
    this.body = h("tbody");
    this.more = h("button", { type: "button", onclick: () => this.showMore(), test: "more" }, "Show more");
    const table = h("table", null, h("thead", null, h("tr", null, this.heads)), this.body);
    this.element = h(
      "div",
      { class: "table" },
      text === null ? null : h("div", { class: "row" }, this.field, this.said),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, table),
      this.more,
    );
  }

  head(column) {
    const button = h("button", { type: "button", class: "heading", test: `sort-${column.key}` }, column.label);
    button.addEventListener("click", () => this.sortBy(column));
    return h("th", { scope: "col", class: classOf(column), title: column.hint }, button);
  }

  /** Show other rows; those that did not change stay as they are, and so do focus and selected text. */
  show(rows) {
    this.rows = rows;
    this.draw();
  }

  /** Show only the rows with all words of `text`. */
  filter(text) {
    this.field.value = text;
    this.draw();
  }

  sortBy(column) {
    this.isDown = this.sortKey === column.key ? !this.isDown : column.numeric === true;
    this.sortKey = column.key;
    this.draw();
  }

  showMore() {
    this.most += 10 * PAGE_ROWS;
    this.draw();
  }

  draw() {
    const filter = this.field.value.trim();
    const found = filter === "" ? [...this.rows] : this.rows.filter((row) => fits(this.text(row), filter));
    const by = this.columns.find(({ key }) => key === this.sortKey);
    if (by !== undefined) found.sort((one, other) => compare(valueOf(by, one), valueOf(by, other), this.isDown));
    for (const [index, head] of this.heads.entries()) {
      if (this.columns[index] !== by) head.removeAttribute("aria-sort");
      else head.setAttribute("aria-sort", this.isDown ? "descending" : "ascending");
    }
    const all = found.length === this.rows.length ? "" : `${count(found.length)} of `;
    this.said.textContent = `${all}${counted(this.rows.length, this.noun)}${this.total(found)}`;
    this.more.hidden = found.length <= this.most;
    const shown = found.slice(0, this.most).map((row) => this.row(row));
    const isSame =
      shown.length === this.body.children.length && shown.every((row, at) => row === this.body.children[at]);
    if (!isSame) replace(this.body, shown);
  }

  row(row) {
    const key = this.keyOf(row);
    const text = JSON.stringify(row);
    const kept = this.kept.get(key);
    if (kept?.text === text) return kept.element;
    const cells = this.columns.map((column, index) => {
      const inside = column.cell?.(row) ?? column.text?.(valueOf(column, row)) ?? valueOf(column, row);
      return h(index === 0 ? "th" : "td", { class: classOf(column), scope: index === 0 ? "row" : null }, inside);
    });
    const element = h("tr", { test: this.test }, cells);
    this.kept.set(key, { text, element });
    return element;
  }
}

function valueOf({ key, value }, row) {
  return value === undefined ? row[key] : value(row);
}

function classOf({ numeric = false, wide = false }) {
  return `${numeric ? "num" : "name"}${wide ? " wide" : ""}`;
}

function compare(one, other, isDown) {
  if (one === null || other === null) return one === other ? 0 : one === null ? 1 : -1; // What is not known comes last.
  const order = typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other;
  return isDown ? -order : order;
}
