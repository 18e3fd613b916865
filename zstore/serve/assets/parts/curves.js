// The curves of a run: which charts there are, and what each draws of the columns of its steps.

import { ChartGroup, LineChart } from "../charts.js";
import { h, replace, titled } from "../dom.js";
import { bytes, duration, number, percent, rate, short } from "../format.js";

const TIERS = ["device", "host", "disk", "buffers", "process", "cuda"];
const NEAR = 4;
const KEYS = "Drag to zoom. Keyboard: arrows read, Shift+arrows and Enter zoom, Esc resets";
const LEAST_SHARE = 1e-3;
const METRIC = "metric/";
const EVALUATED = "metric/eval_loss";

const one = (label, name) => (steps) => (steps.has(name) ? [{ label, values: steps.column(name) }] : []);
const bare = (text) => text.replace(/\.0+ /, " ").replace(/(\.\d*?)0+ /, "$1 ");
const axisBytes = (value, digits) => (value === 0 ? "0" : bare(bytes(value, digits)));
const axisRate = (value, digits) => (value === 0 ? "0" : bare(rate(value, digits)));
const axisTime = (value, digits) => (value === 0 ? "0" : duration(value, digits));

/** Why a step waited, in words. */
const CAUSES = {
  "begun earlier": "read that began too late",
  "not there in time": "parameters that came too late",
  "not read yet": "data that was not read yet",
  "blocking call": "call that waits",
};

const CHARTS = [
  { name: "loss", title: "Loss", log: true, series: loss },
  { name: "tokens", title: "Tokens per second", unit: "tokens/s", axis: short, format: (value) => number(value), zero: true, series: one("tokens/s", "tokens_per_s") },
  { name: "mfu", title: "Model FLOPs utilisation", unit: "share of the peak", axis: percent, format: percent, zero: true, series: one("MFU", "mfu") },
  { name: "time", title: "Step time by phase", unit: "time of a step", axis: axisTime, format: duration, zero: true, stacked: true, series: phases },
  { name: "rates", title: "Rate of each link", unit: "bytes a second", axis: axisRate, format: rate, zero: true, series: prefixed("rate/") },
  { name: "stalls", title: "Waiting by cause", unit: "time of a step", axis: axisTime, format: duration, zero: true, stacked: true, series: prefixed("stall/") },
  { name: "memory", title: "Memory by tier", unit: "bytes", axis: axisBytes, format: bytes, zero: true, series: memory },
  { name: "norm", title: "Gradient norm", log: true, series: one("norm", "grad_norm") },
  { name: "lr", title: "Learning rate", zero: true, series: one("lr", "lr") },
];

/** All charts of a run, which move together. `changed` is called with the range that people choose, null for all of it. */
export class Curves {
  constructor(changed) {
    this.group = new ChartGroup((domain) => {
      this.all.disabled = domain === null;
      changed(domain);
    });
    this.charts = new Map();
    this.log = h("button", { type: "button", class: "small", "aria-pressed": "false", onclick: () => this.setLog(!this.isLog), test: "log" }, "Log scale");
    this.all = h("button", { type: "button", class: "small", disabled: true, onclick: () => this.group.setDomain(null), test: "zoom-all" }, "All steps");
    this.smooth = h("button", { type: "button", class: "small", "aria-pressed": "false", onclick: () => this.setSmooth(!this.isSmooth), test: "smooth" }, "Smooth");
    this.isLog = false;
    this.isSmooth = false;
    this.grid = h("div", { class: "grid charts" });
    this.element = h(
      "section",
      { class: "view", "aria-label": "Curves" },
      titled(h("h2", null, "Curves"), h("span", { class: "hint keys" }, KEYS), this.smooth, this.log, this.all),
      this.grid,
    );
  }

  /** Draw `steps` with `marks`; `placement` gives the budget. */
  update(steps, marks, placement) {
    const shown = [];
    for (const spec of [...CHARTS, ...own(steps)]) {
      const series = spec.series(steps, placement);
      if (series.length === 0) continue;
      const chart = this.chart(spec);
      chart.update({ x: steps.column("step"), series, marks });
      shown.push(chart.element);
    }
    const same = shown.length === this.grid.children.length && shown.every((element, index) => element === this.grid.children[index]);
    if (!same) replace(this.grid, shown);
  }

  chart(spec) {
    if (!this.charts.has(spec.name)) {
      const chart = new LineChart({ ...spec, group: this.group });
      if (spec.log) chart.setLog(this.isLog);
      chart.setSmooth(this.isSmooth);
      this.charts.set(spec.name, chart);
    }
    return this.charts.get(spec.name);
  }

  setLog(isLog) {
    this.isLog = isLog;
    this.log.setAttribute("aria-pressed", String(isLog));
    for (const spec of CHARTS) if (spec.log) this.charts.get(spec.name)?.setLog(isLog);
  }

  setSmooth(isSmooth) {
    this.isSmooth = isSmooth;
    this.smooth.setAttribute("aria-pressed", String(isSmooth));
    for (const chart of this.charts.values()) chart.setSmooth(isSmooth);
  }

  /** Show steps from and to those of `domain`, without a call of `changed`. */
  setDomain(domain) {
    this.all.disabled = domain === null;
    this.group.setDomain(domain, true);
  }

  close() {
    for (const chart of this.charts.values()) chart.close();
  }
}

function loss(steps) {
  const found = steps.has("loss") ? [{ label: "loss", values: steps.column("loss"), low: steps.column("loss_min"), high: steps.column("loss_max") }] : [];
  return steps.has(EVALUATED) ? [...found, { label: "evaluation", values: steps.column(EVALUATED), joins: true }] : found;
}

/** Return a chart for each metric of the loop's own. */
function own(steps) {
  const names = Object.keys(steps.columns).filter((name) => name.startsWith(METRIC) && name !== EVALUATED).sort();
  return names.map((name) => {
    const label = name.slice(METRIC.length);
    return { name: `metric-${label}`, title: label, unit: label, series: () => [{ label, values: steps.column(name), joins: true }] };
  });
}

function phases(steps) {
  const names = ["forward_s", "backward_s", "optimizer_s"].filter((name) => steps.has(name));
  const parts = names.map((name) => ({ label: name.replace("_s", ""), values: steps.column(name) }));
  if (!steps.has("step_s")) return parts;
  const whole = steps.column("step_s");
  const rest = whole.map((value, index) => {
    if (value === null) return null;
    const left = value - parts.reduce((sum, part) => sum + (part.values[index] ?? 0), 0);
    return left > value * LEAST_SHARE ? left : 0;
  });
  if (parts.length > 0 && !rest.some((value) => value > 0)) return parts;
  return [...parts, { label: parts.length === 0 ? "step" : "other", values: rest }];
}

function prefixed(prefix) {
  return (steps) => steps.named(prefix).map((name) => ({ label: CAUSES[name.slice(prefix.length)] ?? name.slice(prefix.length).replaceAll("_", " "), values: held(steps.column(name)) }));
}

function memory(steps, placement) {
  const found = steps.named("memory/").map((name) => name.slice("memory/".length));
  const order = [...TIERS.filter((tier) => found.includes(tier)), ...found.filter((tier) => !TIERS.includes(tier))];
  const tiers = order.map((tier) => ({ label: tier, values: held(steps.column(`memory/${tier}`)) }));
  return [...tiers, ...budget(tiers, placement)];
}

/** Return values with what was measured last in the place of what was not: engines measure some of it every few steps only. */
function held(values) {
  let last = null;
  return values.map((value) => (last = value ?? last));
}

/** Return the budgets of tiers that come near enough to them to be read beside them. */
function budget(tiers, placement) {
  const most = Math.max(...tiers.flatMap(({ values }) => values));
  return [
    { label: "host budget", names: ["host"], value: placement?.host_budget_bytes },
    { label: "device memory", names: ["device", "cuda"], value: placement?.device_bytes },
  ]
    .map((one) => ({ ...one, limits: tiers.findIndex((tier) => one.names.includes(tier.label)) }))
    .filter(({ value, limits }) => typeof value === "number" && value <= most * NEAR && limits >= 0)
    .map(({ label, value, limits }) => ({ label, limits, values: tiers[0].values.map(() => value) }));
}
