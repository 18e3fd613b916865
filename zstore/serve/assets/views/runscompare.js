// Runs side by side: their curves in the same charts, and what of their settings differs.
//
// The URL holds the choice: `run` and `y` (columns) any number of times, `x` (step, tokens or time), and what the charts keep.
//
// For tests: compared (a column of the table for each run), compare-x, compare-column, compare-remove, compare-setting.

import { api, get } from "../data.js";
import { h, replace } from "../dom.js";
import { count, counted, duration, number, short } from "../format.js";
import { WHOLE } from "../plot.js";
import { go, here, link, note, runUrl } from "../router.js";
import { ChartGrid } from "../parts/chartgrid.js";
import { EVALUATED, axisTime, chartOf } from "../parts/curves.js";
import { hasEnded, stateTag } from "../parts/facts.js";
import { repeat } from "../parts/poll.js";
import { StepColumns } from "../parts/steps.js";
import { cell, heading, table } from "../parts/tables.js";
import { columnsOf, differing, flat, joined } from "../parts/together.js";
import { empty, problem } from "../states.js";
import { inColour } from "../themes.js";

const MOST_RUNS = 32;
const MOST_POINTS = 8000;
const EVERY_S = 10;
const USUAL = ["loss", EVALUATED, "grad_norm", "tokens_per_s"];
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, ...[1, 2, 5, 10, 20, 50, 100, 200].map((days) => days * 86400)];

/** The axes: how each is written, and the x of the rows of a run. */
const AXES = {
  step: { text: "Step", by: { label: "step", format: count, axis: short, incrs: WHOLE }, of: (run, rows) => rows.column("step") },
  tokens: { text: "Tokens", by: { label: "tokens", format: count, axis: short, incrs: WHOLE }, of: (run, rows) => rows.column("tokens_seen") },
  time: { text: "Time", by: { label: "time since it began", format: duration, axis: axisTime, incrs: SECONDS }, of: (run, rows) => rows.column("at").map((at) => (at === null ? null : at - run.beganAt)) },
};

/** Return the URL of the comparison of runs. */
export function compareUrl(runs) {
  return link(`/runs/compare?${new URLSearchParams(runs.map((run) => ["run", run]))}`);
}

export async function show(container) {
  const view = new RunsCompare();
  await view.load();
  replace(container, view.element);
  view.draw();
  const stop = repeat(() => view.refresh(), () => {}, 1);
  return () => {
    stop();
    view.charts.close();
  };
}

class RunsCompare {
  constructor() {
    const { query } = here();
    this.names = [...new Set(query.getAll("run"))].slice(0, MOST_RUNS);
    this.axis = Object.hasOwn(AXES, query.get("x")) ? query.get("x") : "step";
    this.columns = query.getAll("y");
    const [from, to] = ["from", "to"].map((name) => Number.parseFloat(query.get(name)));
    this.domain = from < to ? [from, to] : null;
    const select = h("select", { test: "compare-x" }, Object.entries(AXES).map(([name, { text }]) => h("option", { value: name, selected: name === this.axis }, text)));
    select.addEventListener("change", () => {
      this.axis = select.value;
      note({ x: this.axis });
      this.charts.group.setDomain(null);
      this.draw();
    });
    this.charts = new ChartGrid("Curves", (domain) => this.zoom(domain), h("label", { class: "check" }, "x axis ", select));
    this.choiceText = h("summary");
    this.boxes = h("div", { class: "choices" });
    this.choice = h("details", { class: "panel columns" }, this.choiceText, this.boxes);
    this.settings = h("section", { class: "panel flush" });
    this.troubles = h("div");
    this.element = h("div", { class: "view" }, h("h1", null, "Runs side by side"), this.troubles, this.settings, this.choice, this.charts.element);
    this.runs = [];
  }

  async load() {
    await this.fetch();
    if (this.domain === null) return;
    this.charts.setDomain(this.domain);
    await this.loadDetail();
  }

  /** Ask for all runs; one that cannot be read is left out, and said. */
  async fetch() {
    const points = Math.max(100, Math.min(1000, Math.floor(MOST_POINTS / this.names.length)));
    const found = await Promise.allSettled(this.names.map((name) => this.read(name, points)));
    const failed = found.filter(({ status }) => status === "rejected").map(({ reason }) => reason);
    const fatal = failed.find(({ status }) => status === undefined || status === 401);
    if (fatal !== undefined) throw fatal;
    replace(this.troubles, failed.map((error) => problem(error)));
    this.runs = found.filter(({ status }) => status === "fulfilled").map(({ value }) => value);
  }

  async read(name, points) {
    const path = ["runs", name];
    const [{ summary, sessions }, { columns, is_whole: isWhole }] = await Promise.all([get(api(path)), get(api([...path, "steps"], { points }))]);
    const rows = new StepColumns(columns);
    const session = sessions.at(-1);
    const config = session === undefined ? {} : flat({ loop: session.loop, world_size: session.world_size, versions: session.versions, ...session.config });
    const [firstAt] = rows.column("at").filter((at) => at !== null);
    return { name, points, summary, isWhole, config, rows, shown: rows, beganAt: Math.min(firstAt ?? Infinity, sessions[0]?.started_at || Infinity) };
  }

  async refresh() {
    if (this.runs.every(({ summary, isWhole }) => isWhole && hasEnded(summary.state))) return EVERY_S;
    await this.fetch();
    if (this.domain !== null) await this.loadDetail();
    this.draw();
    return this.runs.every(({ isWhole }) => isWhole) ? EVERY_S : 1;
  }

  zoom(domain) {
    this.domain = domain;
    note({ from: domain && String(domain[0]), to: domain && String(domain[1]) });
    for (const run of this.runs) run.shown = run.rows;
    this.draw();
    if (domain !== null) void this.loadDetail().then(() => this.draw(), () => {});
  }

  /** Ask for the steps that are shown in more detail, of those runs that have more of them than are at hand. */
  async loadDetail() {
    const { domain } = this;
    const read = async (run) => {
      const steps = run.rows.column("step");
      const x = AXES[this.axis].of(run, run.rows);
      const within = [...steps.keys()].filter((index) => x[index] !== null && x[index] >= domain[0] && x[index] <= domain[1]);
      if (within.length === 0) return;
      const [after, until] = [(steps[within[0] - 1] ?? steps[0]) - 1, steps[within.at(-1) + 1] ?? steps.at(-1)];
      if (run.rows.isWhole(after, until)) return;
      const { columns } = await get(api(["runs", run.name, "steps"], { after, until, points: run.points }));
      if (this.domain === domain) run.shown = new StepColumns(columns);
    };
    await Promise.all(this.runs.map(read));
  }

  draw() {
    const { by, of } = AXES[this.axis];
    const names = columnsOf(this.runs.map((run) => run.rows));
    const wanted = this.columns.length > 0 ? this.columns : USUAL;
    const chosen = names.filter((name) => wanted.includes(name));
    const curve = (name) => (run) => ({ label: run.name, x: of(run, run.shown), values: run.shown.column(name) });
    const specs = chosen.map((name) => ({ ...chartOf(name), data: { by, marks: [], ...joined(this.runs.map(curve(name))) } }));
    this.charts.element.hidden = this.runs.length === 0;
    this.charts.show(specs.filter(({ data }) => data.x.length > 0));
    this.drawChoice(names, chosen);
    this.drawSettings();
  }

  drawChoice(names, chosen) {
    replace(this.choiceText, `Curves shown: ${count(chosen.length)} of ${count(names.length)}`);
    for (const box of this.boxes.querySelectorAll("input")) box.checked = chosen.includes(box.dataset.column);
    this.choice.hidden = names.length === 0;
    if (this.shownChoice === names.join("\n")) return;
    this.shownChoice = names.join("\n");
    const choose = () => this.choose([...this.boxes.querySelectorAll(":checked")].map((box) => box.dataset.column));
    const box = (name) => h("input", { type: "checkbox", checked: chosen.includes(name), onchange: choose, test: "compare-column", "data-column": name });
    replace(this.boxes, names.map((name) => h("label", null, box(name), " ", h("bdi", null, chartOf(name).title))));
  }

  choose(columns) {
    this.columns = columns;
    note({ y: columns });
    this.draw();
  }

  /** A column for each run: how it did, and the settings that differ. */
  drawSettings() {
    const { runs } = this;
    this.settings.hidden = runs.length === 0;
    if (this.names.length === 0) replace(this.troubles, empty("No runs chosen", "Check the boxes of runs in the list of runs, and press Compare."));
    const text = JSON.stringify([runs.map(({ name, summary, config }) => [name, summary.state, summary.step, summary.loss, config])]);
    if (text === this.shownSettings) return;
    this.shownSettings = text;
    const keys = differing(runs.map(({ config }) => config));
    const heads = runs.map(({ name }, index) =>
      h(
        "th",
        { scope: "col", class: "name", test: "compared" },
        h("i", { class: `swatch ${index < 8 ? "" : "limit"}`, style: inColour(index % 8) }),
        h("a", { href: runUrl(name) }, name),
        " ",
        h("button", { type: "button", class: "small quiet", "aria-label": `Leave out ${name}`, test: "compare-remove", onclick: () => this.leaveOut(name) }, "×"),
      ),
    );
    const row = (label, texts, test = null) => h("tr", { test }, h("th", { scope: "row", class: "name setting" }, label), texts.map((text) => cell(null, text, "name")));
    const rows = [
      row("State", runs.map(({ summary }) => stateTag(summary.state))),
      row("Step", runs.map(({ summary }) => count(summary.step))),
      row("Loss", runs.map(({ summary }) => number(summary.loss))),
      ...keys.map((key) => row(key, runs.map(({ config }) => config[key] ?? "–"), "compare-setting")),
    ];
    const said = keys.length === 0 ? "No setting differs." : `${counted(keys.length, "setting")} that differ; all others are the same.`;
    replace(this.settings, h("div", { class: "scroll" }, table({}, [heading("", "setting"), ...heads], rows)), runs.length > 1 ? h("p", { class: "hint" }, said) : null);
  }

  leaveOut(name) {
    const { path, query } = here();
    query.delete("run");
    for (const one of this.names) if (one !== name) query.append("run", one);
    go(link(`${path}?${query}`));
  }
}
