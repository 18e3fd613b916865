// The checkpoints of a run: a chart over steps or time, a table, and what was left unfinished.
//
// For tests: checkpoints-total, checkpoints-filter, checkpoints-table with grid-row (data-key: the checkpoint), sort-<column>,
// timeline, axis-step, axis-time, mark, unfinished, refused.

import { api, get } from "../data.js";
import { h, replace, titled } from "../dom.js";
import { bytes, count, counted, number } from "../format.js";
import { note, runUrl } from "../router.js";
import { empty } from "../states.js";
import { age, fact } from "../parts/facts.js";
import { filterField, filterText, fits } from "../parts/filter.js";
import { Grid } from "../parts/grid.js";
import { refusedPanel, unfinishedPanel } from "../parts/leftovers.js";
import { repeat } from "../parts/poll.js";
import { Timeline } from "../parts/timeline.js";

const MOST_METRICS = 4;
const EVERY_S = 5;

export async function show(container, params, context) {
  const view = new CheckpointsView(params, context);
  await view.load();
  replace(container, view.element);
  view.draw();
  return () => view.close();
}

class CheckpointsView {
  constructor({ run, query }, context) {
    Object.assign(this, { run, query, context });
    this.axis = query.get("axis") === "time" ? "time" : "step";
    this.filterText = filterText();
    this.makeParts();
  }

  makeParts() {
    const { run, context, query } = this;
    this.timeline = new Timeline((entry) => this.pick(entry));
    this.grid = new Grid({
      label: `Checkpoints of ${run}`,
      test: "checkpoints-table",
      keyOf: (entry) => entry.checkpoint,
      most: 1,
      onOpen: (entry) => context.go(this.urlOf(entry)),
      onSelect: () => this.selectionChanged(),
      onSort: ({ key, down }) => note({ sort: down ? `-${key}` : key }),
    });
    const sort = query.get("sort") ?? "";
    this.grid.sort = { key: sort.replace(/^-/, ""), down: sort.startsWith("-") };
    this.grid.selected = [query.get("select")].filter((key) => key !== null);
    this.facts = h("dl", { class: "facts" });
    this.leavings = h("div", { class: "view" });
    this.found = h("span", { class: "muted", role: "status" });
    this.trouble = h("p", { class: "bad", role: "alert", hidden: true });
    const filter = filterField(
      { label: "Filter checkpoints by name or step", placeholder: "Filter by name or step", test: "checkpoints-filter" },
      (text) => {
        this.filterText = text;
        this.drawRows();
      },
    );
    this.tablePanel = h(
      "section",
      { class: "panel", "aria-label": "Table of checkpoints" },
      h("div", { class: "row toolbar" }, filter, this.found),
      this.grid.element,
      h("p", { class: "hint" }, "Click or tap a row to select it. ", h("span", { class: "keys" }, "Arrows move, space selects, Enter opens.")),
    );
    this.element = h("div", { class: "view", test: "checkpoints" });
  }

  async load() {
    const [list, detail] = await Promise.all([get(api(["runs", this.run, "checkpoints"])), get(api(["runs", this.run]))]);
    this.take(list, detail);
  }

  take(list, detail) {
    this.list = list;
    this.detail = detail;
    this.written = new Map();
    for (const save of detail.saves) {
      if (save.written_bytes !== null) this.written.set(`${save.tag} ${save.step}`, save.written_bytes);
    }
    this.metrics = metricNames(list.checkpoints);
  }

  /** Put everything in its place, once; `drawData` does it each time. */
  draw() {
    replace(
      this.element,
      this.trouble,
      h("section", { class: "panel" }, this.facts),
      this.isEmpty ? nothingYet() : [this.chartPanel(), this.tablePanel],
      this.leavings,
    );
    this.drawData();
    if (this.grid.selected.length > 0) this.grid.reveal(this.grid.selected[0]);
    this.end = repeat(() => this.refresh().then(() => EVERY_S), () => {}, EVERY_S);
  }

  close() {
    this.end();
    for (const part of [this.timeline, this.grid]) part.close();
  }

  async refresh() {
    const wasEmpty = this.isEmpty;
    try {
      await this.load();
      this.trouble.hidden = true;
    } catch (error) {
      this.fail(error.message);
      return;
    }
    if (wasEmpty !== this.isEmpty) this.context.reload();
    else this.drawData();
  }

  get isEmpty() {
    return this.list.checkpoints.length === 0;
  }

  fail(text) {
    this.trouble.hidden = false;
    this.trouble.textContent = `This may be out of date: ${text}`;
  }

  drawData() {
    const { checkpoints, unfinished, refused, total_bytes: total } = this.list;
    const newest = checkpoints.at(-1);
    replace(
      this.facts,
      fact("Checkpoints", count(checkpoints.length), { test: "checkpoints-count" }),
      fact("On disk, each file once", bytes(total), { test: "checkpoints-total" }),
      newest === undefined ? null : fact("Newest", [`step ${count(newest.step)}, `, age(newest.committed_at)]),
      unfinished.length === 0 ? null : fact("Not committed", count(unfinished.length)),
      refused.length === 0 ? null : fact("Refused", h("span", { class: "bad" }, count(refused.length))),
    );
    this.drawRows();
    replace(this.leavings, unfinishedPanel(unfinished), refusedPanel(refused));
  }

  chartPanel() {
    const button = (axis, text) => {
      const pressed = String(this.axis === axis);
      const turn = () => this.setAxis(axis);
      return h("button", { type: "button", class: "small", "aria-pressed": pressed, onclick: turn, test: `axis-${axis}` }, text);
    };
    this.axisButtons = { step: button("step", "By step"), time: button("time", "By time") };
    return h(
      "section",
      { class: "panel", "aria-label": "Sizes of checkpoints" },
      titled(h("h2", null, "Size on disk"), Object.values(this.axisButtons)),
      this.timeline.element,
    );
  }

  setAxis(axis) {
    this.axis = axis;
    note({ axis: axis === "step" ? null : axis });
    for (const [name, button] of Object.entries(this.axisButtons)) {
      button.setAttribute("aria-pressed", String(name === axis));
    }
    this.drawTimeline();
  }

  drawRows() {
    const all = this.list.checkpoints;
    const shown = all.filter((entry) => fits(`${entry.checkpoint} ${entry.tag} ${entry.step}`, this.filterText));
    const keys = new Set(all.map((entry) => entry.checkpoint));
    this.grid.selected = this.grid.selected.filter((key) => keys.has(key));
    // The newest first, as long as nobody sorts otherwise.
    this.grid.show([...shown].reverse(), this.columns());
    this.found.textContent = this.filterText.trim() ? `${count(shown.length)} of ${counted(all.length, "checkpoint")}` : "";
    this.shownEntries = shown;
    this.drawTimeline();
  }

  drawTimeline() {
    this.timeline.show(this.shownEntries, { axis: this.axis, selected: this.grid.selected, doomed: new Set() });
  }

  columns() {
    const link = (entry) => {
      const place = { href: this.urlOf(entry), tabindex: "-1", title: entry.checkpoint, test: "checkpoint-link" };
      return [h("a", place, h("bdi", null, entry.tag))];
    };
    const ageOf = (entry) => age(entry.committed_at);
    const metric = (name) => {
      const label = h("bdi", null, name.slice(0, 40));
      const value = (entry) => entry.metrics[name] ?? null;
      return { ...numberColumn(`metric-${name}`, label, "6.5rem", number, value), hint: name };
    };
    const writtenBy = (entry) => this.written.get(`${entry.tag} ${entry.step}`) ?? null;
    const step = numberColumn("step", "Step", "5.5rem", count, (entry) => entry.step);
    const size = sizeColumn("size", "Size", "Bytes of all its files", (entry) => entry.size_bytes);
    const sharedHint = "Of those, what other checkpoints have too";
    const shared = sizeColumn("shared", "Shared", sharedHint, (entry) => entry.shared_bytes);
    const freed = sizeColumn("freed", "Frees", "Bytes freed by removing only this checkpoint", (entry) => entry.freed_bytes);
    const written = sizeColumn("written", "Written", "New bytes that its save wrote, from the journal", writtenBy);
    const phone = matchMedia("(max-width: 640px)").matches;
    const tag = { key: "tag", label: "Checkpoint", width: "minmax(7rem, 1.5fr)", cell: link, value: (entry) => entry.tag };
    return [
      { ...tag, stays: true },
      ...(phone ? [size, freed, shared, step] : [step, size, shared, freed]),
      ...(this.written.size > 0 ? [written] : []),
      { key: "age", label: "Saved", width: "6.5rem", cell: ageOf, value: (entry) => -entry.committed_at },
      numberColumn("ranks", "Ranks", "4.5rem", count, (entry) => entry.world_size),
      ...this.metrics.map(metric),
    ];
  }

  urlOf(entry) {
    return runUrl(this.run, `checkpoint/${entry.checkpoint}`);
  }

  selectionChanged() {
    note({ select: this.grid.selected[0] ?? null });
    this.drawTimeline();
  }

  pick(entry) {
    this.grid.reveal(entry.checkpoint);
    this.grid.element.scrollIntoView({ block: "nearest" });
  }
}

function numberColumn(key, label, width, textOf, value) {
  return { key, label, width, numeric: true, cell: (entry) => textOf(value(entry)), value };
}

function sizeColumn(key, label, hint, value) {
  return { ...numberColumn(key, label, "5.5rem", bytes, value), hint };
}

function metricNames(entries, most = MOST_METRICS) {
  const names = new Set();
  for (const entry of entries) for (const name of Object.keys(entry.metrics)) names.add(name);
  return [...names].sort().slice(0, most);
}

function nothingYet() {
  return empty(
    "No checkpoints yet",
    "Checkpoints appear here once they are committed.",
    'engine.save_checkpoint("folder")',
  );
}
