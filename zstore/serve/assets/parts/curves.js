// The curves of a run: which charts there are, and what each draws of the columns of its steps.

import { bytes, duration, number, percent, rate, short } from "../format.js";

const TIERS = ["device", "host", "disk", "buffers", "process", "cuda"];
const NEAR = 4;
const LEAST_SHARE = 1e-3;
const METRIC = "metric/";
/** The column of the loss of evaluations. */
export const EVALUATED = "metric/eval_loss";

const one = (label, name) => (steps) => (steps.has(name) ? [{ label, values: steps.column(name) }] : []);
const bare = (text) => text.replace(/\.0+ /, " ").replace(/(\.\d*?)0+ /, "$1 ");
/** Write bytes at an axis. */
export const axisBytes = (value, digits) => (value === 0 ? "0" : bare(bytes(value, digits)));
const axisRate = (value, digits) => (value === 0 ? "0" : bare(rate(value, digits)));
/** Write a time at an axis. */
export const axisTime = (value, digits) => (value === 0 ? "0" : duration(value, digits).replace(/ 0 (s|min|h)$/, ""));

/** Why a step waited, in words. */
const CAUSES = {
  "begun earlier": "read that began too late",
  "not there in time": "parameters that came too late",
  "not read yet": "data that was not read yet",
  "blocking call": "call that waits",
};

const BYTES = { unit: "bytes", axis: axisBytes, format: bytes };
const RATE = { unit: "bytes a second", axis: axisRate, format: rate };
const SHARE = { unit: "share of the peak", axis: percent, format: percent };
const TIME = { unit: "time per step", axis: axisTime, format: duration };
const TOKENS = { unit: "tokens/s", zero: true, axis: short, format: (value) => number(value) };

const CHARTS = [
  { name: "loss", title: "Loss", log: true, series: loss },
  { name: "tokens", title: "Tokens per second", ...TOKENS, series: one("tokens/s", "tokens_per_s") },
  { name: "mfu", title: "Model FLOPs utilisation", ...SHARE, zero: true, series: one("MFU", "mfu") },
  { name: "time", title: "Step time by phase", ...TIME, zero: true, stacked: true, series: phases },
  { name: "rates", title: "Rate of each link", ...RATE, zero: true, series: prefixed("rate/") },
  { name: "stalls", title: "Waiting by cause", ...TIME, zero: true, stacked: true, series: prefixed("stall/") },
  { name: "memory", title: "Memory by tier", ...BYTES, zero: true, series: memory },
  { name: "norm", title: "Gradient norm", log: true, series: one("norm", "grad_norm") },
  { name: "lr", title: "Learning rate", zero: true, series: one("lr", "lr") },
];

/** How a chart of one column is called, by the column's name, and what its values are. */
const COLUMNS = [
  [/^loss$/, "Loss"],
  [/^metric\/eval_loss$/, "Loss of evaluations"],
  [/^metric\/(.+)$/, "$1"],
  [/^grad_norm$/, "Gradient norm"],
  [/^lr$/, "Learning rate"],
  [/^tokens_per_s$/, "Tokens per second", TOKENS],
  [/^mfu$/, "Model FLOPs utilisation", SHARE],
  [/^memory\/(.+)$/, "Memory: $1", BYTES],
  [/^rate\/(.+)$/, "Rate: $1", RATE],
  [/^stall\/(.+)$/, "Waiting: $1", TIME],
  [/^(.+)_s$/, "Time: $1", TIME],
  [/^.*$/, "$&"],
];

/** Return what `ChartGrid` shows of the `steps` of a run with `marks`; `placement` gives the budget. */
export function curvesOf(steps, marks, placement) {
  const specs = [...CHARTS, ...own(steps)].map((spec) => ({ ...spec, data: { x: steps.column("step"), series: spec.series(steps, placement), marks } }));
  return specs.filter(({ data }) => data.series.length > 0);
}

/** Return the options of a chart of one column alone. */
export function chartOf(column) {
  const [pattern, title, kind] = COLUMNS.find(([one]) => one.test(column));
  return { name: `column-${column}`, title: column.replace(pattern, title), log: true, ...kind };
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
