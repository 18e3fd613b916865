// The list of runs.

import { get } from "../data.js";
import { h, replace } from "../dom.js";
import { runUrl } from "../router.js";

export async function show(container) {
  const { runs } = await get("/api/runs");
  replace(container, h("ul", null, runs.map((run) => h("li", null, h("a", { href: runUrl(run.name) }, run.name)))));
}
