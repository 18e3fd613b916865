// Pruning: the rules of what stays, what they would remove, and only then the removal.
//
// For tests: prune-form with keep-last, keep-every, keep-metric, keep-mode, keep-tags; prune-dry-run, prune-problem,
// prune-result, prune-fates, prune-remove, prune-job.

import { api, post } from "../data.js";
import { h, replace, titled } from "../dom.js";
import { bytes, count, counted } from "../format.js";
import { note, runUrl } from "../router.js";
import { act, actionButton, confirmed } from "./act.js";
import { Grid } from "./grid.js";
import { showJob } from "./job.js";

const WHY = {
  last: "one of the newest",
  every: "its step is a multiple",
  best: "best by the metric",
  tag: "its tag is named",
  held: "held",
};
const INTRODUCTION =
  "A checkpoint is kept if any rule keeps it; the newest is always kept. Nothing is removed before you have seen the list.";
const TOKEN_TEXT = "Pruning needs the service's token.";

/** The panel of a run in which it is pruned. */
export class PrunePanel {
  /**
   * @param {object} options
   * @param {string} options.run
   * @param {object} options.context Of the view.
   * @param {string[]} options.metrics Names of metrics that checkpoints have.
   * @param {URLSearchParams} options.query Rules as they stand in the URL.
   * @param {(keys: Set<string>) => void} options.onPlan Called with the checkpoints that would go.
   * @param {() => void} options.onRemoved Called when a prune ended.
   * @param {() => void} options.onClose Called when the panel is to go.
   */
  constructor({ run, context, metrics, query, onPlan, onRemoved, onClose }) {
    Object.assign(this, { run, context, onPlan, onRemoved });
    this.fields = makeFields(metrics, query);
    this.trouble = h("p", { class: "bad name", role: "alert", test: "prune-problem" });
    this.result = h("div", { class: "prune-result", test: "prune-result" });
    this.grid = null;
    this.stopJob = () => {};
    this.button = h("button", { type: "submit", class: "primary", test: "prune-dry-run" }, "Show what would be removed");
    this.element = h(
      "section",
      { class: "panel prune", "aria-label": "Prune", test: "prune" },
      titled(h("h2", null, "Prune"), h("button", { type: "button", class: "quiet small", onclick: onClose, test: "close-prune" }, "Close")),
      h("p", { class: "muted" }, INTRODUCTION),
      h(
        "form",
        { onsubmit: (event) => this.tryOut(event), oninput: () => this.forget(), test: "prune-form" },
        formRows(this.fields),
        this.button,
      ),
      this.trouble,
      this.result,
    );
  }

  focus() {
    this.fields.last.focus();
  }

  close() {
    this.grid?.close();
    this.stopJob();
  }

  /** What the form says, as `POST /api/runs/{run}/prune` takes it. */
  rules() {
    const { last, every, metric, mode, tags } = this.fields;
    return {
      keep_last: last.value === "" ? null : Number(last.value),
      keep_every: every.value === "" ? null : Number(every.value),
      keep_best: metric.value === "" ? null : `${metric.value}:${mode.value}`,
      keep_tags: tags.value.split(/[\s,]+/).filter((tag) => tag !== ""),
    };
  }

  /** The rules were changed: what was shown no longer holds. */
  forget() {
    this.grid?.close();
    this.grid = null;
    replace(this.result);
    replace(this.trouble);
    this.onPlan(new Set());
  }

  async tryOut(event) {
    event.preventDefault();
    this.forget();
    const rules = this.rules();
    const { keep_last, keep_every, keep_best, keep_tags } = rules;
    note({ keep_last, keep_every, keep_best, keep_tags: keep_tags.join(",") });
    if (keep_last === null && keep_every === null && keep_best === null && keep_tags.length === 0) {
      replace(this.trouble, "Fill in at least one rule.");
      return;
    }
    await this.plan(rules);
  }

  /** Ask what would go, and show it. */
  async plan(rules) {
    const answer = await this.send({ ...rules, plan: null });
    if (answer !== null) this.showPlan(rules, answer);
  }

  async send(body) {
    this.button.disabled = true;
    try {
      return await act(() => post(api(["runs", this.run, "prune"]), body), this.context, TOKEN_TEXT);
    } catch (error) {
      this.refusal = error.status;
      replace(this.trouble, error.message);
      return null;
    } finally {
      this.button.disabled = false;
    }
  }

  showPlan(rules, plan) {
    const going = plan.fates.filter((fate) => fate.reasons.length === 0);
    const staying = plan.fates.length - going.length;
    this.onPlan(new Set(going.map((fate) => fate.checkpoint)));
    if (going.length === 0) {
      const all = counted(staying, "checkpoint");
      replace(this.result, h("p", { role: "status", test: "prune-summary" }, `Nothing to remove: these rules keep all ${all}.`));
      return;
    }
    const label = "What happens to each checkpoint";
    this.grid = new Grid({ label, test: "prune-fates", keyOf: (fate) => fate.checkpoint });
    this.grid.element.classList.add("short");
    const remove = () => void this.remove(rules, plan, going);
    const size = going.reduce((sum, fate) => sum + fate.size_bytes, 0);
    replace(
      this.result,
      h(
        "p",
        { role: "status", test: "prune-summary" },
        h("strong", null, `${counted(going.length, "checkpoint")} would be removed, ${count(staying)} kept. `),
        `They take ${bytes(size)} on disk. Removing them frees ${bytes(plan.freed_bytes)}; files shared with other checkpoints stay.`,
      ),
      this.grid.element,
      actionButton(`Remove ${counted(going.length, "checkpoint")}`, "prune-remove", remove, null, "danger"),
    );
    this.grid.show([...going, ...plan.fates.filter((fate) => fate.reasons.length > 0)], this.columns());
  }

  /** Another save or prune came in between: nothing was removed, and what would go now is shown. */
  async planAnew(rules) {
    const why = this.trouble.textContent;
    this.forget();
    replace(this.trouble, `Nothing was removed: ${why} Updating the list.`);
    await this.plan(rules);
    replace(this.trouble, `Nothing was removed: ${why} The list below is now up to date.`);
  }

  columns() {
    const fateOf = (fate) =>
      fate.reasons.length === 0
        ? h("span", { class: "bad" }, "will be removed")
        : `stays: ${fate.reasons.map((reason) => WHY[reason] ?? reason).join(", ")}`;
    const href = (fate) => runUrl(this.run, `checkpoint/${fate.checkpoint}`);
    const link = (fate) => h("a", { href: href(fate), tabindex: "-1", title: fate.checkpoint }, h("bdi", null, fate.tag));
    const step = (fate) => count(fate.step);
    const size = (fate) => bytes(fate.size_bytes);
    const reasons = (fate) => fate.reasons.join();
    return [
      { key: "tag", label: "Checkpoint", width: "minmax(8rem, 1.2fr)", cell: link, value: (fate) => fate.tag },
      { key: "fate", label: "What happens", width: "minmax(12rem, 2fr)", cell: fateOf, value: reasons },
      { key: "step", label: "Step", width: "5rem", numeric: true, cell: step, value: (fate) => fate.step },
      { key: "size", label: "Size", width: "6rem", numeric: true, cell: size, value: (fate) => fate.size_bytes },
    ];
  }

  async remove(rules, plan, going) {
    const sure = await confirmed({
      title: `Remove ${counted(going.length, "checkpoint")}?`,
      text: `This frees ${bytes(plan.freed_bytes)} and cannot be undone.`,
      button: `Remove ${counted(going.length, "checkpoint")}`,
      danger: true,
    });
    if (!sure) return;
    replace(this.trouble);
    this.refusal = 0;
    const answer = await this.send({ ...rules, plan: plan.plan });
    if (answer === null) {
      if (this.refusal === 409) await this.planAnew(rules);
      return;
    }
    this.forget();
    const place = h("div", { test: "prune-job" });
    replace(this.result, place);
    const ended = (job) => {
      this.context.announce(job.state === "done" ? "The checkpoints are removed." : `The prune failed: ${job.problem}`);
      this.onRemoved();
    };
    this.stopJob = showJob(place, answer.job, ended);
  }
}

function makeFields(metrics, query) {
  const number = (id, name, test) =>
    h("input", { id, type: "number", min: "1", step: "1", inputmode: "numeric", value: query.get(name) ?? "", test });
  const [metric, mode] = splitBest(query.get("keep_best") ?? "");
  const names = metric === "" || metrics.includes(metric) ? metrics : [metric, ...metrics];
  const option = (value, text, chosen) => h("option", { value, selected: value === chosen }, text);
  const none = names.length === 0;
  return {
    last: number("keep-last", "keep_last", "keep-last"),
    every: number("keep-every", "keep_every", "keep-every"),
    metric: h(
      "select",
      { id: "keep-metric", test: "keep-metric", disabled: none, title: none ? "No checkpoint has a metric." : null },
      option("", none ? "no metrics" : "none", metric),
      names.map((name) => option(name, name.slice(0, 80), metric)),
    ),
    mode: h(
      "select",
      { "aria-label": "Which value is best", test: "keep-mode" },
      option("min", "smallest", mode),
      option("max", "largest", mode),
    ),
    tags: h("input", {
      id: "keep-tags",
      type: "text",
      value: (query.get("keep_tags") ?? "").replaceAll(",", " "),
      placeholder: "best-* release",
      spellcheck: "false",
      autocomplete: "off",
      test: "keep-tags",
    }),
  };
}

function splitBest(text) {
  const colon = text.lastIndexOf(":");
  return colon < 0 ? ["", "min"] : [text.slice(0, colon), text.slice(colon + 1)];
}

function formRows({ last, every, metric, mode, tags }) {
  return h(
    "div",
    { class: "fields" },
    h("div", null, h("label", { for: "keep-last" }, "Keep the newest"), last),
    h("div", null, h("label", { for: "keep-every" }, "Keep steps that are multiples of"), every),
    h("div", null, h("label", { for: "keep-metric" }, "Keep the best by"), h("div", { class: "row nowrap" }, metric, mode)),
    h("div", null, h("label", { for: "keep-tags" }, "Keep tags (names or patterns)"), tags),
  );
}
