// Where a run is: its state, step and speed, and a save that is under way.

import { h, replace } from "../dom.js";
import { ago, count, counted, duration, number, percent, when } from "../format.js";
import { runUrl } from "../router.js";
import { stateTag } from "./facts.js";
import { Saving } from "./saving.js";

const RECENT_STEPS = 50;

/** The panel at the head of a run. */
export class RunStatus {
  constructor(run) {
    this.run = run;
    this.state = h("div", { class: "row state" });
    this.live = h("span", { class: "tag dot", test: "live", role: "status" }, "connecting");
    this.isLive = null;
    this.bar = h("progress", { max: "1", value: "0", "aria-label": "Steps done" });
    this.facts = new Map();
    this.list = h("dl", { class: "facts" });
    this.saving = new Saving(run);
    this.element = h("section", { class: "panel status", "aria-label": "Status" }, this.state, this.bar, this.list, this.saving.element);
    this.timer = setInterval(() => this.showAge(), 1000);
  }

  close() {
    clearInterval(this.timer);
    this.saving.close();
  }

  setLive(isLive) {
    this.isLive = isLive;
    this.live.textContent = isLive ? "live" : "connection lost, trying again";
    this.live.className = `tag dot ${isLive ? "good" : "bad"}`;
    this.live.hidden = isLive && this.shown !== "training";
  }

  update(detail, steps) {
    const { summary, sessions } = detail;
    this.updatedAt = Math.max(summary.updated_at ?? 0, steps.columns.at?.at(-1) ?? 0) || null;
    if (this.shown !== summary.state) replace(this.state, stateTag(summary.state), this.live);
    this.shown = summary.state;
    this.live.hidden = (this.isLive !== false && summary.state !== "training");
    const step = Math.max(summary.step ?? 0, steps.last ?? 0);
    const total = summary.total_steps;
    this.bar.hidden = !total;
    this.bar.value = total ? Math.min(1, step / total) : 0;
    this.fact("Step", total ? `${count(step)} of ${count(total)}` : step > 0 ? count(step) : "–", "step");
    this.fact("Loss", number(last(steps, "loss") ?? summary.loss), "loss");
    this.fact("Tokens/s, recent mean", number(mean(steps, "tokens_per_s", "step_s") ?? summary.tokens_per_s), "speed");
    const stepTime = mean(steps, "step_s");
    this.fact("Time per step", duration(stepTime), "step-time");
    const stall = mean(steps, "stall_s");
    if (stall !== null && stepTime > 0) this.fact("Waiting", percent(stall / stepTime), "stalled");
    if (total > step && stepTime !== null && summary.state === "training") this.fact("Remaining", duration((total - step) * stepTime), "remaining");
    else this.dropFact("Remaining");
    if (summary.error) this.fact("Error", h("span", { class: "bad" }, summary.error), "error");
    else this.dropFact("Error");
    const session = sessions.at(-1);
    if (session) {
      this.fact("Ranks", count(session.world_size), "ranks");
      this.fact("Loop", session.loop, "loop");
    }
    this.fact("Checkpoints", newest(this.run, summary), "newest");
    this.fact("Updated", ago(this.updatedAt), "updated", when(this.updatedAt));
    this.saving.update(detail);
  }

  showAge() {
    if (this.updatedAt !== undefined) this.fact("Updated", ago(this.updatedAt), "updated", when(this.updatedAt));
  }

  /** Show a fact; its place stays once it is there. */
  fact(name, value, test, title = null) {
    let place = this.facts.get(name);
    if (place === undefined) {
      place = h("dd", { test: `fact-${test}` });
      this.facts.set(name, place);
      this.list.append(h("div", null, h("dt", null, name), place));
    }
    const key = value instanceof Node ? value.textContent : value;
    if (place.kept !== key) replace(place, value);
    place.kept = key;
    if (title !== null && place.title !== title) place.title = title;
  }

  dropFact(name) {
    this.facts.get(name)?.parentElement.remove();
    this.facts.delete(name);
  }
}

function newest(run, summary) {
  if (summary.newest === null) return summary.num_checkpoints === 0 ? "none" : count(summary.num_checkpoints);
  const { checkpoint, tag } = summary.newest;
  return h(
    "span",
    null,
    `${count(summary.num_checkpoints)}, newest `,
    h("a", { href: runUrl(run, `checkpoint/${checkpoint}`), "aria-label": `Newest of ${counted(summary.num_checkpoints, "checkpoint")}, ${tag}` }, tag),
  );
}

function last(steps, name) {
  const values = steps.columns[name] ?? [];
  for (let index = values.length - 1; index >= 0 && index >= values.length - RECENT_STEPS; index--) {
    if (values[index] !== null) return values[index];
  }
  return null;
}

/** Return the mean of the newest values of a column, each weighing as much as that of `weight` says; null without any. */
function mean(steps, name, weight = null) {
  const values = steps.columns[name] ?? [];
  let [sum, total] = [0, 0];
  for (let index = Math.max(0, values.length - RECENT_STEPS); index < values.length; index++) {
    const by = weight === null ? 1 : (steps.columns[weight]?.[index] ?? 0);
    if (values[index] === null) continue;
    sum += values[index] * by;
    total += by;
  }
  return total > 0 ? sum / total : null;
}
