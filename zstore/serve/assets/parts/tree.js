// A tree of arrays, of any size: arrows, Home, End, Page keys, `*` and typing move in it. Only rows in sight are in the
// document.

import { h } from "../dom.js";
import { findArray, firstOpen, match, rowsOf } from "./names.js";
import { VirtualList } from "./virtual.js";

const ROWS_AT_FIRST = 24;
const TYPING_MS = 700;

/** A tree over `buildTree`'s root. */
export class TreeView {
  /**
   * @param {object} options
   * @param {string} options.label What it is a tree of, for screen readers.
   * @param {string} options.test Value of `data-test` of the tree.
   * @param {(item: object | null, sums: {count: number, nbytes: number, tally: Record<string, number>}) => HTMLElement[]}
   *   options.cells What stands in a row behind the label: of an array, or, of all that are shown in a group, the sums.
   * @param {(item: object) => void} options.onOpen Called when an array is chosen.
   * @param {string} [options.kind] Class that sets the widths of columns.
   */
  constructor({ label, test, cells, onOpen, kind = "" }) {
    Object.assign(this, { cells, onOpen, kind });
    this.body = h("div", { role: "presentation" });
    this.element = h("div", { class: `tree ${kind}`, role: "tree", tabindex: "0", "aria-label": label, test }, this.body);
    this.list = new VirtualList(this.element, this.body, (index) => this.row(index), () => this.choose());
    this.element.addEventListener("keydown", (event) => this.press(event));
    this.typed = { text: "", at: -Infinity };
    this.setRoot({ children: [] });
  }

  /** Return the tree below the heads of its columns, texts and classes, with `detail` beside it. */
  beside(detail, heads, hint) {
    const cells = heads.map(([text, kind]) => h("span", { class: `cell ${kind}` }, text));
    const head = h("div", { class: `tree-head ${this.kind}`, "aria-hidden": "true" }, cells);
    return h("div", { class: "two-panes" }, h("div", null, head, this.element, h("p", { class: "hint" }, hint)), detail);
  }

  /** Show another tree. */
  setRoot(root) {
    this.root = root;
    this.open = firstOpen(root, ROWS_AT_FIRST);
    this.found = null;
    this.selected = null;
    this.list.active = 0;
    this.layOut();
  }

  /** Show only arrays whose names hold all words of `text`. Returns how many do, null where there is no word. */
  filter(text) {
    const at = this.rows[this.list.active]?.node ?? null;
    this.found = match(this.root, text);
    this.closed = new Set();
    this.element.scrollTop = 0;
    this.layOut(at);
    this.list.moveTo(this.list.active);
    return this.found === null ? null : (this.found.get(this.root)?.count ?? 0);
  }

  /** Select an array by its name and bring it in sight. Returns whether there is one. */
  select(name) {
    const node = findArray(this.root, name);
    this.selected = node?.path ?? null;
    if (node !== null) {
      for (let parent = node.parent; parent !== null; parent = parent.parent) {
        this.open.add(parent.path);
        this.closed?.delete(parent.path);
      }
      this.layOut();
      const index = this.rows.findIndex((row) => row.node === node);
      if (index >= 0) this.list.moveTo(index, true);
    }
    this.list.redraw();
    return node !== null;
  }

  close() {
    this.list.close();
  }

  /** Find the rows that are shown and draw them; the active one is that of `active` where it is among them. */
  layOut(active = null) {
    const isOpen = (node) => (this.found === null ? this.open.has(node.path) : !this.closed.has(node.path));
    const isShown = this.found === null ? null : (node) => this.found.has(node);
    this.rows = rowsOf(this.root, isOpen, isShown);
    const place = active === null ? this.list.active : this.rows.findIndex((row) => row.node === active);
    this.list.show(this.rows.length, place);
  }

  row(index) {
    const { node, level, position, siblings, open } = this.rows[index];
    return h(
      "div",
      {
        class: "tree-row",
        role: "treeitem",
        "aria-level": level,
        "aria-posinset": position,
        "aria-setsize": siblings,
        "aria-expanded": open === null ? null : String(open),
        "aria-selected": String(node.item !== null && node.path === this.selected),
        "data-test": node.item === null ? "tree-group" : "tree-array",
        "data-name": node.path.slice(0, 200),
      },
      h(
        "span",
        { class: "tree-label", title: node.path, style: { "--level": level - 1 } },
        h("span", { class: "twisty", "aria-hidden": "true" }, open === null ? "" : open ? "▾" : "▸"),
        h("bdi", null, shownLabel(node)),
      ),
      this.cells(node.item, this.found?.get(node) ?? node),
    );
  }

  /** Open or close a group, or choose an array. */
  choose() {
    const row = this.rows[this.list.active];
    if (row === undefined) return;
    if (row.open !== null) {
      this.setOpen(row.node, !row.open);
      return;
    }
    this.selected = row.node.path;
    this.list.redraw();
    this.onOpen(row.node.item);
  }

  setOpen(node, open) {
    const paths = this.found === null ? this.open : this.closed;
    if (open === (this.found === null)) paths.add(node.path);
    else paths.delete(node.path);
    const top = this.element.scrollTop;
    this.layOut();
    this.element.scrollTop = top;
    this.list.update();
  }

  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const row = this.rows[this.list.active];
    if (row === undefined) return;
    const moves = {
      ...this.list.moves,
      ArrowRight: () => this.into(row),
      ArrowLeft: () => (row.open === true ? this.setOpen(row.node, false) : this.toParent(row)),
      Enter: () => this.choose(),
      " ": () => this.choose(),
      "*": () => this.openSiblings(row),
    };
    if (Object.hasOwn(moves, event.key)) {
      this.typed.at = -Infinity;
      moves[event.key]();
    } else if (event.key.length === 1) this.type(event.key);
    else return;
    event.preventDefault();
  }

  into(row) {
    if (row.open === false) this.setOpen(row.node, true);
    else if (row.open === true) this.list.moveTo(this.list.active + 1);
  }

  toParent(row) {
    const index = this.rows.findIndex((other) => other.node === row.node.parent);
    if (index >= 0) this.list.moveTo(index);
  }

  openSiblings(row) {
    for (const node of row.node.parent.children) {
      if (node.item !== null) continue;
      if (this.found === null) this.open.add(node.path);
      else this.closed.delete(node.path);
    }
    this.layOut();
    this.list.moveTo(this.rows.findIndex((other) => other.node === row.node));
  }

  /** Go to the next row whose label begins with what was typed. */
  type(key) {
    const now = performance.now();
    const going = now - this.typed.at < TYPING_MS;
    this.typed = { text: (going ? this.typed.text : "") + key.toLowerCase(), at: now };
    const from = this.list.active + (going ? 0 : 1);
    for (let step = 0; step < this.rows.length; step++) {
      const index = (from + step) % this.rows.length;
      if (this.rows[index].node.label.toLowerCase().startsWith(this.typed.text)) return this.list.moveTo(index);
    }
  }
}

/** The label of a node without the separator behind it. */
function shownLabel({ label, item }) {
  const text = item === null ? label.slice(0, -1) : label;
  return text === "" ? "(no name)" : text;
}
