// Where every byte of a run rests.

import { api, get } from "../data.js";
import { h, replace } from "../dom.js";

export async function show(container, params) {
  const placement = await get(api(["runs", params.run, "placement"]));
  replace(container, h("p", null, `${placement.arrays.length} arrays`));
}
