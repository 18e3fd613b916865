// "Save now" and "Stop after this step": buttons for a run that trains, and how far it is with them.
//
// For tests: action-save, action-stop, action-progress.

import { api, get, post } from "../data.js";
import { h, replace } from "../dom.js";
import { bytes } from "../format.js";
import { runUrl } from "../router.js";
import { act, actionButton, confirmed, whyNot } from "./act.js";
import { repeat } from "./poll.js";

const asked = new Map();

/** The buttons of a run. Requests outlive the view: the next one of the run shows them again. */
export class RunActions {
  /**
   * @param {string} run
   * @param {object} context Of the view.
   * @param {() => void} [done] Called when the run has carried a request out.
   */
  constructor(run, context, done = () => {}) {
    Object.assign(this, { run, context, done });
    this.detail = null;
    this.buttons = h("div", { class: "row" });
    this.progress = h("div", { class: "action-progress", role: "status", test: "action-progress" });
    this.element = h("div", { class: "run-actions" }, this.buttons, this.progress);
    this.ask = () => {};
    if (asked.has(run)) this.watch();
  }

  /** Show what is possible, by `GET /api/runs/{run}`. */
  update(detail) {
    this.detail = detail;
    const reason = this.reason();
    const wait = asked.get(this.run);
    const unless = (action) => (wait?.action === action ? "The run was asked already." : reason);
    replace(
      this.buttons,
      actionButton("Save now", "action-save", () => this.save(), unless("save")),
      actionButton("Stop after this step", "action-stop", () => this.stop(), unless("stop"), "danger"),
      reason === null ? null : h("span", { class: "hint", test: "action-reason" }, reason),
    );
  }

  close() {
    this.ask();
  }

  reason() {
    const { state } = this.detail.summary;
    if (state === "stopped") return "The run does not train: there is nothing to save or stop.";
    if (state === "unknown") return "The run has no journal: it cannot be asked to save or stop.";
    return whyNot(this.context.service);
  }

  async save() {
    await this.request("save", "The token is needed to have the run save.");
  }

  async stop() {
    const sure = await confirmed({
      title: "Stop the run?",
      text:
        `${this.run} finishes the step it is at, and then ends as after its last one. ` +
        "A loop of your own does so where it looks at engine.stop_requested.",
      button: "Stop after this step",
      danger: true,
    });
    if (sure) await this.request("stop", "The token is needed to stop the run.");
  }

  async request(action, text) {
    const before = new Set((this.detail?.saves ?? []).map(keyOf));
    try {
      const answer = await act(() => post(api(["runs", this.run, "actions", action])), this.context, text);
      if (answer === null) return;
    } catch (error) {
      this.say("bad", error.message);
      return;
    }
    asked.set(this.run, { action, before });
    this.update(this.detail);
    this.watch();
  }

  /** Look every second until the run has carried it out. */
  watch() {
    this.ask();
    const wait = asked.get(this.run);
    this.say("muted", "Asked: the run takes it up at the end of its step.");
    const look = async () => {
      const detail = await get(api(["runs", this.run]));
      const { text, kind, ended, tag } = carriedOut(wait, detail);
      this.say(kind, text, tag);
      if (ended) asked.delete(this.run);
      this.update(detail);
      if (!ended) return 1;
      this.context.announce(text);
      this.done();
      return null;
    };
    this.ask = repeat(look, (error) => this.say("bad", error.message), 0.3);
  }

  say(kind, text, tag = null) {
    if (this.progress.textContent === text) return;
    const where = tag === null ? null : [" ", h("a", { href: runUrl(this.run, "checkpoints") }, "See the checkpoints")];
    replace(this.progress, h("span", { class: kind }, text), where);
  }
}

function keyOf(save) {
  return `${save.at} ${save.tag} ${save.state}`;
}

/**
 * @param {{action: string, before: Set<string>}} wait
 * @param {object} detail Of the run, as it is now.
 * @returns {{text: string, kind: string, ended: boolean, tag: string | null}} How far the run is with it.
 */
export function carriedOut({ action, before }, detail) {
  const stopped = detail.summary.state === "stopped";
  if (action === "stop") {
    if (stopped) return { text: "The run has stopped.", kind: "good", ended: true, tag: null };
    return { text: "Asked to stop: the run finishes its step.", kind: "muted", ended: false, tag: null };
  }
  const save = detail.saves.filter((other) => !before.has(keyOf(other))).at(-1);
  if (save === undefined) {
    if (stopped) return { text: "The run ended before it saved.", kind: "bad", ended: true, tag: null };
    return { text: "Asked to save: the run finishes its step.", kind: "muted", ended: false, tag: null };
  }
  if (save.state === "begun") {
    const far = save.done_bytes === null ? "" : `, ${bytes(save.done_bytes)} so far`;
    return { text: `Saving ${save.tag} at step ${save.step}${far}.`, kind: "muted", ended: false, tag: null };
  }
  if (save.state === "failed") {
    return { text: `The save failed: ${save.problem ?? "see the run's log"}`, kind: "bad", ended: true, tag: null };
  }
  return { text: `Saved as ${save.tag} at step ${save.step}.`, kind: "good", ended: true, tag: save.tag };
}
