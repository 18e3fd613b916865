// A checkpoint: what it is, its arrays as a tree, and how other tools read it.
//
// For tests: checkpoint-tag, checkpoint-facts, checkpoint-state, arrays-filter, arrays-found, arrays-tree with tree-group and
// tree-array (data-name: the array), array-detail with array-name, command-<tool>, weights-download, weights-dtype.

import { api, get } from "../data.js";
import { h, replace } from "../dom.js";
import { bytes, count, counted, number, shape } from "../format.js";
import { note } from "../router.js";
import { arrayCommands, commandList, weightCommands, weightsUrl } from "../parts/commands.js";
import { date, fact } from "../parts/facts.js";
import { filterField, filterText } from "../parts/filter.js";
import { buildTree } from "../parts/names.js";
import { TreeView } from "../parts/tree.js";
import { valueList } from "../parts/values.js";

const HEADS = [["Name", ""], ["Type", "wide"], ["Shape", "wide"], ["Size", "num"]];
const DTYPES = { bf16: "bfloat16", fp16: "float16", fp32: "float32" };
/** Of a name, encoded: a service takes no URL that is much longer. */
const MOST_URL_LENGTH = 6000;

export async function show(container, params, context) {
  const { run, checkpoint, query } = params;
  const base = ["runs", run, "checkpoints", checkpoint];
  const listPath = api([...base, "arrays"]);
  const [detail, list] = await Promise.all([get(api(base)), get(listPath)]);
  const view = new CheckpointView({ run, query, context, detail, arrays: list.arrays });
  replace(container, view.element);
  view.start();
  return () => view.close();
}

class CheckpointView {
  constructor({ run, query, context, detail, arrays }) {
    Object.assign(this, { run, query, context, detail, arrays });
    // `latest` may mean another one a moment later: from here on it is the one that was shown.
    this.checkpoint = detail.entry.checkpoint;
    this.tree = new TreeView({
      label: `Arrays of ${detail.entry.tag}`,
      test: "arrays-tree",
      cells: arrayCells,
      onOpen: (entry) => this.openArray(entry, true),
    });
    this.array = h("div", { class: "array-detail", test: "array-detail" });
    this.found = h("span", { class: "muted", role: "status", test: "arrays-found" });
    this.element = h(
      "div",
      { class: "view", test: "checkpoint" },
      this.factsPanel(),
      this.arraysPanel(),
      this.weightsPanel(),
      this.statePanel(),
    );
  }

  /** Fill what needs its place on the page. */
  start() {
    this.tree.setRoot(buildTree(this.arrays));
    if (filterText() !== "") this.filter(filterText());
    const name = this.query.get("array");
    if (name === null) {
      replace(this.array, h("p", { class: "hint" }, "Choose an array to see how to read it."));
      return;
    }
    const entry = this.arrays.find((array) => array.name === name);
    if (entry === undefined) {
      const quoted = h("q", { class: "name" }, name.slice(0, 200));
      replace(this.array, h("p", { class: "bad" }, "This checkpoint has no array ", quoted, "."));
      return;
    }
    this.tree.select(name);
    this.openArray(entry, false);
  }

  close() {
    this.tree.close();
  }

  factsPanel() {
    const { entry, location, id, training_world_size, num_arrays, array_bytes } = this.detail;
    const metrics = Object.entries(entry.metrics).map(([name, value]) =>
      fact(h("bdi", null, name.slice(0, 80)), number(value, 6), { hint: name }),
    );
    const trained = training_world_size === entry.world_size ? "" : `, trained on ${count(training_world_size)}`;
    return h(
      "section",
      { class: "panel", "aria-label": "The checkpoint" },
      h("h2", { class: "name", test: "checkpoint-tag" }, h("bdi", null, entry.tag)),
      h(
        "dl",
        { class: "facts", test: "checkpoint-facts" },
        fact("Step", count(entry.step)),
        fact("Saved", date(entry.committed_at)),
        fact("Ranks", count(entry.world_size) + trained),
        fact("Arrays", `${count(num_arrays)}, ${bytes(array_bytes)}`, { hint: "Their values alone" }),
        fact("On disk", `${bytes(entry.size_bytes)} in ${counted(entry.num_files, "file")}`),
        fact("Shared", bytes(entry.shared_bytes), { hint: "Bytes of files that other checkpoints have too" }),
        fact("Removing it frees", bytes(entry.freed_bytes)),
        metrics,
      ),
      h(
        "dl",
        { class: "small-facts" },
        h("div", null, h("dt", null, "Folder"), h("dd", { class: "mono name" }, location)),
        h("div", null, h("dt", null, "Id"), h("dd", { class: "mono name" }, id)),
        entry.run_id === "" ? null : h("div", null, h("dt", null, "Run id"), h("dd", { class: "mono name" }, entry.run_id)),
      ),
    );
  }

  arraysPanel() {
    const input = filterField({ label: "Filter arrays by name", test: "arrays-filter" }, (text) => this.filter(text));
    input.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowDown" && event.key !== "Enter") return;
      event.preventDefault();
      this.tree.element.focus();
    });
    return h(
      "section",
      { class: "panel", "aria-label": "Arrays" },
      h("div", { class: "row toolbar" }, h("h2", null, "Arrays"), input, this.found),
      this.tree.beside(this.array, HEADS, ["Click or tap an array to see how to read it. ", h("span", { class: "keys" }, "Arrows move and open, typing finds a name, Enter shows an array.")]),
    );
  }

  filter(text) {
    const found = this.tree.filter(text);
    this.found.textContent = found === null ? "" : `${count(found)} of ${counted(this.arrays.length, "array")}`;
  }

  /** Show an array; `chosen`: by a person, so that a phone, where it stands below, scrolls to it. */
  openArray(entry, chosen) {
    note({ array: encodeURIComponent(entry.name).length > MOST_URL_LENGTH ? null : entry.name });
    replace(this.array, arrayHead(entry), this.arrayTools(entry));
    if (chosen && matchMedia("(max-width: 900px)").matches) this.array.scrollIntoView({ block: "start" });
  }

  arrayTools(entry) {
    const url = new URL(entry.url, document.baseURI).href;
    return h(
      "details",
      { test: "array-tools", open: true },
      h("summary", null, "Read it with other tools"),
      h("p", null, "Zarr array: ", h("a", { href: `${entry.url}/zarr.json`, class: "mono name", test: "zarr-url" }, url)),
      commandList(arrayCommands(url, this.context.service.needs_token)),
    );
  }

  weightsPanel() {
    const { entry } = this.detail;
    const commands = h("div");
    const types = new Set(this.arrays.filter(({ name }) => name.startsWith("model/")).map(({ dtype }) => dtype));
    const stored = Object.keys(DTYPES).find((name) => types.size === 1 && types.has(DTYPES[name])) ?? "fp32";
    const chosen = Object.hasOwn(DTYPES, this.query.get("dtype")) ? this.query.get("dtype") : stored;
    const file = "model.safetensors";
    const link = h("a", { class: "button", download: file, test: "weights-download" }, `Download ${file}`);
    const fill = (dtype) => {
      link.setAttribute("href", weightsUrl("", this.run, entry.checkpoint, dtype));
      const { needs_token: authorized } = this.context.service;
      replace(commands, commandList(weightCommands(new URL(".", document.baseURI).href, this.run, entry, dtype, authorized)));
    };
    const select = h(
      "select",
      { "aria-label": "Data type of the weights", test: "weights-dtype" },
      Object.keys(DTYPES).map((dtype) => h("option", { value: dtype, selected: dtype === chosen }, dtype === stored || dtype === "fp32" ? dtype : `${dtype} (rounded)`)),
    );
    select.addEventListener("change", () => {
      note({ dtype: select.value === stored ? null : select.value });
      fill(select.value);
    });
    fill(chosen);
    return h(
      "section",
      { class: "panel", test: "weights" },
      h("h2", null, "Weights as one file"),
      h("p", { class: "muted" }, "Consolidated during the download, in the data type you choose. Downloads can be resumed."),
      h("div", { class: "row" }, select, link),
      h("details", null, h("summary", null, "Read it with other tools"), commands),
    );
  }

  statePanel() {
    const { state } = this.detail;
    return h(
      "section",
      { class: "panel", test: "checkpoint-state" },
      h("h2", null, "State"),
      Object.keys(state).length === 0 ? h("p", { class: "muted" }, "The checkpoint has no state.") : valueList(state),
    );
  }
}

function arrayCells(item, { count: arrays, nbytes }) {
  const size = h("span", { class: "cell num" }, bytes(item === null ? nbytes : item.nbytes));
  if (item === null) return [h("span", { class: "cell both wide" }, counted(arrays, "array")), size];
  const text = shape(item.shape);
  return [h("span", { class: "cell wide" }, item.dtype), h("span", { class: "cell wide", title: text }, text), size];
}

function arrayHead(entry) {
  return [
    h("h3", { class: "array-name mono", title: entry.name, test: "array-name" }, h("bdi", null, entry.name)),
    h(
      "dl",
      { class: "facts" },
      fact("Type", entry.dtype),
      fact("Shape", shape(entry.shape)),
      fact("Size", bytes(entry.nbytes)),
      fact("Shards", count(entry.num_shards)),
    ),
  ];
}
