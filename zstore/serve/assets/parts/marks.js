// The boxes that change marks: of a checkpoint the tags that move to it, whether it is held, and its note; of a run its tags,
// group and note.
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
  const change = (body) => act(() => post(api(["runs", run, "tags"]), body), context, "Tags need the service's token.");
  const save = async () => {
    const after = tags.value.split(/[\s,]+/).filter((tag) => tag !== "");
    const moved = after.filter((tag) => !before.includes(tag)).map((tag) => ({ checkpoint, tag }));
    const removed = before.filter((tag) => !after.includes(tag)).map((tag) => ({ tag }));
    for (const body of [{ checkpoint, held: held.checked, note: note.value }, ...moved, ...removed]) {
      if ((await change(body)) === null) return false;
    }
    return true;
  };
  openForm("Tags and hold", checkpoint, save, done, [
    h("label", null, "Tags, separated by spaces. A tag moves here from the checkpoint that has it. ", tags),
    h("label", null, held, " Hold: retention and prune leave it"),
    h("label", null, "Note ", note),
  ]);
}

/** Open the box for the marks of a run, as `GET /api/runs/{run}` has them; `done` is called once they are changed. */
export function changeRunMarks({ name, tags, group, note }, context, done) {
  const fields = {
    tags: h("input", { value: tags.join(" "), spellcheck: "false", test: "run-tags" }),
    group: h("input", { value: group, maxlength: "200", test: "run-group" }),
    note: h("input", { value: note, maxlength: "1000", test: "run-note" }),
  };
  const save = async () => {
    const body = { tags: fields.tags.value.split(/[\s,]+/).filter(Boolean), group: fields.group.value.trim(), note: fields.note.value.trim() };
    return (await act(() => post(api(["runs", name, "marks"]), body), context, "Tags need the service's token.")) !== null;
  };
  openForm("Tags, group and note", name, save, done, [
    h("label", null, "Tags ", fields.tags),
    h("label", null, "Group in the list of runs ", fields.group),
    h("label", null, "Note ", fields.note),
  ]);
}

/** Open a box with `fields`; `save` resolves to whether it has saved them. */
function openForm(label, name, save, done, fields) {
  const trouble = h("p", { class: "bad", role: "alert", test: "marks-problem" });
  const submit = async (event) => {
    event.preventDefault();
    try {
      if (!(await save())) return;
      dialog.close();
    } catch (error) {
      replace(trouble, error.message);
    }
    done();
  };
  const dialog = openDialog(
    label,
    h("h2", null, h("bdi", null, name)),
    h(
      "form",
      { onsubmit: submit },
      fields.map((field) => h("p", null, field)),
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
