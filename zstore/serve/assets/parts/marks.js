// The box that changes the marks of a checkpoint: the tags that move to it, whether it is held, and its note.
//
// For tests: marks-tags, marks-held, marks-note, marks-save, marks-problem.

import { api, post } from "../data.js";
import { h, replace } from "../dom.js";
import { openDialog } from "../session.js";
import { act } from "./act.js";

/** Open the box; `done` is called once the marks are changed. */
export function changeMarks(run, entry, context, done) {
  const { tag: checkpoint, moving_tags: before } = entry;
  const tags = h("input", { value: before.join(" "), spellcheck: "false", test: "marks-tags" });
  const held = h("input", { type: "checkbox", checked: entry.held, test: "marks-held" });
  const note = h("input", { value: entry.note, maxlength: "1000", test: "marks-note" });
  const trouble = h("p", { class: "bad", role: "alert", test: "marks-problem" });
  const change = (body) => act(() => post(api(["runs", run, "tags"]), body), context, "Tags need the service's token.");
  const save = async (event) => {
    event.preventDefault();
    const after = tags.value.split(/[\s,]+/).filter((tag) => tag !== "");
    const moved = after.filter((tag) => !before.includes(tag)).map((tag) => ({ checkpoint, tag }));
    const removed = before.filter((tag) => !after.includes(tag)).map((tag) => ({ tag }));
    try {
      for (const body of [{ checkpoint, held: held.checked, note: note.value }, ...moved, ...removed]) {
        if ((await change(body)) === null) return;
      }
      dialog.close();
    } catch (error) {
      replace(trouble, error.message);
    }
    done();
  };
  const dialog = openDialog(
    "Tags and hold",
    h("h2", null, h("bdi", null, checkpoint)),
    h(
      "form",
      { onsubmit: save },
      h("p", null, h("label", null, "Tags that point here, such as best; another checkpoint loses them ", tags)),
      h("p", null, h("label", null, held, " Hold: retention and prune leave it")),
      h("p", null, h("label", null, "Note ", note)),
      trouble,
      h(
        "div",
        { class: "row box-buttons" },
        h("button", { type: "submit", class: "primary", test: "marks-save" }, "Save"),
        h("button", { type: "button", onclick: () => dialog.close(), test: "cancel" }, "Cancel"),
      ),
    ),
  );
}
