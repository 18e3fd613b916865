// The curves of a run: its steps as columns, to which live ones are added, and what each chart draws of them. Pure.

import { bytes, duration, number, percent, rate, short } from "./format.js";

const TIERS = ["device", "host", "disk", "buffers", "process", "cuda"];
const METRIC = "metric/";
const EVALUATED = "metric/eval_loss";
/** A budget is drawn where it is at most so many times what was used. */
const NEAR = 4;

/** Why a step waited, in words. */
const CAUSES = {
  "begun earlier": "read that began too late",
  "not there in time": "parameters that came too late",
  "not read yet": "data that was not read yet",
  "blocking call": "call that waits",
};

const BYTES = { unit: "bytes", axis: (value, digits) => `${short(value, digits)}B`, format: bytes };
const RATE = { unit: "bytes a second", axis: (value, digits) => `${short(value, digits)}B/s`, format: rate };
const SPEED = { unit: "tokens/s", zero: true };
const SHARE = { axis: percent, format: percent, zero: true };
const TIME = { unit: "time per step", axis: duration, format: duration };

const CHARTS = [
  { name: "loss", title: "Loss", smooth: true, series: loss },
  { name: "tokens", title: "Tokens per second", ...SPEED, series: one("tokens/s", "tokens_per_s") },
  { name: "time", title: "Step time by phase", ...TIME, zero: true, stacked: true, series: phases },
  { name: "memory", title: "Memory by tier", ...BYTES, zero: true, series: memory },
  { name: "rates", title: "Rate of each link", ...RATE, zero: true, series: named("rate/") },
  { name: "stalls", title: "Waiting by cause", ...TIME, zero: true, stacked: true, series: named("stall/") },
  { name: "norm", title: "Gradient norm", series: one("norm", "grad_norm") },
  { name: "lr", title: "Learning rate", zero: true, series: one("lr", "lr") },
  { name: "mfu", title: "Model FLOPs utilisation", ...SHARE, series: one("MFU", "mfu") },
];

/** Return `columns` with those of later steps behind them. Where these begin at a step that is there, the old ones go. */
export function append(columns, later) {
  if (later.step.length === 0) return columns;
  const found = columns.step.findIndex((step) => step >= later.step[0]);
  const kept = found < 0 ? columns.step.length : found;
  const names = new Set([...Object.keys(columns), ...Object.keys(later)]);
  const none = (length) => new Array(length).fill(null);
  return Object.fromEntries(
    [...names].map((name) => [
      name,
      (columns[name] ?? none(kept)).slice(0, kept).concat(later[name] ?? none(later.step.length)),
    ]),
  );
}

/** Return the charts for `columns`, as `Charts.show` takes them; `placement` has the budgets. */
export function curvesOf(columns, placement) {
  const own = Object.keys(columns)
    .filter((name) => name.startsWith(METRIC) && name !== EVALUATED)
    .sort()
    .map((name) => {
      const title = name.slice(METRIC.length);
      return { name, title, unit: title, series: () => [{ label: title, values: columns[name], joins: true }] };
    });
  return [...CHARTS, ...own]
    .map((chart) => ({ ...chart, series: chart.series(columns, placement).filter(({ values }) => isKnown(values)) }))
    .filter(({ series }) => series.length > 0);
}

function isKnown(values) {
  return values?.some((value) => value !== null) ?? false;
}

function one(label, name) {
  return (columns) => [{ label, values: columns[name] }];
}

function loss(columns) {
  return [
    { label: "loss", values: columns.loss },
    { label: "evaluation", values: columns[EVALUATED], joins: true },
  ];
}

function phases(columns) {
  const names = ["forward_s", "backward_s", "optimizer_s"].filter((name) => isKnown(columns[name]));
  const parts = names.map((name) => ({ label: name.replace("_s", ""), values: columns[name] }));
  if (!isKnown(columns.step_s)) return parts;
  const rest = columns.step_s.map((whole, at) => {
    const left = whole - parts.reduce((sum, { values }) => sum + (values[at] ?? 0), 0);
    return whole === null ? null : Math.max(0, left);
  });
  return [...parts, { label: parts.length === 0 ? "step" : "other", values: rest }];
}

function named(prefix) {
  return (columns) =>
    Object.keys(columns)
      .filter((name) => name.startsWith(prefix) && columns[name].some((value) => value))
      .sort()
      .map((name) => name.slice(prefix.length))
      .map((name) => ({ label: CAUSES[name] ?? name.replaceAll("_", " "), values: held(columns[prefix + name]) }));
}

function memory(columns, placement) {
  const tiers = named("memory/")(columns).sort((a, b) => TIERS.indexOf(a.label) - TIERS.indexOf(b.label));
  const most = Math.max(...tiers.flatMap(({ values }) => values));
  const budget = (label, value, names) => {
    const limits = tiers.findIndex((tier) => names.includes(tier.label));
    const isNear = value && value <= most * NEAR && limits >= 0;
    return isNear ? [{ label, limits, values: columns.step.map(() => value) }] : [];
  };
  return [
    ...tiers,
    ...budget("host budget", placement?.host_budget_bytes, ["host"]),
    ...budget("device memory", placement?.device_bytes, ["device", "cuda"]),
  ];
}

/** Return values with the last one that is known in the gaps: engines measure some of it every few steps only. */
function held(values) {
  let last = null;
  return values.map((value) => (last = value ?? last));
}

/** Return the mean of the newest values of a column, each weighing as much as that of `weight` says; null without any. */
export function recent(columns, name, weight = null) {
  let [sum, total] = [0, 0];
  const values = columns[name] ?? [];
  for (let at = Math.max(0, values.length - 50); at < values.length; at++) {
    if (values[at] === null) continue;
    const by = weight === null ? 1 : (columns[weight][at] ?? 0);
    [sum, total] = [sum + values[at] * by, total + by];
  }
  return total > 0 ? sum / total : null;
}

/** Return the last value of a column that is known, as text. */
export function lastNumber(columns, name) {
  return number(columns[name]?.findLast((value) => value !== null));
}
