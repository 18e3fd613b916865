// The checkpoints of a run: their sizes, and what they share.

import { age, empty, fact, facts, h, panel, refill, replace, runUrl, swatch } from "./dom.js";
import { ago, bytes, count, number } from "./format.js";
import { api, get, repeat } from "./service.js";
import { Table } from "./table.js";

const EVERY_S = 5;
const MOST_METRICS = 4;
/** What bytes of a checkpoint are, with the colours of the bars. */
const PARTS = [
  { text: "freed when it is removed", colour: 0, size: (entry) => entry.freed_bytes },
  { text: "shared with other checkpoints", colour: 2, size: (entry) => entry.shared_bytes },
  {
    text: "shared with the run's working files",
    colour: 7,
    size: (entry) => Math.max(0, entry.size_bytes - entry.shared_bytes - entry.freed_bytes),
  },
];

export async function show(container, { run }) {
  const path = api(["runs", run, "checkpoints"]);
  const lost = h("p", { class: "bad", role: "status", hidden: true }, "No answer: this may be out of date.");
  const [head, refusals] = [h("div"), h("div", { class: "view" })];
  const first = await get(path);
  const table = new Table({
    columns: columnsOf(run, metricsOf(first.checkpoints)),
    label: `Checkpoints of ${run}`,
    noun: "checkpoint",
    test: "checkpoint",
    key: (entry) => entry.checkpoint,
    sort: "-committed_at",
    text: ({ checkpoint, tag, step }) => `${checkpoint} ${tag} ${step}`,
  });
  const legend = PARTS.map(({ text, colour }) => h("span", { class: "key" }, swatch(colour), text));
  const legendRow = h("div", { class: "legend" }, legend);
  const list = h("section", { class: "panel", "aria-label": "Checkpoints" }, legendRow, table.element);
  const none = empty("No checkpoints yet", "They appear once committed.", 'engine.save_checkpoint("folder")');
  const draw = (answer) => {
    const { checkpoints, refused } = answer;
    const most = Math.max(...checkpoints.map((entry) => entry.size_bytes));
    table.show(checkpoints.map((entry) => ({ ...entry, most, ago: ago(entry.committed_at) })));
    list.hidden = checkpoints.length === 0;
    none.hidden = checkpoints.length > 0;
    refill(head, [answer, ago(checkpoints.at(-1)?.committed_at)], () => headOf(answer));
    refill(refusals, refused, refusedPanel);
  };
  draw(first);
  replace(container, lost, h("section", { class: "panel" }, head), list, none, refusals);
  const follow = async () => draw(await get(path));
  return repeat(follow, EVERY_S, (isLive) => (lost.hidden = isLive));
}

function headOf({ checkpoints, total_bytes: total }) {
  const newest = checkpoints.at(-1);
  const all = checkpoints.reduce((sum, entry) => sum + entry.size_bytes, 0);
  return facts(
    fact("Checkpoints", count(checkpoints.length)),
    fact("On disk, each file once", bytes(total), { test: "checkpoints-total" }),
    fact("Without sharing", bytes(all), { hint: "The sum of their sizes" }),
    newest && fact("Newest", [`step ${count(newest.step)}, `, age(newest.committed_at)]),
  );
}

function metricsOf(entries) {
  return [...new Set(entries.flatMap((entry) => Object.keys(entry.metrics)))].sort().slice(0, MOST_METRICS);
}

function columnsOf(run, metrics) {
  return [
    { key: "tag", label: "Checkpoint", cell: (entry) => linkTo(run, entry) },
    { key: "step", label: "Step", text: count, numeric: true, wide: true },
    { key: "bar", label: "", value: (entry) => entry.size_bytes, cell: barOf, wide: true },
    { key: "size_bytes", label: "Size", text: bytes, numeric: true, hint: "All its files" },
    { key: "shared_bytes", label: "Shared", text: bytes, numeric: true, wide: true, hint: "Others have them too" },
    { key: "freed_bytes", label: "Frees", text: bytes, numeric: true, hint: "Bytes that removing this one frees" },
    { key: "committed_at", label: "Saved", text: age, numeric: true },
    { key: "world_size", label: "Ranks", text: count, numeric: true, wide: true },
    ...metrics.map((name) => ({
      key: `metric-${name}`,
      label: name.slice(0, 40),
      value: (entry) => entry.metrics[name] ?? null,
      text: number,
      numeric: true,
      wide: true,
    })),
  ];
}

function linkTo(run, { checkpoint, tag }) {
  const href = runUrl(run, `checkpoint/${checkpoint}`);
  return h("a", { href, title: checkpoint, test: "checkpoint-link" }, h("bdi", null, tag));
}

/** Return a bar of the parts of a checkpoint, all bars on one scale. */
function barOf(entry) {
  const bars = PARTS.map(({ colour, size }) => {
    const style = { width: `${(100 * size(entry)) / entry.most}%`, background: `var(--series-${colour})` };
    return h("i", { style });
  });
  return h("div", { class: "bar", "aria-hidden": "true" }, bars);
}

/** Return the panel of folders that look like checkpoints and are none, null if there are none. */
function refusedPanel(refused) {
  if (refused.length === 0) return null;
  const entries = refused.map(({ name, reason }) =>
    h("li", null, h("span", { class: "name" }, name), h("span", { class: "muted name" }, reason)),
  );
  return panel(
    "Refused",
    "refused",
    h("p", { class: "muted" }, "These folders look like checkpoints but are not valid."),
    h("ul", { class: "plain" }, entries),
  );
}
