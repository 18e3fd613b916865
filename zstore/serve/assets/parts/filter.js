// The field that a list is filtered by.

import { h } from "../dom.js";
import { here, note } from "../router.js";

/** Return the field, with what the URL says; `changed` is called with what is typed, which the URL keeps. */
export function filterField({ label, placeholder = "Filter by name", test = "filter" }, changed) {
  return h("input", {
    type: "search",
    "aria-label": label,
    title: label,
    placeholder,
    value: filterText(),
    oninput: (event) => {
      note({ filter: event.target.value });
      changed(event.target.value);
    },
    test,
  });
}

/** Return the filter that the URL names. */
export function filterText() {
  return here().query.get("filter") ?? "";
}

/** Return whether a text has all words of a filter; case does not count. */
export function fits(text, filter) {
  const lower = text.toLowerCase();
  return filter.toLowerCase().split(/\s+/).every((word) => lower.includes(word));
}
