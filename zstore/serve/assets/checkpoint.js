// A checkpoint: what it is, its arrays, its weights to download, and how other tools read it.

import { fact, facts, h, panel, replace } from "./dom.js";
import { ago, bytes, count, counted, number, shape, when } from "./format.js";
import { api, encoded, get } from "./service.js";
import { Table } from "./table.js";

const DTYPES = { bf16: "bfloat16", fp16: "float16", fp32: "float32" };
const ARRAYS = [
  { key: "name", label: "Array", cell: linkTo },
  { key: "dtype", label: "Type", wide: true },
  { key: "shape", label: "Shape", value: (array) => array.nbytes, cell: (array) => shape(array.shape), wide: true },
  { key: "num_shards", label: "Shards", text: count, numeric: true, wide: true },
  { key: "nbytes", label: "Size", text: bytes, numeric: true },
];

export async function show(container, { run, checkpoint }) {
  const base = ["runs", run, "checkpoints", checkpoint];
  const [service, detail, { arrays }] = await Promise.all([get("api"), get(api(base)), get(api([...base, "arrays"]))]);
  const table = new Table({
    columns: ARRAYS,
    label: `Arrays of ${detail.entry.tag}`,
    noun: "array",
    test: "array",
    key: (array) => array.name,
    text: (array) => array.name,
    total: (shown) => `, ${bytes(shown.reduce((sum, array) => sum + array.nbytes, 0))}`,
  });
  table.show(arrays);
  replace(
    container,
    factsPanel(detail),
    weightsPanel(run, detail.entry, arrays, service.needs_token),
    panel("Arrays", "arrays", table.element),
    statePanel(detail.state),
  );
}

function linkTo({ name, url }) {
  return h("a", { href: `${url}/zarr.json`, title: "Its Zarr metadata" }, h("bdi", null, name));
}

function factsPanel({ entry, location, id, training_world_size: trained, num_arrays, array_bytes }) {
  const trainedOn = trained === entry.world_size ? "" : `, trained on ${count(trained)}`;
  const metrics = Object.entries(entry.metrics).map(([name, value]) => fact(name.slice(0, 80), number(value, 6)));
  return h(
    "section",
    { class: "panel", "aria-label": "The checkpoint" },
    h("h2", { class: "name", test: "checkpoint-tag" }, h("bdi", null, entry.tag)),
    facts(
      fact("Step", count(entry.step)),
      fact("Saved", when(entry.committed_at), { hint: ago(entry.committed_at) }),
      fact("Ranks", count(entry.world_size) + trainedOn),
      fact("Arrays", `${count(num_arrays)}, ${bytes(array_bytes)}`),
      fact("On disk", `${bytes(entry.size_bytes)} in ${counted(entry.num_files, "file")}`),
      fact("Shared with other checkpoints", bytes(entry.shared_bytes)),
      fact("Removing it frees", bytes(entry.freed_bytes)),
      metrics,
    ),
    facts(fact("Folder", h("span", { class: "mono" }, location)), fact("Id", h("span", { class: "mono" }, id))),
  );
}

/** Return the panel of the weights as one file, in a type to choose, and of commands that read the checkpoint. */
function weightsPanel(run, entry, arrays, needsToken) {
  const types = new Set(arrays.filter(({ name }) => name.startsWith("model/")).map(({ dtype }) => dtype));
  const stored = Object.keys(DTYPES).find((name) => types.size === 1 && types.has(DTYPES[name])) ?? "fp32";
  const option = (dtype) => {
    const isExact = dtype === stored || dtype === "fp32";
    return h("option", { value: dtype, selected: dtype === stored }, isExact ? dtype : `${dtype} (rounded)`);
  };
  const options = Object.keys(DTYPES).map(option);
  const choice = h("select", { "aria-label": "Data type of the weights", test: "weights-dtype" }, options);
  const file = "model.safetensors";
  const link = h("a", { class: "button", download: file, test: "weights-download" }, `Download ${file}`);
  const commands = h("pre", { tabindex: "0", test: "commands" });
  const fill = () => {
    const path = `weights/${encodeURIComponent(run)}/${encoded(entry.checkpoint)}/model.safetensors?dtype=${choice.value}`;
    link.setAttribute("href", path);
    replace(commands, commandsOf(new URL(".", document.baseURI).href, run, entry, path, needsToken));
  };
  choice.addEventListener("change", fill);
  fill();
  const text = "Consolidated during the download, in the data type you choose. Downloads can be resumed.";
  return panel(
    "Weights as one file",
    "weights",
    h("p", { class: "muted" }, text),
    h("div", { class: "row" }, choice, link),
    h("details", null, h("summary", null, "Read it with other tools"), commands),
  );
}

/** Return what to type to read the checkpoint elsewhere; `base` is the address of the service. */
function commandsOf(base, run, { checkpoint, tag }, path, needsToken) {
  const folder = base + [run, ...checkpoint.split("/").slice(0, -1)].map(encodeURIComponent).join("/");
  const zarr = `${base}zarr/${encodeURIComponent(run)}/${encoded(checkpoint)}`;
  const [header, headers] = needsToken
    ? [' -H "Authorization: Bearer $ZSTORE_TOKEN"', ', storage_options={"headers": {"Authorization": "Bearer TOKEN"}}']
    : ["", ""];
  return [
    "# the weights, going on where a download broke off",
    `curl -fC - -o model.safetensors${header} ${shellQuoted(base + path)}`,
    "# the checkpoint, every chunk of it verified",
    ...(needsToken ? ["export ZSTORE_TOKEN=TOKEN"] : []),
    `zstore verify ${shellQuoted(folder)} --tag ${shellQuoted(tag)}`,
    "# an array, in Python",
    `zarr.open_group(${JSON.stringify(zarr)}, mode="r"${headers})["model/..."]`,
  ].join("\n");
}

function statePanel(state) {
  if (Object.keys(state).length === 0) return null;
  const text = h("pre", { tabindex: "0" }, JSON.stringify(state, null, 2));
  const summary = h("summary", null, counted(Object.keys(state).length, "value"));
  return panel("State", "state", h("details", null, summary, text));
}

/** Return a word for the shell. */
function shellQuoted(text) {
  return /^[A-Za-z0-9_./:=@%+,?-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}
