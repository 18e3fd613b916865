// The checkpoints of a run: a chart over steps or time, a table, what was left unfinished, and the prune.
//
// For tests: checkpoints-total, checkpoints-filter, checkpoints-table with grid-row (data-key: the checkpoint), sort-<column>,
// open-selected, verify-selected, mark-selected (see parts/marks.js), compare-selected, open-prune, prune (see parts/prune.js),
// timeline, axis-step, axis-time, mark,
// unfinished, refused, verify-job (see parts/job.js), and the buttons of parts/actions.js.

import { api, get, has, isReport, listen } from "../data.js";
import { h, replace, titled } from "../dom.js";
import { bytes, count, counted, number } from "../format.js";
import { here, note, runUrl } from "../router.js";
import { empty } from "../states.js";
import { actionButton, whyNot } from "../parts/act.js";
import { RunActions } from "../parts/actions.js";
import { age, fact, marks } from "../parts/facts.js";
import { filterField, filterText, fits } from "../parts/filter.js";
import { Grid } from "../parts/grid.js";
import { refusedPanel, unfinishedPanel } from "../parts/leftovers.js";
import { changeMarks } from "../parts/marks.js";
import { PrunePanel } from "../parts/prune.js";
import { Timeline } from "../parts/timeline.js";
import { startVerify } from "../parts/verify.js";

const MOST_METRICS = 4;

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
    this.doomed = new Set();
    this.closing = [];
    this.makeParts();
  }

  makeParts() {
    const { run, context, query } = this;
    this.actions = new RunActions(run, context, () => void this.refresh());
    this.timeline = new Timeline((entry) => this.pick(entry));
    this.grid = new Grid({
      label: `Checkpoints of ${run}`,
      test: "checkpoints-table",
      keyOf: (entry) => entry.checkpoint,
      most: 2,
      onOpen: (entry) => context.go(this.urlOf(entry)),
      onSelect: () => this.selectionChanged(),
      onSort: ({ key, down }) => note({ sort: down ? `-${key}` : key }),
    });
    const sort = query.get("sort") ?? "";
    this.grid.sort = { key: sort.replace(/^-/, ""), down: sort.startsWith("-") };
    this.grid.selected = [query.get("select"), query.get("with")].filter((key) => key !== null);
    this.facts = h("dl", { class: "facts" });
    this.toolbar = h("div", { class: "row" });
    this.prunePlace = h("div", { hidden: true });
    this.verifyPlace = h("div", { test: "verify-job", hidden: true });
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
      h("div", { class: "row toolbar" }, filter, this.found, h("span", { class: "spring" }), this.toolbar),
      this.grid.element,
      h("p", { class: "hint" }, "Click or tap rows to select one or two. ", h("span", { class: "keys" }, "Arrows move, space selects, Enter opens.")),
    );
    this.element = h("div", { class: "view", test: "checkpoints" });
  }

  async load() {
    const [list, detail] = await Promise.all([get(api(["runs", this.run, "checkpoints"])), this.getRun()]);
    this.take(list, detail);
  }

  /** The run itself; a list of checkpoints is shown without it too. */
  async getRun() {
    const path = api(["runs", this.run]);
    return has(path) ? get(path) : null;
  }

  take(list, detail) {
    this.list = list;
    this.detail = detail;
    this.written = new Map();
    for (const save of detail?.saves ?? []) {
      if (save.written_bytes !== null) this.written.set(`${save.tag} ${save.step}`, save.written_bytes);
    }
    this.metrics = metricNames(list.checkpoints);
  }

  /** Put everything in its place, once; `drawData` does it each time. */
  draw() {
    replace(
      this.element,
      this.trouble,
      h("section", { class: "panel" }, h("div", { class: "row spread" }, this.facts, this.buttons())),
      this.prunePlace,
      this.verifyPlace,
      this.isEmpty ? nothingYet() : [this.chartPanel(), this.tablePanel],
      this.leavings,
    );
    this.drawData();
    if (this.grid.selected.length > 0) this.grid.reveal(this.grid.selected[0]);
    if (this.query.has("prune") && whyNot(this.context.service) === null) this.openPrune();
    if (!isReport) this.follow();
  }

  /** Take what changes while it is looked at. */
  follow() {
    const changed = () => void this.refresh();
    const end = listen(api(["runs", this.run, "events"]), {
      open: () => {
        this.trouble.hidden = true;
      },
      lost: () => this.fail("the connection to the service is lost; reconnecting."),
      again: changed,
      checkpoints: changed,
      run: (detail) => {
        this.detail = detail;
        this.actions.update(detail);
      },
    });
    this.closing.push(end);
  }

  close() {
    for (const end of this.closing) end();
    for (const part of [this.actions, this.timeline, this.grid, this.prune]) part?.close();
  }

  async refresh() {
    const wasEmpty = this.isEmpty;
    try {
      await this.load();
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
    const { checkpoints, unfinished, refused, dangling, total_bytes: total } = this.list;
    const gone = Object.entries(dangling).map(([tag, checkpoint]) => `@${tag} (${checkpoint})`);
    const newest = checkpoints.at(-1);
    replace(
      this.facts,
      fact("Checkpoints", count(checkpoints.length), { test: "checkpoints-count" }),
      fact("On disk, each file once", bytes(total), { test: "checkpoints-total" }),
      newest === undefined ? null : fact("Newest", [`step ${count(newest.step)}, `, age(newest.committed_at)]),
      unfinished.length === 0 ? null : fact("Not committed", count(unfinished.length)),
      gone.length === 0 ? null : fact("Tags of checkpoints that are gone", h("span", { class: "bad" }, gone.join(", "))),
      refused.length === 0 ? null : fact("Refused", h("span", { class: "bad" }, count(refused.length))),
    );
    if (this.detail !== null) this.actions.update(this.detail);
    this.drawRows();
    replace(this.leavings, unfinishedPanel(unfinished), refusedPanel(refused));
  }

  buttons() {
    if (isReport) return null;
    const reason = this.isEmpty ? "There is no checkpoint to remove." : whyNot(this.context.service);
    return h(
      "div",
      { class: "row" },
      actionButton("Prune…", "open-prune", () => this.openPrune(), reason),
      this.detail === null ? null : this.actions.element,
    );
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
    this.drawToolbar();
  }

  drawTimeline() {
    this.timeline.show(this.shownEntries, { axis: this.axis, selected: this.grid.selected, doomed: this.doomed });
  }

  columns() {
    const link = (entry) => {
      const place = { href: this.urlOf(entry), tabindex: "-1", title: entry.checkpoint, test: "checkpoint-link" };
      return [h("a", place, h("bdi", null, entry.tag)), marks(entry)];
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
    const [first, second] = this.grid.selected;
    note({ select: first ?? null, with: second ?? null });
    this.drawTimeline();
    this.drawToolbar();
  }

  pick(entry) {
    this.grid.reveal(entry.checkpoint);
    this.grid.element.scrollIntoView({ block: "nearest" });
  }

  drawToolbar() {
    const [a, b] = this.grid.selected.map((key) => this.list.checkpoints.find((entry) => entry.checkpoint === key));
    const one = b === undefined ? a : undefined;
    const pick = (many) => `Select ${many} in the table first.`;
    const notOne = one === undefined ? pick("one checkpoint") : null;
    const compare = () => {
      const [before, after] = a.committed_at <= b.committed_at ? [a, b] : [b, a];
      this.context.go(runUrl(this.run, "compare", { before: before.checkpoint, after: after.checkpoint }));
    };
    const verify = () => this.verify(one);
    const mark = () => changeMarks(this.run, one, this.context, () => void this.refresh());
    const notHere = one?.checkpoint.includes("/") ? "Only checkpoints in the run's own folder have tags and holds." : null;
    replace(
      this.toolbar,
      actionButton("Open", "open-selected", () => this.context.go(this.urlOf(one)), notOne),
      isReport ? null : actionButton("Verify", "verify-selected", verify, notOne ?? whyNot(this.context.service)),
      isReport ? null : actionButton("Tag…", "mark-selected", mark, notOne ?? notHere ?? whyNot(this.context.service)),
      actionButton("Compare", "compare-selected", compare, b === undefined ? pick("two checkpoints") : null),
    );
  }

  verify(entry) {
    this.verifyPlace.hidden = false;
    this.closing.push(startVerify(this.verifyPlace, this.run, entry.checkpoint, this.context));
  }

  openPrune() {
    note({ prune: "1" });
    this.prune?.close();
    this.prune = new PrunePanel({
      run: this.run,
      context: this.context,
      metrics: metricNames(this.list.checkpoints, Infinity),
      query: here().query,
      onPlan: (keys) => {
        this.doomed = keys;
        this.drawTimeline();
      },
      onRemoved: () => void this.refresh(),
      onClose: () => this.closePrune(),
    });
    this.prunePlace.hidden = false;
    replace(this.prunePlace, this.prune.element);
    this.prune.focus();
  }

  closePrune() {
    note({ prune: null, keep_last: null, keep_every: null, keep_best: null, keep_tags: null });
    this.prune.close();
    this.prune = null;
    this.prunePlace.hidden = true;
    this.doomed = new Set();
    this.drawTimeline();
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
