// The list of runs: what each does now, and its newest checkpoint.

import { empty, h, replace, runUrl, stateTag, titled } from "./dom.js";
import { ago, count, number, short } from "./format.js";
import { api, get, repeat } from "./service.js";
import { Table } from "./table.js";

const EVERY_S = 3;
const COLUMNS = [
  { key: "name", label: "Run", cell: nameOf },
  { key: "state", label: "State", cell: stateOf },
  { key: "step", label: "Step", cell: stepOf, numeric: true },
  { key: "loss", label: "Loss", text: number, numeric: true },
  { key: "tokens_per_s", label: "Tokens/s", text: short, numeric: true, wide: true },
  { key: "newest", label: "Newest checkpoint", value: (run) => run.newest?.step ?? null, cell: newestOf, wide: true },
  { key: "updated_at", label: "Updated", cell: (run) => run.ago, numeric: true, wide: true },
];

export async function show(container) {
  const table = new Table({
    columns: COLUMNS,
    label: "Runs",
    noun: "run",
    test: "run",
    key: (run) => run.name,
    sort: "-updated_at",
    text: (run) => `${run.name} ${run.location}`,
  });
  const missing = empty(
    "No runs yet",
    "The served folders have no checkpoints and no journals. Training with zstore writes both. Serve the folder that it saves to:",
    "zstore serve runs/my-run",
  );
  const lost = h("span", { class: "tag bad", role: "status", hidden: true }, "no answer");
  const list = h("section", { class: "panel" }, table.element);
  const look = async () => {
    const { runs } = await get(api(["runs"]));
    table.show(runs.map((run) => ({ ...run, ago: ago(run.updated_at) })));
    list.hidden = runs.length === 0;
    missing.hidden = runs.length > 0;
  };
  await look();
  replace(container, titled(h("h1", null, "Runs"), lost), list, missing);
  return repeat(look, EVERY_S, (isLive) => (lost.hidden = isLive));
}

function nameOf({ name, location, problem }) {
  return [
    h("a", { href: runUrl(name) }, name),
    h("div", { class: "muted" }, location),
    problem ? h("div", { class: "bad" }, problem) : null,
  ];
}

function stateOf({ state, error, failed_save, not_finite_step: wrong }) {
  const problems = [error, failed_save && `save failed: ${failed_save}`, wrong && `not finite at step ${count(wrong)}`];
  return [stateTag(state), problems.filter(Boolean).map((text) => h("div", { class: "bad" }, text))];
}

function stepOf({ step, total_steps: total }) {
  return [count(step), total === null ? null : h("span", { class: "muted" }, ` / ${count(total)}`)];
}

function newestOf({ name, newest, num_checkpoints: amount }) {
  if (newest === null) return h("span", { class: "muted" }, "none");
  return [
    h("a", { href: runUrl(name, `checkpoint/${newest.checkpoint}`) }, newest.tag),
    h("span", { class: "muted" }, ` of ${count(amount)}`),
  ];
}
