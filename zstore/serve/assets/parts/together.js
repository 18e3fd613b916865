// Curves and configs of several runs, put together. Pure.

/** Columns that are an axis, or the ends of a band. */
const NO_CURVES = new Set(["step", "at", "tokens_seen", "loss_min", "loss_max", "not_finite"]);
const FIRST = ["loss", "metric/eval_loss"];

/** Return the names of all columns that any of the tables of `StepColumns` has values of: the losses first, then metrics. */
export function columnsOf(tables) {
  const names = new Set(tables.flatMap((table) => Object.keys(table.columns).filter((name) => !NO_CURVES.has(name) && table.has(name))));
  const order = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : name.startsWith("metric/") ? 2 : name.includes("/") ? 4 : 3);
  return [...names].sort((a, b) => order(a) - order(b) || a.localeCompare(b, "en"));
}

/**
 * Return one ascending `x` for curves that have their own, and the values of each at it, null where it has none.
 * @param {{label: string, x: (number | null)[], values: (number | null)[]}[]} curves
 */
export function joined(curves) {
  const points = curves.map(({ x, values }) => new Map(x.flatMap((at, index) => (at === null ? [] : [[at, values[index]]]))));
  const x = [...new Set(points.flatMap((one) => [...one.keys()]))].sort((a, b) => a - b);
  return { x, series: curves.map(({ label }, index) => ({ label, joins: true, values: x.map((at) => points[index].get(at) ?? null) })) };
}

/** Return a JSON object as texts by the path to each value: `{"optimizer.params.lr": "0.001"}`. */
export function flat(value, path = "") {
  if (value === null || typeof value !== "object" || Object.keys(value).length === 0) return { [path]: JSON.stringify(value) };
  return Object.assign({}, ...Object.entries(value).map(([key, inner]) => flat(inner, path ? `${path}.${key}` : key)));
}

/** Return the keys whose values differ between `configs`, texts by key, in order of the keys. */
export function differing(configs) {
  const keys = [...new Set(configs.flatMap(Object.keys))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  return keys.filter((key) => new Set(configs.map((config) => config[key])).size > 1);
}
