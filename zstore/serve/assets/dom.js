// Elements made of text nodes only: nothing that comes from data is ever parsed as HTML. And the pieces that views share.

import { NOTHING, ago, when } from "./format.js";

/**
 * Return an element. `attributes`: `on*` functions become listeners, `style` is an object of CSS properties, `test` becomes
 * `data-test`, `true` an empty attribute; null and false are left out. Children are nodes, text, numbers, or lists of them.
 */
export function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) set(element, name, value);
  element.append(...nodes(children));
  return element;
}

/** Put `children` into `container` in place of what it held. */
export function replace(container, ...children) {
  container.replaceChildren(...nodes(children));
  return container;
}

/** Put `make(data)` into `container`, unless `data` is what it shows already: focus and selected text stay. */
export function refill(container, data, make) {
  const text = JSON.stringify(data);
  if (container.shown !== text) replace(container, make(data));
  container.shown = text;
}

function set(element, name, value) {
  if (value === null || value === undefined || value === false) return;
  if (typeof value === "function" && name.startsWith("on")) {
    element.addEventListener(name.slice(2).toLowerCase(), value);
  } else if (name === "style") {
    for (const [property, text] of Object.entries(value)) element.style.setProperty(property, String(text));
  } else if (name === "test") {
    element.dataset.test = value;
  } else if (name === "href" && !/^(#|zarr\/|weights\/)/.test(value)) {
    throw new Error(`links lead to places of this page, got ${value}`);
  } else {
    element.setAttribute(name, value === true ? "" : String(value));
  }
}

function nodes(children) {
  return children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : document.createTextNode(String(child))));
}

/** Return the address of a run's view: `view` is "", memory, checkpoints or checkpoint/<path>. */
export function runUrl(run, view = "") {
  return `#/${["run", run, ...view.split("/")].filter(Boolean).map(encodeURIComponent).join("/")}`;
}

/** Return a row that begins with a title, and has `rest` at its end. */
export function titled(title, ...rest) {
  return h("div", { class: "row" }, title, h("span", { class: "spring" }), rest);
}

/** Return a panel with a heading; `test` names it for tests. */
export function panel(title, test, ...children) {
  return h("section", { class: "panel", test }, title === null ? null : h("h2", null, title), children);
}

/** Return an entry of `facts`; `hint` is said when the pointer rests on it. */
export function fact(name, value, { test = null, hint = null } = {}) {
  return h("div", { title: hint }, h("dt", null, name), h("dd", { test }, value));
}

/** Return a list of facts. */
export function facts(...entries) {
  return h("dl", { class: "facts" }, entries);
}

/** Return how long ago a time was, with its date as a hint. */
export function age(at) {
  return at === null ? NOTHING : h("time", { title: when(at) }, ago(at));
}

const KINDS = {
  training: "good",
  committed: "good",
  uploaded: "good",
  done: "good",
  begun: "warn",
  lost: "bad",
  failed: "bad",
  killed: "bad",
};

/** Return the state of a run or a save, as a small word with a colour. */
export function stateTag(state) {
  return h("span", { class: `tag ${KINDS[state] ?? "muted"}`, test: "state" }, state);
}

/** Return a swatch in the colour of a series; `kind` is another class. */
export function swatch(index, kind = "") {
  return h("i", { class: `swatch ${kind}`, style: { "--c": `var(--series-${index})` } });
}

/** Return the panel of what is not there: why, and commands that change that. */
export function empty(title, text, ...commands) {
  const typed = commands.map((command) => h("pre", { tabindex: "0" }, command));
  return panel(title, "empty", h("p", null, text), typed);
}

/** Return the panel of an error, in the service's words, with a button to try again. */
export function problem(error, retry) {
  const titles = { 0: "No answer", 401: "A token is needed", 403: "Not allowed", 404: "Not found" };
  return h(
    "section",
    { class: "panel problem", role: "alert", test: "problem" },
    h("h2", null, titles[error.status] ?? "Something went wrong"),
    h("p", null, error.message ?? String(error)),
    h("button", { type: "button", onclick: retry, test: "retry" }, "Try again"),
  );
}
