// The list of runs: what each does now, and its newest checkpoint.

import { api, get, isReport } from "../data.js";
import { h, replace, titled } from "../dom.js";
import { ago, count, counted, number, short, when } from "../format.js";
import { go, here, note, runUrl } from "../router.js";
import { runMarks, stateTag } from "../parts/facts.js";
import { filterField, filterText } from "../parts/filter.js";
import { repeat } from "../parts/poll.js";
import { empty } from "../states.js";
import { compareUrl } from "./runscompare.js";

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
  if (isReport) return undefined;
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
    this.headings = new Map();
    this.chosen = new Set();
    this.compare = h("button", { type: "button", class: "choose-runs", disabled: true, test: "compare-runs", onclick: () => go(compareUrl([...this.chosen])) }, "Compare");
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
    const field = filterField({ label: "Search names, tags, groups, notes and settings, such as lr=0.001", placeholder: "Search" }, (text) => {
      this.filter = text;
      void this.look().catch((error) => this.setLost(error.message));
    });
    this.isGrouped = query.get("grouped") === "1";
    this.grouping = h("button", { type: "button", "aria-pressed": String(this.isGrouped), test: "group-runs", onclick: () => this.group(!this.isGrouped) }, "By group");
    this.none = h("p", { class: "hint", hidden: true }, "No run matches.");
    this.table = h(
      "section",
      { class: "panel flush" },
      h("div", { class: "scroll" }, h("table", { class: "cards", test: "runs" }, h("thead", null, h("tr", null, h("th", { class: "choose" }, h("span", { class: "visually-hidden" }, "Chosen")), this.heads)), this.body)),
      this.none,
    );
    this.missing = empty(
      "No runs yet",
      "The served folders have no checkpoints and no journals. Training with zstore writes both. Serve the folder that it saves to:",
      "zstore serve runs/my-run",
    );
    this.tools = titled([h("h1", null, "Runs"), this.count, this.lost], this.compare, this.grouping, field);
    this.element = h("div", { class: "view" }, this.tools, this.table, this.missing);
  }

  /** Ask for the runs that match what is typed; of several answers the last one that was asked for counts. */
  async look() {
    const ticket = (this.ticket = (this.ticket ?? 0) + 1);
    const { runs, num_runs: total } = await get(api(["runs"], { q: this.filter || null }));
    if (ticket !== this.ticket) return;
    Object.assign(this, { runs, total });
    this.draw();
  }

  group(isGrouped) {
    this.isGrouped = isGrouped;
    note({ grouped: isGrouped ? "1" : null });
    this.grouping.setAttribute("aria-pressed", String(isGrouped));
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
    const found = [...this.runs];
    const column = COLUMNS.find((one) => one.key === this.key);
    const group = (run) => (this.isGrouped ? run.group || null : "");
    found.sort((a, b) => compare(group(a), group(b), false) || compare(column.value(a), column.value(b), this.down) || compare(a.name, b.name, false));
    this.missing.hidden = this.total > 0;
    this.table.hidden = this.total === 0;
    this.grouping.hidden = !this.isGrouped && !found.some((run) => run.group);
    this.none.hidden = found.length > 0;
    this.count.textContent = found.length === this.total ? counted(this.total, "run") : `${count(found.length)} of ${counted(this.total, "run")}`;
    for (const [index, head] of this.heads.entries()) {
      if (COLUMNS[index].key === this.key) head.setAttribute("aria-sort", this.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
    const begins = (index) => this.isGrouped && (index === 0 || group(found[index]) !== group(found[index - 1]));
    const rows = found.flatMap((run, index) => (begins(index) ? [this.heading(run.group), this.row(run)] : [this.row(run)]));
    const same = rows.length === this.body.children.length && rows.every((row, index) => this.body.children[index] === row);
    if (!same) replace(this.body, rows);
  }

  /** Return the cell whose box chooses a run for a comparison. */
  box(name) {
    const box = h("input", { type: "checkbox", "aria-label": `Compare ${name}`, test: "choose-run" });
    box.addEventListener("change", () => {
      if (box.checked) this.chosen.add(name);
      else this.chosen.delete(name);
      this.compare.disabled = this.chosen.size < 2;
      replace(this.compare, this.chosen.size < 2 ? "Compare" : `Compare ${this.chosen.size} runs`);
    });
    return h("td", { class: "choose", "data-label": "Compare" }, box);
  }

  /** Return the row above the runs of a group. */
  heading(group) {
    const row = this.headings.get(group) ?? h("tr", { class: "group", test: "run-group" }, h("th", { scope: "rowgroup", colspan: COLUMNS.length + 1 }, group || "No group"));
    this.headings.set(group, row);
    return row;
  }

  /** Return the row of a run: the one that is there with what changed in it, so that focus and selected text stay. */
  row(run) {
    const parts = cells(run);
    let row = this.rows.get(run.name);
    if (row === undefined) {
      row = h("tr", { test: "run" }, this.box(run.name), parts.map((part, index) => cell(COLUMNS[index], part)));
      row.kept = parts.map(JSON.stringify);
      this.rows.set(run.name, row);
      return row;
    }
    for (const [index, part] of parts.entries()) {
      const text = JSON.stringify(part);
      if (row.kept[index] === text) continue;
      row.kept[index] = text;
      row.children[index + 1].replaceWith(cell(COLUMNS[index], part));
    }
    return row;
  }
}

/** Return what stands in each cell, as data. */
function cells(run) {
  return [
    { name: run.name, location: run.location, problem: run.problem, tags: run.tags, group: run.group, note: run.note },
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
      h("div", null, h("a", { href: runUrl(part.name) }, part.name), h("div", { class: "hint" }, part.location), h("div", null, runMarks(part)), part.problem ? h("div", { class: "bad" }, part.problem) : null),
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
