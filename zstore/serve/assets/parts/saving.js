// How far a save is that is under way: by the bytes in its folder, beside those of the newest checkpoint.

import { api, get } from "../data.js";
import { h, replace } from "../dom.js";
import { bytes } from "../format.js";
import { repeat } from "./poll.js";

const EVERY_S = 1;

/** The line of a save under way; hidden while there is none. */
export class Saving {
  constructor(run) {
    this.path = api(["runs", run, "checkpoints"]);
    this.text = h("span");
    this.bar = h("progress", { max: "1", "aria-label": "Bytes saved" });
    this.element = h("div", { class: "saving", hidden: true, role: "group", "aria-label": "Save under way", test: "saving" }, this.text, this.bar);
    this.tag = null;
    this.end = () => {};
  }

  /** Show the save that the run has begun and not ended, if there is one. */
  update({ summary, saves }) {
    const save = summary.state === "training" ? saves.findLast((one) => one.state === "begun") : undefined;
    const tag = save?.tag ?? null;
    if (tag === this.tag) return;
    this.tag = tag;
    this.end();
    this.element.hidden = tag === null;
    if (tag === null) return;
    this.show(save.done_bytes, null);
    this.end = repeat(() => this.look(tag), () => {});
  }

  async look(tag) {
    const { unfinished, checkpoints } = await get(this.path);
    if (this.tag !== tag) return null;
    const part = unfinished.find((one) => one.state === "under way" && one.name.includes(tag));
    this.show(part?.nbytes ?? null, checkpoints.at(-1)?.size_bytes ?? null);
    return EVERY_S;
  }

  show(done, whole) {
    const beside = whole === null ? null : h("span", { class: "muted" }, `; the newest checkpoint is ${bytes(whole)}`);
    replace(this.text, `Saving ${this.tag}`, done === null ? null : `: ${bytes(done)} so far`, beside);
    if (done === null || !whole) this.bar.removeAttribute("value");
    else this.bar.value = Math.min(1, done / whole);
  }

  close() {
    this.end();
  }
}
