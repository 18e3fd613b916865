// Tables that become cards on a phone, where each cell has its label.

import { h } from "../dom.js";

/** Return a table of rows below `heads`. */
export function table(attributes, heads, rows) {
  return h("table", attributes, h("thead", null, h("tr", null, heads)), h("tbody", null, rows));
}

/** Return the head of a column; `kind`: num, or null for text; `hint` is said when the pointer rests on it. */
export function heading(text, kind = null, hint = null) {
  return h("th", { scope: "col", class: kind, title: hint }, text);
}

/** Return the cell that names a row. */
export function nameCell(name) {
  return h("th", { scope: "row", class: "name" }, h("bdi", null, name));
}

/** Return a cell of a column. */
export function cell(label, content, kind = null) {
  return h("td", { class: kind, "data-label": label }, content);
}
