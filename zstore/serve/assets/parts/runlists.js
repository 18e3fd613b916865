// What a run did besides steps: saves, warnings, and the processes that took part.

import { h } from "../dom.js";
import { bytes, count, counted, duration, when, zone } from "../format.js";
import { runUrl } from "../router.js";
import { stateTag } from "./facts.js";
import { cell, heading, table } from "./tables.js";

/** The saves of a run, the newest first. */
export function savesPanel(run, saves) {
  const hints = { Stall: "How long training waited for it", Took: "From its start to its commit", Linked: "Bytes that are the same in an earlier checkpoint: linked, not written", Written: "New bytes" };
  const head = ["Tag", "Step", "State", `When (${zone()})`, "Stall", "Took", "Linked", "Written"];
  const rows = saves.toReversed().map((save) =>
    h(
      "tr",
      null,
      h("th", { scope: "row", class: "name" }, save.tag),
      cell(head[1], count(save.step), "num"),
      cell(head[2], [stateTag(save.state), save.problem ? h("span", { class: "bad" }, ` ${save.problem}`) : null]),
      cell(head[3], when(save.at), "num"),
      cell(head[4], duration(save.stall_s), "num"),
      cell(head[5], duration(save.elapsed_s), "num"),
      cell(head[6], bytes(save.linked_bytes), "num"),
      cell(head[7], bytes(save.written_bytes), "num"),
    ),
  );
  return h(
    "section",
    { class: "panel flush", test: "saves" },
    h("div", { class: "row" }, h("h2", null, "Saves"), h("span", { class: "hint" }, saves.length === 0 ? "none yet" : counted(saves.length, "save")), h("span", { class: "spring" }), h("a", { href: runUrl(run, "checkpoints") }, "All checkpoints")),
    rows.length === 0
      ? null
      : h(
          "div",
          { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Saves" },
          table({ class: "cards" }, head.map((text, index) => heading(text, index === 0 || index === 2 ? null : "num", hints[text])), rows),
        ),
  );
}

/** The warnings of a run and its numbers that are not finite, the newest first; nothing where there are none. */
export function warningsPanel({ warnings: told, not_finite: wrong }) {
  const numbers = wrong.map(({ at, step, values }) => ({ at, text: `Step ${count(step)}: ${Object.entries(values).map(([name, value]) => `${name} is ${value}`).join(", ")}` }));
  const warnings = [...told, ...numbers].sort((a, b) => a.at - b.at);
  if (warnings.length === 0) return null;
  return h(
    "section",
    { class: "panel", test: "warnings" },
    h("h2", null, "Warnings"),
    h(
      "ul",
      { class: "plain scroll tall" },
      warnings.toReversed().map((warned) => h("li", null, h("span", { class: "muted" }, when(warned.at)), h("span", { class: "name" }, warned.text))),
    ),
  );
}

/** The processes that trained, the newest first, with their versions and settings. */
export function sessionsPanel({ sessions, summary }) {
  if (sessions.length === 0) return null;
  return h(
    "section",
    { class: "panel", test: "sessions" },
    h("h2", null, "Processes"),
    h(
      "ul",
      { class: "plain scroll tall" },
      sessions.toReversed().map((session, index) => process(session, index === 0 && summary.state === "training")),
    ),
  );
}

function process(session, runs) {
  const end = session.ended_at !== null ? `ended ${when(session.ended_at)}` : runs ? "runs" : "no end recorded: it was killed, or its machine went down";
  const versions = Object.entries(session.versions).map(([name, version]) => `${name} ${version}`);
  return h(
    "li",
    { class: "process" },
    h("div", null, h("span", { class: "muted" }, when(session.started_at)), ` ${session.loop}, from step ${count(session.first_step)}, ${counted(session.world_size, "rank")}, on ${session.host}, process ${session.pid}; ${end}`),
    h("details", null, h("summary", null, "Versions and settings"), h("p", { class: "hint name" }, versions.join(", ")), h("pre", { class: "command" }, JSON.stringify(session.config, null, 2))),
  );
}
