// The list of runs: what each does now, and its newest checkpoint.

import { api, get } from "../data.js";
import { h, replace, titled } from "../dom.js";
import { ago, count, counted, number, short, when } from "../format.js";
import { here, note, runUrl } from "../router.js";
import { stateTag } from "../parts/facts.js";
import { filterField, filterText, fits } from "../parts/filter.js";
import { repeat } from "../parts/poll.js";
import { empty } from "../states.js";

const EVERY_S = 3;
const COLUMNS = [
  { key: "name", text: "Run", value: (run) => run.name },
  { key: "state", text: "State", value: (run) => run.state },
  { key: "step", text: "Step", num: true, value: (run) => run.step },
  { key: "loss", text: "Loss", num: true, value: (run) => run.loss },
  { key: "speed", text: "Tokens/s", num: true, value: (run) => run.tokens_per_s },
  { key: "newest", text: "Newest checkpoint", value: (run) => run.newest?.step ?? null },
  { key: "count", text: "Checkpoints", num: true, value: (run) => run.num_checkpoints },
  { key: "updated", text: "Updated", num: true, value: (run) => run.updated_at },
];

export async function show(container) {
  const list = new RunTable();
  await list.look();
  replace(container, list.element);
  const look = async () => {
    try {
      await list.look();
      list.setLost(null);
    } catch (error) {
      list.setLost(error.message);
      throw error;
    }
    return EVERY_S;
  };
  return repeat(look, () => {}, EVERY_S);
}

class RunTable {
  constructor() {
    const { query } = here();
    this.runs = [];
    this.rows = new Map();
    this.filter = filterText();
    const sort = query.get("sort") ?? "-updated";
    this.key = COLUMNS.some((column) => column.key === sort.replace("-", "")) ? sort.replace("-", "") : "updated";
    this.down = sort.startsWith("-");
    this.body = h("tbody");
    this.count = h("span", { class: "hint", role: "status" });
    this.lost = h("span", { class: "tag bad dot", hidden: true }, "no answer");
    this.heads = COLUMNS.map((column) =>
      h(
        "th",
        { scope: "col", class: column.num ? "num" : null },
        h("button", { type: "button", class: "heading", onclick: () => this.sortBy(column.key), test: `sort-${column.key}` }, column.text),
      ),
    );
    const field = filterField({ label: "Filter runs by name or folder", placeholder: "Filter" }, (text) => {
      this.filter = text;
      this.draw();
    });
    this.none = h("p", { class: "hint", hidden: true }, "No run matches.");
    this.table = h(
      "section",
      { class: "panel flush" },
      h("div", { class: "scroll" }, h("table", { class: "cards", test: "runs" }, h("thead", null, h("tr", null, this.heads)), this.body)),
      this.none,
    );
    this.missing = empty(
      "No runs yet",
      "The served folders have no checkpoints and no journals. Training with zstore writes both. Serve the folder that it saves to:",
      "zstore serve runs/my-run",
    );
    this.tools = titled([h("h1", null, "Runs"), this.count, this.lost], field);
    this.element = h("div", { class: "view" }, this.tools, this.table, this.missing);
  }

  /** Ask for the runs; of several answers the last one that was asked for counts. */
  async look() {
    const ticket = (this.ticket = (this.ticket ?? 0) + 1);
    const { runs } = await get(api(["runs"]));
    if (ticket !== this.ticket) return;
    this.runs = runs;
    this.draw();
  }

  setLost(text) {
    this.lost.hidden = text === null;
    this.lost.title = text ?? "";
  }

  sortBy(key) {
    this.down = this.key === key ? !this.down : key !== "name" && key !== "state";
    this.key = key;
    note({ sort: `${this.down ? "-" : ""}${key}` });
    this.draw();
  }

  draw() {
    const found = this.runs.filter((run) => fits(`${run.name} ${run.location}`, this.filter));
    const total = this.runs.length;
    const column = COLUMNS.find((one) => one.key === this.key);
    found.sort((a, b) => compare(column.value(a), column.value(b), this.down) || compare(a.name, b.name, false));
    this.missing.hidden = total > 0;
    this.table.hidden = total === 0;
    this.none.hidden = found.length > 0;
    this.count.textContent = found.length === total ? counted(total, "run") : `${count(found.length)} of ${counted(total, "run")}`;
    for (const [index, head] of this.heads.entries()) {
      if (COLUMNS[index].key === this.key) head.setAttribute("aria-sort", this.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
    const rows = found.map((run) => this.row(run));
    const same = rows.length === this.body.children.length && rows.every((row, index) => this.body.children[index] === row);
    if (!same) replace(this.body, rows);
  }

  /** Return the row of a run: the one that is there with what changed in it, so that focus and selected text stay. */
  row(run) {
    const parts = cells(run);
    let row = this.rows.get(run.name);
    if (row === undefined) {
      row = h("tr", { test: "run" }, parts.map((part, index) => cell(COLUMNS[index], part)));
      row.kept = parts.map(JSON.stringify);
      this.rows.set(run.name, row);
      return row;
    }
    for (const [index, part] of parts.entries()) {
      const text = JSON.stringify(part);
      if (row.kept[index] === text) continue;
      row.kept[index] = text;
      row.children[index].replaceWith(cell(COLUMNS[index], part));
    }
    return row;
  }
}

/** Return what stands in each cell, as data. */
function cells(run) {
  return [
    { name: run.name, location: run.location, problem: run.problem },
    { state: run.state, error: run.error, wrong: run.not_finite_step },
    { step: run.step, total: run.total_steps },
    { text: number(run.loss) },
    { text: short(run.tokens_per_s) },
    { run: run.name, newest: run.newest },
    { text: count(run.num_checkpoints) },
    { text: ago(run.updated_at), title: when(run.updated_at) },
  ];
}

function cell(column, part) {
  if (column.key === "name") {
    return h(
      "th",
      { scope: "row", class: "name" },
      h("div", null, h("a", { href: runUrl(part.name) }, part.name), h("div", { class: "hint" }, part.location), part.problem ? h("div", { class: "bad" }, part.problem) : null),
    );
  }
  return h("td", { class: column.num ? "num" : null, "data-label": column.text, title: part.title }, inside(column.key, part));
}

function inside(key, part) {
  if (key === "state") {
    const wrong = part.wrong === null ? null : h("div", { class: "bad" }, `not finite at step ${count(part.wrong)}`);
    return [stateTag(part.state), part.error ? h("div", { class: "bad" }, part.error) : null, wrong];
  }
  if (key === "step") return h("span", null, count(part.step), part.total === null ? null : h("span", { class: "muted" }, ` / ${count(part.total)}`));
  if (key !== "newest") return part.text;
  if (part.newest === null) return h("span", { class: "muted" }, "none");
  const { checkpoint, tag } = part.newest;
  return h("a", { class: "name", href: runUrl(part.run, `checkpoint/${checkpoint}`) }, tag);
}

function compare(a, b, down) {
  if (a === null || b === null) return a === b ? 0 : a === null ? 1 : -1; // What is not known comes last, both ways.
  const order = typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
  return down ? -order : order;
}
