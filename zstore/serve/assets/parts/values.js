// Nested values, as JSON has them, in lists that open and close.

import { h } from "../dom.js";
import { counted } from "../format.js";

const MOST_OPEN = 8;

/** Return a list of what an object or list holds; of a small one the first level is open. */
export function valueList(value) {
  return listOf(value, Object.keys(value).length <= MOST_OPEN);
}

function listOf(value, open) {
  return h("ul", { class: "values" }, Object.entries(value).map(([key, inner]) => h("li", null, entryOf(key, inner, open))));
}

function entryOf(key, inner, open) {
  const name = h("bdi", { class: "mono" }, key);
  const size = inner !== null && typeof inner === "object" ? Object.keys(inner).length : 0;
  if (size === 0) return [name, ": ", h("span", { class: "mono name" }, JSON.stringify(inner))];
  const text = counted(size, Array.isArray(inner) ? "item" : "key");
  const details = h("details", null, h("summary", null, name, " ", h("span", { class: "muted" }, text)));
  // Filled when it is opened: values may be many, and deep.
  const fill = () => details.children.length === 1 && details.append(listOf(inner, false));
  details.addEventListener("toggle", fill);
  details.open = open;
  return details;
}
