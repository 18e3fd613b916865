// A run as it trains.

import { api, get } from "../data.js";
import { h, replace } from "../dom.js";

export async function show(container, params) {
  const detail = await get(api(["runs", params.run]));
  replace(container, h("p", null, detail.summary.state));
}
