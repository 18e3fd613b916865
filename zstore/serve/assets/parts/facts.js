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

/** Whether a run in that state trains no more. */
export function hasEnded(state) {
  return state !== "training" && state !== "unknown";
}

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

/** A number, marked where it is not zero. */
export function marked(value, text) {
  return h("span", { class: value > 0 ? "tag bad dot" : null }, text);
}

/** What state a run, a save or a job is in, as a small word with a colour. */
export function stateTag(state) {
  return h("span", { class: `tag dot ${KINDS[state] ?? ""}`, test: "state" }, state);
}

/** The marks of a checkpoint as small words: the tags that moved to it, whether it is held, and its note. */
export function marks({ moving_tags: tags, held, note }) {
  return words([...tags.map((tag) => `@${tag}`), held ? "held" : null], note);
}

/** The marks of a run as small words. */
export function runMarks({ tags, group, note }, most) {
  return words([group && `group: ${group}`, ...tags], note, most);
}

function words(tags, note, most = 40) {
  const text = note?.length > most ? `${note.slice(0, most)}…` : note;
  const label = (word) => h("span", { class: "tag", title: note, test: "mark" }, h("bdi", null, word));
  return [...tags, text].filter(Boolean).flatMap((word) => [" ", label(word)]);
}

function iso(at) {
  return new Date(at * 1000).toISOString();
}
