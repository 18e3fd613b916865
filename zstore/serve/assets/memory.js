// Where every byte of a run is: the map of tiers, kinds and arrays, and the arrays as a table.

import { empty, h, replace, swatch, titled } from "./dom.js";
import { bytes, count, percent } from "./format.js";
import { api, get } from "./service.js";
import { Table } from "./table.js";

const TIERS = ["device", "host", "disk"];
const KINDS = ["parameters", "gradients", "optimizer state", "buffers", "master weights"];
const MOST_BOXES = 250;
const ARRAYS = [
  { key: "name", label: "Array" },
  { key: "kind", label: "Kind", wide: true },
  { key: "tier", label: "Tier" },
  { key: "nbytes", label: "Size", text: bytes, numeric: true },
];

export async function show(container, { run }) {
  const placement = await get(api(["runs", run, "placement"]));
  const { arrays } = placement;
  if (arrays.length === 0) {
    const text =
      "The run's journal has no map of memory. A run with a zstore engine writes one when it starts. To see a plan before training:";
    replace(container, empty("No memory data", text, "zstore plan --help"));
    return;
  }
  const found = new Set(arrays.map(({ kind }) => kind));
  const others = [...found].filter((kind) => !KINDS.includes(kind)).sort();
  const kinds = [...KINDS.filter((kind) => found.has(kind)), ...others];
  const colourOf = (kind) => kinds.indexOf(kind) % 8;
  const legend = kinds.map((kind) => h("span", { class: "key" }, swatch(colourOf(kind)), kind));
  const rows = arrays.map((array, index) => ({ ...array, key: String(index) }));
  const table = new Table({
    columns: ARRAYS,
    label: "Arrays",
    noun: "array",
    test: "placed-array",
    key: (array) => array.key,
    sort: "-nbytes",
    text: ({ name, kind, tier }) => `${name} ${kind} ${tier}`,
    total: (shown) => `, ${bytes(sum(shown, "nbytes"))}`,
  });
  table.show(rows);
  const map = mapOf(placement, colourOf, (name) => table.filter(name));
  const title = titled(h("h2", null, "Where the bytes are, on rank 0"), h("div", { class: "legend" }, legend));
  replace(container, h("section", { class: "panel" }, title, map, table.element));
}

/** Return the map: an area for each tier, in it one for each kind and array, as large as its bytes. */
function mapOf({ arrays, host_budget_bytes: host, device_bytes: device }, colourOf, chosen) {
  const budgets = { host, device };
  const tiers = groups(arrays, "tier").sort((one, other) => TIERS.indexOf(one.name) - TIERS.indexOf(other.name));
  const boxes = tiers.map((tier) => {
    const inner = groups(tier.items, "kind").flatMap(largest);
    const sizes = inner.map(({ nbytes }) => nbytes);
    const share = tier.nbytes / sum(arrays, "nbytes");
    const places = squarify(sizes, 0.2 + 2 * share);
    const shown = inner.map((array, index) => box(array, places[index], share, colourOf(array.kind), chosen));
    const budget = budgets[tier.name] ?? null;
    const title = h("h3", null, `${tier.name} ${bytes(tier.nbytes)}`, budget && budgetOf(tier, budget));
    const area = h("div", { class: "map-area" }, shown);
    return h("div", { class: "map-tier", style: { "flex-grow": tier.nbytes } }, title, area);
  });
  const label = `Map of memory: ${tiers.map(({ name, nbytes }) => `${name} ${bytes(nbytes)}`).join(", ")}`;
  return h("div", { class: "map", role: "img", "aria-label": label, test: "map" }, boxes);
}

/** Return the box of an array, with its name where there is room; a click filters the table by it. */
function box({ name, kind, nbytes, isRest = false }, { x, y, width, height }, share, colour, chosen) {
  const style = {
    left: `${100 * x}%`,
    top: `${100 * y}%`,
    width: `${100 * width}%`,
    height: `${100 * height}%`,
    "--c": `var(--series-${colour})`,
  };
  const text =
    width * share > 0.07 && height > 0.1 ? `${name.split(/[/.]/).slice(-3).join(".")} ${bytes(nbytes)}` : null;
  const onclick = isRest ? null : () => chosen(name);
  return h("div", { class: "map-box", style, title: `${name}: ${kind}, ${bytes(nbytes)}`, onclick }, text);
}

/** Return items by a property, the largest group first. */
function groups(items, property) {
  const found = Map.groupBy(items, (item) => item[property]);
  return [...found]
    .map(([name, inner]) => ({ name, items: inner, nbytes: sum(inner, "nbytes") }))
    .sort((one, other) => other.nbytes - one.nbytes);
}

/** Return the largest arrays of a kind, and all others as one. */
function largest({ name: kind, items }) {
  const sorted = items.toSorted((one, other) => other.nbytes - one.nbytes);
  const rest = sorted.splice(MOST_BOXES);
  if (rest.length > 0)
    sorted.push({ name: `${count(rest.length)} more`, kind, nbytes: sum(rest, "nbytes"), isRest: true });
  return sorted;
}

function sum(items, name) {
  return items.reduce((total, item) => total + (item[name] ?? 0), 0);
}

/**
 * Return where rectangles of `sizes` are in one that is `ratio` times as wide as high, in shares of its sides. Rows are filled
 * along the shorter side as long as that makes rectangles squarer (Bruls, Huizing, van Wijk: Squarified Treemaps, 2000).
 */
function squarify(sizes, ratio) {
  const found = [];
  let [x, y, width, height] = [0, 0, ratio, 1];
  const scale = ratio / sizes.reduce((total, size) => total + size, 0);
  const areas = sizes.map((size) => size * scale);
  for (let first = 0, end = 0; first < areas.length; first = end) {
    const side = Math.min(width, height);
    let [total, worst] = [0, Infinity];
    for (end = first; end < areas.length; end++) {
      const row = areas.slice(first, end + 1);
      const depth = (total + areas[end]) / side;
      const shapes = row.map((area) => Math.max(depth ** 2 / area, area / depth ** 2));
      if (Math.max(...shapes) > worst) break;
      [total, worst] = [total + areas[end], Math.max(...shapes)];
    }
    const depth = total / side;
    let along = 0;
    for (const area of areas.slice(first, end)) {
      const length = area / depth;
      found.push(
        width < height
          ? { x: x + along, y, width: length, height: depth }
          : { x, y: y + along, width: depth, height: length },
      );
      along += length;
    }
    if (width < height) [y, height] = [y + depth, height - depth];
    else [x, width] = [x + depth, width - depth];
  }
  return found.map((one) => ({ x: one.x / ratio, y: one.y, width: one.width / ratio, height: one.height }));
}

/** Return how much of its budget, or of the device's memory, a tier takes. */
function budgetOf({ name, nbytes }, budget) {
  const text = ` of ${bytes(budget)} ${name === "host" ? "budget" : "memory"}, ${percent(nbytes / budget)}`;
  return [
    h("span", { class: nbytes > budget ? "bad" : "muted" }, text),
    h("meter", { min: "0", max: budget, value: nbytes, "aria-label": `${name}: ${bytes(nbytes)}${text}` }),
  ];
}
