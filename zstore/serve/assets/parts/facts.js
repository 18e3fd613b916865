// Numbers with their names, times, and states.

import { h } from "../dom.js";
import { ago, when, zone } from "../format.js";

const KINDS = {
  training: "good",
  committed: "good",
  uploaded: "good",
  done: "good",
  begun: "warn",
  running: "warn",
  failed: "bad",
  killed: "bad",
  lost: "bad",
};

/** An entry of a list of facts; `hint` is said when the pointer rests on it. */
export function fact(name, value, { test = null, hint = null } = {}) {
  return h("div", { title: hint }, h("dt", null, name), h("dd", { test }, value));
}

/** How long ago a time was, with its date as a hint. */
export function age(at) {
  return h("time", { datetime: iso(at), title: `${when(at)} ${zone(at)}` }, ago(at));
}

/** A time as date and clock. */
export function date(at) {
  return h("time", { datetime: iso(at), title: `${zone(at)}, ${ago(at)}` }, when(at));
}

/** What state a run, a save or a job is in, as a small word with a colour. */
export function stateTag(state) {
  return h("span", { class: `tag dot ${KINDS[state] ?? ""}`, test: "state" }, state);
}

function iso(at) {
  return new Date(at * 1000).toISOString();
}
