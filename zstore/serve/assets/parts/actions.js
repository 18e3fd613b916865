// "Save now" and "Stop after this step": buttons for a run that trains, and how far it is with them.
//
// For tests: action-save, action-stop, action-progress.

import { api, get, post } from "../data.js";
import { h, replace } from "../dom.js";
import { bytes, count } from "../format.js";
import { runUrl } from "../router.js";
import { act, actionButton, confirmed, whyNot } from "./act.js";
import { hasEnded } from "./facts.js";
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
    const unless = (action) => (wait?.action === action ? "Already requested." : reason);
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
    if (hasEnded(state)) return "The run is not training, so there is nothing to save or stop.";
    if (state === "unknown") return "The run has no journal, so it cannot be asked to save or stop.";
    return whyNot(this.context.service);
  }

  async save() {
    await this.request("save", "Saving needs the service's token.");
  }

  async stop() {
    const sure = await confirmed({
      title: "Stop the run?",
      text:
        `${this.run} finishes its current step, and then ends as it would after its last one. ` +
        "A training loop of your own stops where it checks engine.stop_requested.",
      button: "Stop after this step",
      danger: true,
    });
    if (sure) await this.request("stop", "Stopping the run needs the service's token.");
  }

  async request(action, text) {
    let answer;
    try {
      answer = await act(() => post(api(["runs", this.run, "actions", action])), this.context, text);
    } catch (error) {
      this.say("bad", error.message);
      return;
    }
    if (answer === null) return;
    asked.set(this.run, answer);
    this.update(this.detail);
    this.watch();
  }

  /** Look every second until the run has carried it out. */
  watch() {
    this.ask();
    const wait = asked.get(this.run);
    this.say("muted", waiting(wait));
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
    const where = tag === null ? null : [" ", h("a", { href: runUrl(this.run, "checkpoints") }, "Show checkpoints")];
    replace(this.progress, h("span", { class: kind }, text), where);
  }
}

function waiting({ action }) {
  return action === "save" ? "Save requested: the run saves after its current step." : "Stop requested: the run finishes its current step.";
}

/**
 * @param {{id: string, action: string}} wait What the run was asked.
 * @param {object} detail Of the run, as it is now.
 * @returns {{text: string, kind: string, ended: boolean, tag: string | null}} How far the run is with it.
 */
export function carriedOut(wait, detail) {
  const pending = (text) => ({ text, kind: "muted", ended: false, tag: null });
  const over = (text, kind, tag = null) => ({ text, kind, ended: true, tag });
  const stopped = hasEnded(detail.summary.state);
  const done = detail.actions.find((action) => action.id === wait.id);
  if (done?.problem) return over(`The run refused to ${wait.action}: ${done.problem}`, "bad");
  if (wait.action === "stop") {
    if (stopped) return over("The run has stopped.", "good");
    return pending(done === undefined ? waiting(wait) : `Stopping after step ${count(done.step)}.`);
  }
  if (done === undefined) return stopped ? over("The run ended before it saved.", "bad") : pending(waiting(wait));
  const save = detail.saves.findLast((one) => one.step === done.step);
  if (save === undefined) return stopped ? over("The run ended before it saved.", "bad") : pending("The run is about to save.");
  if (save.state === "failed") return over(`The save failed: ${save.problem ?? "see the run's log"}`, "bad");
  if (save.state !== "begun") return over(`Saved ${save.tag} at step ${count(save.step)}.`, "good", save.tag);
  if (stopped) return over("The run ended while it saved.", "bad");
  const far = save.done_bytes === null ? "" : `, ${bytes(save.done_bytes)} so far`;
  return pending(`Saving ${save.tag} at step ${count(save.step)}${far}.`);
}
