// What stands in a view's place while there is nothing to show in it.

import { get } from "./data.js";
import { h, replace } from "./dom.js";

/** A box that keeps its place while data comes. */
export function loading(text = "Loading") {
  return h("p", { class: "loading", test: "loading", role: "status" }, text);
}

/** Nothing is there: why, and the commands that change that. */
export function empty(title, text, ...commands) {
  return h(
    "section",
    { class: "panel empty", test: "empty" },
    h("h2", null, title),
    text ? h("p", null, text) : null,
    commands.map((command) => h("pre", { class: "command", tabindex: "0" }, command)),
  );
}

/** What went wrong, in the service's words, and a button to try again. */
export function problem(error, retry = null) {
  return h(
    "section",
    { class: "panel problem", role: "alert", test: "problem" },
    h("h2", null, TITLES[error.status] ?? "Something went wrong"),
    h("p", null, error.message ?? String(error)),
    retry === null ? null : h("button", { type: "button", onclick: retry, test: "retry" }, "Try again"),
  );
}

/**
 * Get `path`, and call `show` with the answer. Meanwhile `text` stands in `place`; if it fails, what went wrong and a button to
 * try again. Nothing happens once `signal` has ended it.
 */
export async function load(place, path, { signal, context, text }, show) {
  replace(place, h("p", { class: "loading", role: "status" }, text));
  try {
    const answer = await get(path, { signal });
    if (!signal.aborted) show(answer);
  } catch (error) {
    if (error.name === "AbortError" || signal.aborted) return;
    if (error.status === 401) context.reload();
    else replace(place, problem(error, () => void load(place, path, { signal, context, text }, show)));
  }
}

const TITLES = {
  0: "No answer",
  401: "A token is needed",
  403: "Not allowed",
  404: "Not found",
  409: "Conflict",
  503: "The service is busy",
  507: "The disk is full",
};
