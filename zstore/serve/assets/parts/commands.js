// What to type to read an array or the weights with other tools.

import { encoded } from "../data.js";
import { h } from "../dom.js";

/**
 * @param {string} url Of an array in the service.
 * @param {boolean} withToken Whether the service asks for its token.
 * @returns {{tool: string, text: string}[]}
 */
export function arrayCommands(url, withToken) {
  const { origin, pathname } = new URL(url);
  // tensorstore encodes a path itself.
  const path = `${pathname.split("/").map(decodeURIComponent).join("/")}/`;
  const headers = withToken ? ', storage_options={"headers": {"Authorization": "Bearer TOKEN"}}' : "";
  const header = withToken ? ',\n        "headers": ["Authorization: Bearer TOKEN"]' : "";
  return [
    {
      tool: "zarr-python",
      text: `import zarr\n\narray = zarr.open_array(${quoted(url)}, mode="r"${headers})\nprint(array[:])`,
    },
    {
      tool: "tensorstore",
      text:
        "import tensorstore as ts\n\narray = ts.open({\n" +
        '    "driver": "zarr3",\n    "kvstore": {\n        "driver": "http",\n' +
        `        "base_url": ${quoted(origin)},\n        "path": ${quoted(path)}${header},\n    },\n` +
        "}).result()\nprint(array.read().result())",
    },
    { tool: "curl", text: `curl -f${tokenOption(withToken)} ${shellQuoted(`${url}/zarr.json`)}` },
  ];
}

/**
 * @param {string} service Its URL, with a `/` at its end.
 * @param {string} run
 * @param {{checkpoint: string, tag: string}} entry
 * @param {string} dtype
 * @param {boolean} withToken
 * @returns {{tool: string, text: string}[]}
 */
export function weightCommands(service, run, { checkpoint, tag }, dtype, withToken) {
  const base = `${service}${encodeURIComponent(run)}`;
  const folder = checkpoint.includes("/") ? `${base}/${encoded(checkpoint.split("/").slice(0, -1).join("/"))}` : base;
  const before = withToken ? "export ZSTORE_TOKEN=TOKEN\n" : "";
  const named = `--tag ${shellQuoted(tag)}`;
  const url = shellQuoted(weightsUrl(service, run, checkpoint, dtype));
  const options = withToken ? ', storage_options={"token": "TOKEN"}' : "";
  return [
    { tool: "curl", text: `curl -fC - -o model.safetensors${tokenOption(withToken)} ${url}` },
    {
      tool: "Python",
      text:
        `import zstore\n\nwith zstore.open_checkpoint(${quoted(folder)}, ${quoted(tag)}${options}) as checkpoint:\n` +
        "    print(checkpoint.step, len(checkpoint))",
    },
    {
      tool: "zstore",
      text:
        `${before}zstore verify ${shellQuoted(folder)} ${named}\n` +
        `zstore consolidate ${shellQuoted(folder)} weights ${named} --dtype ${dtype}`,
    },
  ];
}

/** URL of a checkpoint's weights as one file. */
export function weightsUrl(service, run, checkpoint, dtype) {
  return `${service}weights/${encodeURIComponent(run)}/${encoded(checkpoint)}/model.safetensors?dtype=${dtype}`;
}

/** Commands, each as text that can be selected, with a button that copies it. */
export function commandList(commands) {
  return commands.map(({ tool, text }) => {
    const copied = h("span", { class: "hint", role: "status" });
    const copy = async () => {
      try {
        await navigator.clipboard.writeText(text);
        copied.textContent = "Copied";
      } catch {
        copied.textContent = "The browser does not allow it: select the text";
      }
    };
    const label = `Copy the command for ${tool}`;
    const button = h("button", { type: "button", class: "small", onclick: copy, "aria-label": label }, "Copy");
    return h(
      "div",
      { class: "command-entry", test: `command-${tool}` },
      h("div", { class: "row" }, h("h3", null, tool), button, copied),
      h("pre", { class: "command", tabindex: "0" }, text),
    );
  });
}

function tokenOption(withToken) {
  return withToken ? ' -H "Authorization: Bearer $ZSTORE_TOKEN"' : "";
}

/** A string as Python writes it. */
function quoted(text) {
  return JSON.stringify(text);
}

/** A word for the shell. */
function shellQuoted(text) {
  return /^[A-Za-z0-9_./:=@%+,-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}
