// A run as it trains: where it is, its curves, its saves, and the processes that took part.

import { Charts } from "./charts.js";
import { append, curvesOf, lastNumber, recent } from "./curves.js";
import { age, empty, fact, facts, h, panel, refill, replace, runUrl, stateTag } from "./dom.js";
import { ago, bytes, count, counted, duration, number, percent, when } from "./format.js";
import { api, get, repeat } from "./service.js";
import { Table } from "./table.js";

const EVERY_S = 2;
const POINTS = 1000;
const SAVES = [
  { key: "tag", label: "Save" },
  { key: "state", label: "State", cell: saveState },
  { key: "at", label: "When", text: when, numeric: true },
  { key: "stall_s", label: "Stall", text: duration, numeric: true, hint: "How long training waited for it" },
  { key: "elapsed_s", label: "Took", text: duration, numeric: true, wide: true, hint: "From its start to its commit" },
  { key: "linked_bytes", label: "Linked", text: bytes, numeric: true, wide: true, hint: "From an earlier checkpoint" },
  { key: "written_bytes", label: "Written", text: bytes, numeric: true, hint: "New bytes" },
];

export async function show(container, { run }) {
  const view = new RunView(run);
  await view.load();
  replace(container, view.element);
  view.draw();
  const showLost = (isLive) => (view.lost.hidden = isLive);
  const end = repeat(() => view.follow(), EVERY_S, showLost);
  return () => {
    end();
    view.charts.close();
  };
}

class RunView {
  constructor(run) {
    this.run = run;
    this.path = ["runs", run];
    this.state = h("span");
    this.lost = h("span", { class: "tag bad", role: "status", hidden: true, test: "lost" }, "no answer, trying again");
    this.bar = h("progress", { max: "1", "aria-label": "Steps done" });
    this.facts = h("div");
    this.charts = new Charts();
    this.nothing = h("div");
    this.saves = new Table({ columns: SAVES, label: "Saves", noun: "save", test: "save", key: keyOf, sort: "-at" });
    this.savesPanel = panel("Saves", "saves", this.saves.element);
    this.lists = h("div", { class: "view" });
    const status = h("div", { class: "row" }, this.state, this.lost);
    this.element = h(
      "div",
      { class: "view" },
      h("section", { class: "panel", "aria-label": "Status" }, status, this.bar, this.facts),
      this.nothing,
      this.charts.element,
      this.savesPanel,
      this.lists,
    );
  }

  async load() {
    this.placement = await get(api([...this.path, "placement"])).catch(() => null);
    await Promise.all([this.loadDetail(), this.loadSteps()]);
  }

  async loadDetail() {
    this.detail = await get(api(this.path));
  }

  async loadSteps() {
    const { columns, epoch } = await get(api([...this.path, "steps"], { points: POINTS }));
    Object.assign(this, { columns, epoch, numLive: 0 });
  }

  /** Ask what is new; for all steps again once live ones have become many, or others took the place of some. */
  async follow() {
    const after = this.columns.step.at(-1) ?? null;
    const [, steps] = await Promise.all([
      this.loadDetail(),
      get(api([...this.path, "steps"], { after, points: POINTS })),
    ]);
    this.numLive += steps.columns.step.length;
    if (steps.epoch !== this.epoch || this.numLive > POINTS / 4) await this.loadSteps();
    else this.columns = append(this.columns, steps.columns);
    this.draw();
  }

  draw() {
    const { columns, detail } = this;
    const { summary, sessions } = detail;
    const hasSteps = columns.step.length > 0;
    this.drawStatus();
    this.charts.element.hidden = !hasSteps;
    if (hasSteps) this.charts.show(columns.step, curvesOf(columns, this.placement), marksOf(detail));
    refill(this.nothing, hasSteps ? null : summary, (known) => (known === null ? null : nothingYet(known)));
    this.savesPanel.hidden = detail.saves.length === 0;
    this.saves.show(detail.saves);
    refill(this.lists, [sessions, summary.state], () => sessionsPanel(sessions, summary.state));
  }

  drawStatus() {
    const { columns } = this;
    const { summary, sessions } = this.detail;
    const { state, total_steps: total, error } = summary;
    const step = Math.max(summary.step ?? 0, columns.step.at(-1) ?? 0);
    const [stepS, stallS] = [recent(columns, "step_s"), recent(columns, "stall_s")];
    const updated = Math.max(summary.updated_at ?? 0, columns.at?.at(-1) ?? 0) || null;
    refill(this.state, state, stateTag);
    this.bar.hidden = !total;
    this.bar.value = total ? Math.min(1, step / total) : 0;
    const values = {
      step: total ? `${count(step)} of ${count(total)}` : count(step || null),
      loss: lastNumber(columns, "loss"),
      speed: number(recent(columns, "tokens_per_s", "step_s")),
      stepTime: duration(stepS),
      waiting: stallS !== null && stepS > 0 ? percent(stallS / stepS) : null,
      remaining: total > step && stepS !== null && state === "training" ? duration((total - step) * stepS) : null,
      ranks: sessions.length > 0 ? count(sessions.at(-1).world_size) : null,
      seen: ago(updated),
    };
    refill(this.facts, [values, error, summary.newest], () =>
      facts(
        fact("Step", values.step, { test: "fact-step" }),
        fact("Loss", values.loss),
        fact("Tokens per second", values.speed),
        fact("Time per step", values.stepTime),
        values.waiting && fact("Waiting for data", values.waiting),
        values.remaining && fact("Remaining", values.remaining),
        values.ranks && fact("Ranks", values.ranks),
        fact("Checkpoints", newestOf(this.run, summary)),
        fact("Updated", age(updated)),
        error && fact("Error", h("span", { class: "bad" }, error), { test: "fact-error" }),
      ),
    );
  }
}

function keyOf({ tag, step }) {
  return `${tag} ${step}`;
}

function saveState({ state, problem }) {
  return [stateTag(state), problem ? h("span", { class: "bad" }, ` ${problem}`) : null];
}

function newestOf(run, { newest, num_checkpoints: amount }) {
  if (newest === null) return "none";
  return [`${count(amount)}, newest `, h("a", { href: runUrl(run, `checkpoint/${newest.checkpoint}`) }, newest.tag)];
}

function nothingYet({ state, num_checkpoints: amount, location }) {
  if (state !== "unknown") return empty("No steps yet", "The run has started. Curves appear after its first step.");
  return empty(
    "No journal",
    `This folder has ${counted(amount, "checkpoint")} but no journal, so there are no curves. Training that saves here writes one:`,
    `zstore train --config ds_config.json --model gpt-tiny --steps 100 --save ${location}`,
  );
}

/** Return where processes resumed and checkpoints were saved, and steps with numbers that are not finite. */
function marksOf({ sessions, saves, not_finite: wrong }) {
  const resumed = sessions.filter((session) => session.first_step > 0);
  const saved = saves.filter(({ state }) => state !== "failed");
  return [
    ...resumed.map(({ first_step: step }) => ({ step, kind: "resumed", label: "resumed" })),
    ...saved.map(({ step, tag }) => ({ step, kind: "saved", label: `saved ${tag}` })),
    ...wrong.map(({ step, values }) => ({
      step,
      kind: "not finite",
      label: Object.entries(values)
        .map(([name, value]) => `${name} is ${value}`)
        .join(", "),
    })),
  ];
}

/** Return the panel of the processes that trained, the newest first, with their versions and settings. */
function sessionsPanel(sessions, state) {
  if (sessions.length === 0) return null;
  const entries = sessions.toReversed().map((session, index) => {
    const { started_at: began, ended_at: ended, first_step: step, world_size: ranks, host, pid } = session;
    const runs = index === 0 && state === "training";
    const silent = runs ? "running" : "no end recorded: it was killed, or its machine went down";
    const end = ended === null ? silent : `ended ${when(ended)}`;
    const versions = Object.entries(session.versions).map(([name, version]) => `${name} ${version}`);
    return h(
      "li",
      null,
      h("span", { class: "muted" }, when(began)),
      h("span", null, `from step ${count(step)}, ${counted(ranks, "rank")}, on ${host}, process ${pid}; ${end}`),
      h(
        "details",
        null,
        h("summary", null, "Versions and settings"),
        h("p", { class: "muted name" }, versions.join(", ")),
        h("pre", { tabindex: "0" }, JSON.stringify(session.config, null, 2)),
      ),
    );
  });
  return panel("Processes", "sessions", h("ul", { class: "plain" }, entries));
}
