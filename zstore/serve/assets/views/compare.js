// How two checkpoints of a run differ.
//
// For tests: compare-before, compare-after, compare-swap, compare-counts with count-<status>, compare-filter, compare-tree
// with tree-group and tree-array (data-name: the array), difference-detail, difference-<field>.

import { api, get, has } from "../data.js";
import { h, replace } from "../dom.js";
import { count, counted, number, percent } from "../format.js";
import { note, runUrl } from "../router.js";
import { empty, load } from "../states.js";
import { buildTree } from "../parts/names.js";
import { fact, marked } from "../parts/facts.js";
import { filterField } from "../parts/filter.js";
import { TreeView } from "../parts/tree.js";
import { inColour } from "../themes.js";

const HEADS = [["Name", ""], ["Difference", ""], ["Chunks changed", "num wide"]];
const STATUSES = ["values", "shape", "dtype", "added", "removed", "unknown"];
/** The colours of statuses. */
const COLOURS = { values: 0, shape: 3, dtype: 6, added: 2, removed: 4, unknown: 7 };
const WORDS = {
  same: "the same",
  values: "values changed",
  shape: "shape changed",
  dtype: "type changed",
  added: "added",
  removed: "removed",
  unknown: "not known by checksums",
};

export async function show(container, params, context) {
  const { run, query } = params;
  const { checkpoints } = await get(api(["runs", run, "checkpoints"]));
  if (checkpoints.length < 2) {
    const number = counted(checkpoints.length, "checkpoint");
    replace(container, empty("Nothing to compare", `The run has ${number}; a comparison needs two.`));
    return undefined;
  }
  const after = query.get("after") ?? checkpoints.at(-1).checkpoint;
  const before = query.get("before") ?? neighbour(checkpoints, after);
  note({ before, after });
  const view = new CompareView({ run, query, context, checkpoints, before, after });
  replace(container, view.element);
  void view.load();
  return () => view.close();
}

/** Return the checkpoint before `after`; the one behind it where there is none before. */
function neighbour(checkpoints, after) {
  const place = checkpoints.findIndex((entry) => entry.checkpoint === after);
  if (place < 0) return checkpoints.at(-2).checkpoint;
  return checkpoints[place === 0 ? 1 : place - 1].checkpoint;
}

class CompareView {
  constructor({ run, query, context, checkpoints, before, after }) {
    Object.assign(this, { run, query, context, checkpoints, before, after });
    this.loading = new AbortController();
    this.opened = new AbortController();
    this.tree = new TreeView({
      label: "Arrays that differ",
      test: "compare-tree",
      kind: "compare",
      cells: differenceCells,
      onOpen: (entry) => this.openArray(entry, true),
    });
    this.statuses = new Set((query.get("status") ?? "").split(",").filter((status) => STATUSES.includes(status)));
    this.counts = h("div", { class: "row", test: "compare-counts" });
    this.found = h("span", { class: "muted", role: "status" });
    this.detail = h("div", { class: "array-detail", test: "difference-detail" });
    this.filterField = filterField({ label: "Filter arrays by name", test: "compare-filter" }, () => this.filter());
    const hint = ["Click or tap an array to compare its values. ", h("span", { class: "keys" }, "Arrows move and open, typing finds a name, Enter compares an array.")];
    this.panes = this.tree.beside(this.detail, HEADS, hint);
    this.place = h("div", { class: "view" });
    this.element = h("div", { class: "view", test: "compare" }, this.pickers(), this.place);
  }

  close() {
    this.loading.abort();
    this.opened.abort();
    this.tree.close();
  }

  pickers() {
    const picker = (label, name, chosen) => {
      const known = this.checkpoints.some((entry) => entry.checkpoint === chosen);
      const options = [...this.checkpoints].reverse().map(({ checkpoint, tag, step }) =>
        h("option", { value: checkpoint, selected: checkpoint === chosen }, `${tag.slice(0, 80)}, step ${count(step)}`),
      );
      // A link may name one that is gone, or `latest`.
      if (!known) options.unshift(h("option", { value: chosen, selected: true }, chosen.slice(0, 80)));
      const select = h("select", { id: `pick-${name}`, test: `compare-${name}` }, options);
      select.addEventListener("change", () => this.goTo({ [name]: select.value }));
      return h("div", { class: "field" }, h("label", { for: `pick-${name}` }, label), select);
    };
    const swap = () => this.goTo({ before: this.after, after: this.before });
    const text = "Swap before and after";
    const button = h("button", { type: "button", onclick: swap, "aria-label": text, title: text, test: "compare-swap" }, "⇄");
    return h(
      "section",
      { class: "panel", "aria-label": "What is compared" },
      h(
        "div",
        { class: "row pickers" },
        picker("Before", "before", this.before),
        button,
        picker("After", "after", this.after),
      ),
    );
  }

  goTo(change) {
    const chosen = { before: this.before, after: this.after, ...change };
    this.context.go(runUrl(this.run, "compare", chosen));
  }

  async load() {
    const path = api(["runs", this.run, "diff"], { before: this.before, after: this.after });
    if (!has(path)) {
      const text = "This comparison is not in the report. Open it in the service that the report was made from.";
      replace(this.place, h("p", { class: "panel muted" }, text));
      return;
    }
    const options = { signal: this.loading.signal, context: this.context, text: "Comparing checksums" };
    await load(this.place, path, options, (difference) => {
      this.difference = difference;
      this.draw();
    });
  }

  draw() {
    const { arrays, counts } = this.difference;
    const same = counts.same ?? 0;
    if (arrays.length === 0) {
      const text = `All ${counted(same, "array")} are the same, byte for byte.`;
      const title = h("h2", { class: "good" }, "No differences");
      replace(this.place, h("section", { class: "panel", test: "compare-counts" }, title, h("p", null, text)));
      return;
    }
    replace(
      this.place,
      h(
        "section",
        { class: "panel", "aria-label": "Arrays that differ" },
        this.counts,
        h("div", { class: "row toolbar" }, this.filterField, this.found),
        this.panes,
      ),
    );
    this.drawTree();
    replace(this.detail, h("p", { class: "hint" }, "Choose an array to compare its values."));
    const name = this.query.get("array");
    const entry = arrays.find((array) => array.name === name);
    if (entry !== undefined) {
      this.tree.select(name);
      void this.openArray(entry, false);
    } else if (name !== null) {
      replace(this.detail, h("p", null, "The array ", h("q", { class: "name" }, name.slice(0, 200)), " is the same in both checkpoints, or in neither of them."));
    }
  }

  drawCounts() {
    const { counts } = this.difference;
    const toggle = (status) => () => {
      if (this.statuses.has(status)) this.statuses.delete(status);
      else this.statuses.add(status);
      note({ status: [...this.statuses].join(",") });
      this.drawTree();
    };
    replace(
      this.counts,
      STATUSES.filter((status) => counts[status]).map((status) => {
        const pressed = String(this.statuses.has(status));
        const attributes = { type: "button", class: "small", "aria-pressed": pressed, test: `count-${status}` };
        const text = `${count(counts[status])} ${WORDS[status]}`;
        return h("button", { ...attributes, onclick: toggle(status) }, swatch(status), text);
      }),
      h("span", { class: "muted", test: "count-same" }, `${count(counts.same ?? 0)} the same`),
    );
  }

  drawTree() {
    this.drawCounts();
    const { arrays } = this.difference;
    const shown = this.statuses.size === 0 ? arrays : arrays.filter((array) => this.statuses.has(array.status));
    const selected = this.tree.selected;
    this.tree.setRoot(buildTree(shown));
    if (selected !== null) this.tree.select(selected);
    this.filter();
  }

  filter() {
    const found = this.tree.filter(this.filterField.value);
    this.found.textContent = found === null ? "" : `${count(found)} of ${counted(this.tree.root.count, "array")}`;
  }

  async openArray(entry, chosen) {
    this.opened.abort();
    this.opened = new AbortController();
    note({ array: entry.name });
    const values = h("div", { class: "array-values" });
    replace(
      this.detail,
      h("h3", { class: "array-name mono", title: entry.name }, h("bdi", null, entry.name)),
      h("p", null, h("span", { class: "tag coloured", style: inColour(COLOURS[entry.status]) }, WORDS[entry.status])),
      h(
        "dl",
        { class: "facts" },
        fact("Before", entry.before ?? "not there", { test: "difference-before" }),
        fact("After", entry.after ?? "not there", { test: "difference-after" }),
      ),
      values,
    );
    if (chosen && matchMedia("(max-width: 900px)").matches) this.detail.scrollIntoView({ block: "start" });
    if (["values", "dtype", "unknown"].includes(entry.status)) await this.loadValues(entry, values);
    else replace(values, h("p", { class: "muted" }, "Values are compared only if both arrays have the same shape."));
  }

  async loadValues(entry, place) {
    const path = api(["runs", this.run, "diff"], { before: this.before, after: this.after, array: entry.name });
    const options = { signal: this.opened.signal, context: this.context, text: "Comparing its values" };
    await load(place, path, options, ({ arrays }) => replace(place, valueFacts({ ...entry, ...known(arrays[0]) })));
  }
}

function known(entry) {
  return Object.fromEntries(Object.entries(entry ?? {}).filter(([, value]) => value !== null));
}

function valueFacts({ numel, changed, max_abs, rms, nonfinite, chunks, chunks_changed }) {
  const share = numel > 0 && changed !== undefined ? ` (${percent(changed / numel)})` : "";
  return h(
    "dl",
    { class: "facts", test: "difference-values" },
    fact("Changed elements", [`${count(changed)} of ${count(numel)}${share}`, changed > 0 ? meter(changed / numel) : null], { test: "difference-changed" }),
    fact("Largest difference", number(max_abs, 6), { test: "difference-max", hint: "Between finite elements" }),
    fact("RMS of the difference", number(rms, 6), { test: "difference-rms", hint: "Over all elements" }),
    fact("Not finite", marked(nonfinite, count(nonfinite)), { test: "difference-nonfinite", hint: "Elements that differ, one of them NaN or infinite" }),
    chunks > 0 ? fact("Chunks changed", `${count(chunks_changed)} of ${count(chunks)}`, { test: "difference-chunks" }) : null,
  );
}

function meter(share) {
  const bar = h("span", { style: { width: `${Math.max(0.5, 100 * share)}%` } });
  return h("div", { class: "meter", role: "img", "aria-label": `${percent(share)} of the elements changed` }, bar);
}

function swatch(status) {
  return h("span", { class: "swatch", style: inColour(COLOURS[status]) });
}

function differenceCells(item, { tally }) {
  if (item === null) {
    const statuses = STATUSES.filter((status) => tally[status]);
    const title = statuses.map((status) => `${count(tally[status])} ${WORDS[status]}`).join(", ");
    const parts = statuses.map((status) => h("span", { class: "tally" }, swatch(status), count(tally[status])));
    return [h("span", { class: "cell both", title, "aria-label": title }, parts)];
  }
  const chunks = item.chunks > 0 ? `${count(item.chunks_changed)} of ${count(item.chunks)}` : "";
  const status = h("span", { class: "cell" }, swatch(item.status), WORDS[item.status]);
  return [status, h("span", { class: "cell num wide" }, chunks)];
}
