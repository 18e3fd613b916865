// What is in a run's folder and is no checkpoint: saves that are not committed, and folders that are refused.

import { h } from "../dom.js";
import { bytes } from "../format.js";
import { cell, heading, nameCell, table } from "./tables.js";

/** Return the panel of saves and uploads that are not committed, null where there are none. */
export function unfinishedPanel(unfinished) {
  if (unfinished.length === 0) return null;
  const rows = unfinished.map(({ name, state, nbytes }) => {
    const tag = h("span", { class: state === "under way" ? "tag dot" : "tag warn" }, state);
    return h("tr", null, nameCell(name), cell("State", tag), cell("Size so far", bytes(nbytes), "num"));
  });
  return panel(
    "Not committed",
    "unfinished",
    "Saves and uploads that are running or were interrupted. The next save removes what was interrupted.",
    [heading("Folder"), heading("State"), heading("Size so far", "num")],
    rows,
  );
}

/** Return the panel of folders that look like checkpoints and are none, null where there are none. */
export function refusedPanel(refused) {
  if (refused.length === 0) return null;
  const rows = refused.map(({ name, reason }) => h("tr", null, nameCell(name), cell("Why", reason, "name")));
  return panel(
    "Refused",
    "refused",
    "These folders look like checkpoints but are not valid.",
    [heading("Folder"), heading("Why")],
    rows,
  );
}

function panel(title, test, text, heads, rows) {
  return h(
    "section",
    { class: "panel", test },
    h("h2", null, title),
    h("p", { class: "muted" }, text),
    h("div", { class: "scroll" }, table({ class: "cards" }, heads, rows)),
  );
}
