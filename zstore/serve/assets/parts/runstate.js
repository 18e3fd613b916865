// What state a run, a save or a job is in, as a small word with a colour.

import { h } from "../dom.js";

const KINDS = {
  training: "good",
  committed: "good",
  uploaded: "good",
  done: "good",
  begun: "warn",
  running: "warn",
  failed: "bad",
};

/** Return the tag for `state`. */
export function stateTag(state) {
  return h("span", { class: `tag dot ${KINDS[state] ?? ""}`, test: "state" }, state);
}
