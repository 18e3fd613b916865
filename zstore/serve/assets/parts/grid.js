// A table of any length: arrows, Home, End and Page keys move, space selects, Enter opens. Only rows in sight are in the
// document.

import { h, replace } from "../dom.js";
import { VirtualList } from "./virtual.js";

const ignore = () => {};

/**
 * @typedef {object} Column
 * @property {string} key Names it in URLs.
 * @property {string} label
 * @property {string} width For CSS `grid-template-columns`; the first length in it, in rem, is the least.
 * @property {(entry: object) => any} cell What stands in it.
 * @property {((entry: object) => number | string | null) | null} value By which it is sorted; null: it is not.
 * @property {boolean} [numeric] Set to the right.
 * @property {boolean} [stays] It stays in sight where the table is wider than its box.
 * @property {string} [hint] Said by the heading when the pointer rests on it.
 */

/** A table whose rows can be sorted, and some of them selected. */
export class Grid {
  /**
   * @param {object} options
   * @param {string} options.label What it lists, for screen readers.
   * @param {string} options.test Value of `data-test`.
   * @param {(entry: object) => string} options.keyOf
   * @param {number} [options.most] How many rows can be selected; the one selected first gives way to another.
   * @param {(entry: object) => void} [options.onOpen]
   * @param {(keys: string[]) => void} [options.onSelect]
   * @param {(sort: {key: string, down: boolean}) => void} [options.onSort]
   * @param {(entry: object) => void} [options.onActive] Called as the row that keys move changes.
   */
  constructor({ label, test, keyOf, most = 0, onOpen = ignore, onSelect = ignore, onSort = ignore, onActive = ignore }) {
    Object.assign(this, { keyOf, most, onOpen, onSelect, onSort, onActive });
    this.head = h("div", { class: "rowgrid-head", role: "row", "aria-rowindex": "1" });
    this.body = h("div", { role: "rowgroup" });
    const multiple = most > 1 ? "true" : null;
    this.element = h(
      "div",
      { class: "rowgrid", role: "grid", tabindex: "0", "aria-label": label, "aria-multiselectable": multiple, test },
      h("div", { class: "rowgrid-headgroup", role: "rowgroup" }, this.head),
      this.body,
    );
    const active = (index) => this.onActive(this.shown[index]);
    this.list = new VirtualList(this.element, this.body, (index) => this.row(index), () => this.toggle(), active);
    this.element.addEventListener("keydown", (event) => this.press(event));
    this.entries = [];
    this.columns = [];
    this.selected = [];
    this.sort = { key: "", down: false };
  }

  /** Show these entries under these columns. What is selected stays so, even while it is not shown. */
  show(entries, columns) {
    const at = this.shown?.[this.list.active];
    this.entries = entries;
    this.columns = columns;
    const widths = [...(this.most > 0 ? ["2.25rem"] : []), ...columns.map((column) => column.width)];
    this.element.style.setProperty("--columns", widths.join(" "));
    const least = widths.map((width) => width.match(/[\d.]+rem/)[0]);
    this.element.style.setProperty("--least-width", `calc(${least.join(" + ")})`);
    this.layOut(at === undefined ? null : this.keyOf(at));
  }

  /** Bring an entry in sight and make it the one that keys act on. */
  reveal(key) {
    const index = this.shown.findIndex((entry) => this.keyOf(entry) === key);
    if (index >= 0) this.list.moveTo(index, true);
  }

  close() {
    this.list.close();
  }

  /** Draw all rows anew; the active one is that of the key `active`, without such a row the one in its place. */
  layOut(active = null) {
    const column = this.columns.find((other) => other.key === this.sort.key && other.value);
    this.shown = [...this.entries];
    if (column !== undefined) {
      const sign = this.sort.down ? -1 : 1;
      this.shown.sort((a, b) => sign * compare(column.value(a), column.value(b), sign));
    }
    this.element.setAttribute("aria-rowcount", this.shown.length + 1);
    this.element.setAttribute("aria-colcount", this.columns.length + Number(this.most > 0));
    replace(
      this.head,
      this.most > 0 ? h("span", { role: "columnheader", class: "cell pick", "aria-label": "selected" }) : null,
      this.columns.map((other) => this.heading(other)),
    );
    const place = this.shown.findIndex((entry) => this.keyOf(entry) === active);
    this.list.show(this.shown.length, place < 0 ? this.list.active : place);
  }

  heading(column) {
    const sorted = column.key === this.sort.key;
    const arrow = sorted ? (this.sort.down ? " ▾" : " ▴") : "";
    const attributes = {
      role: "columnheader",
      class: cellClass(column),
      title: column.hint ?? null,
      "aria-sort": sorted ? (this.sort.down ? "descending" : "ascending") : null,
    };
    if (!column.value) return h("span", attributes, column.label);
    const turn = () => {
      this.sort = { key: column.key, down: sorted ? !this.sort.down : Boolean(column.numeric) };
      this.layOut();
      this.onSort(this.sort);
    };
    const button = { type: "button", class: "heading", onclick: turn, test: `sort-${column.key}` };
    return h("span", attributes, h("button", button, column.label, arrow));
  }

  row(index) {
    const entry = this.shown[index];
    const key = this.keyOf(entry);
    const selected = this.selected.includes(key);
    return h(
      "div",
      {
        class: "rowgrid-row",
        role: "row",
        "aria-rowindex": index + 2,
        "aria-selected": this.most > 0 ? String(selected) : null,
        "data-test": "grid-row",
        "data-key": key.slice(0, 200),
      },
      this.most > 0 ? h("span", { class: "cell pick", role: "gridcell" }, selected ? "☑" : "☐") : null,
      this.columns.map((column) =>
        h("span", { class: cellClass(column), role: "gridcell" }, column.cell(entry)),
      ),
    );
  }

  toggle() {
    const entry = this.shown[this.list.active];
    if (entry === undefined || this.most === 0) return;
    const key = this.keyOf(entry);
    if (this.selected.includes(key)) this.selected = this.selected.filter((other) => other !== key);
    else this.selected = [...this.selected, key].slice(-this.most);
    this.list.redraw();
    this.onSelect(this.selected);
  }

  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("a, button") !== null) return;
    const entry = this.shown[this.list.active];
    const moves = {
      ...this.list.moves,
      " ": () => this.toggle(),
      Enter: () => entry !== undefined && this.onOpen(entry),
    };
    if (!Object.hasOwn(moves, event.key)) return;
    event.preventDefault();
    moves[event.key]();
  }
}

function cellClass({ numeric, stays }) {
  return `cell${numeric ? " numeric" : ""}${stays ? " stays" : ""}`;
}

/** Order of two values; what is not known comes last either way. */
function compare(a, b, sign) {
  if (a === b) return 0;
  if (a === null || a === undefined) return sign;
  if (b === null || b === undefined) return -sign;
  return a < b ? -1 : 1;
}
