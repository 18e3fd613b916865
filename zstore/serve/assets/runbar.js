// The name of a run and its views, above each of them.

import { h } from "./dom.js";
import { runUrl } from "./router.js";

const TABS = [
  ["", "Training"],
  ["memory", "Memory"],
  ["checkpoints", "Checkpoints"],
];

/** Return the bar of `run` with the view `active` marked. */
export function runBar(run, active) {
  return h(
    "div",
    { class: "runbar" },
    h("h1", { test: "run-name" }, run),
    h(
      "nav",
      { class: "tabs", "aria-label": "Views of the run" },
      TABS.map(([view, text]) =>
        h(
          "a",
          { href: runUrl(run, view), test: `tab-${view || "training"}`, "aria-current": view === active ? "page" : null },
          text,
        ),
      ),
    ),
  );
}
