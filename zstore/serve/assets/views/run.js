// A run as it trains: where it is, its curves, its saves, its warnings and the processes that took part.

import { api, get } from "../data.js";
import { atFrame, h, replace } from "../dom.js";
import { counted } from "../format.js";
import { note } from "../router.js";
import { ChartGrid } from "../parts/chartgrid.js";
import { curvesOf } from "../parts/curves.js";
import { repeat } from "../parts/poll.js";
import { savesPanel, sessionsPanel, warningsPanel } from "../parts/runlists.js";
import { RunStatus } from "../parts/runstatus.js";
import { LiveSteps, StepColumns } from "../parts/steps.js";
import { empty } from "../states.js";

const POINTS = 1000;
const MOST_LIVE = POINTS / 4;
const EVERY_S = 2;

export async function show(container, params) {
  const view = new RunView(params);
  await view.load();
  replace(container, view.element);
  view.follow();
  return () => view.close();
}

class RunView {
  constructor({ run, query }) {
    this.run = run;
    this.path = ["runs", run];
    this.status = new RunStatus(run);
    this.curves = new ChartGrid("Curves", (domain) => this.zoom(domain));
    this.lists = h("div", { class: "lists" });
    this.waiting = h("div");
    this.element = h("div", { class: "view" }, this.status.element, this.waiting, this.curves.element, this.lists);
    this.draw = atFrame(() => this.drawNow());
    this.ended = () => {};
    this.closed = false;
    this.shownLists = "";
    this.detailed = null;
    const from = Number.parseFloat(query.get("from"));
    const to = Number.parseFloat(query.get("to"));
    this.domain = from < to ? [from, to] : null;
  }

  async load() {
    const [detail, steps, placement] = await Promise.all([
      get(api(this.path)),
      get(api([...this.path, "steps"], { points: POINTS })),
      get(api([...this.path, "placement"])).catch(() => null),
    ]);
    Object.assign(this, { detail, placement });
    this.begin(steps);
    if (this.domain !== null) {
      this.curves.setDomain(this.domain);
      await this.loadDetail();
    }
    this.drawNow();
  }

  /** Ask for new steps and what else the run does, as long as the page is looked at. */
  follow() {
    const look = async () => {
      try {
        const last = this.steps.all().last;
        const [detail, steps] = await Promise.all([get(api(this.path)), get(api([...this.path, "steps"], { after: last, points: POINTS }))]);
        if (this.closed) return null;
        this.detail = detail;
        if (steps.epoch !== this.epoch || this.steps.live.length > MOST_LIVE) await this.thin();
        else this.take(steps);
        this.status.setLive(true);
      } catch (error) {
        this.status.setLive(false);
        throw error;
      }
      return EVERY_S;
    };
    this.ended = repeat(look, () => {}, EVERY_S);
  }

  take(steps) {
    this.steps.append(steps.columns);
    this.detailed?.append(steps.columns);
    this.draw();
  }

  /** Ask for all steps anew: live ones have become many, or others took the place of some. */
  async thin() {
    this.begin(await get(api([...this.path, "steps"], { points: POINTS })));
    this.draw();
  }

  begin({ columns, epoch }) {
    this.steps = new LiveSteps(columns);
    this.epoch = epoch;
  }

  zoom(domain) {
    this.domain = domain;
    note({ from: domain && String(Math.floor(domain[0])), to: domain && String(Math.ceil(domain[1])) });
    this.detailed = null;
    this.draw();
    if (domain !== null) void this.loadDetail().then(() => this.draw(), () => {});
  }

  /** Ask for the steps that are shown in more detail, where more of them lie there than are at hand. */
  async loadDetail() {
    const domain = this.domain;
    if (this.steps.all().isWhole(...domain)) return;
    const [after, until] = [Math.floor(domain[0]) - 1, Math.ceil(domain[1])];
    const { columns } = await get(api([...this.path, "steps"], { after, until, points: POINTS }));
    if (this.domain === domain) this.detailed = new StepColumns(columns);
  }

  drawNow() {
    if (this.closed) return;
    const all = this.steps.all();
    this.status.update(this.detail, this.steps.newest);
    this.curves.element.hidden = all.length === 0;
    this.curves.show(curvesOf(this.detailed ?? all, marks(this.detail), this.placement));
    replace(this.waiting, all.length === 0 ? this.nothing() : null);
    const { saves, warnings, sessions, not_finite: wrong } = this.detail;
    const text = JSON.stringify([saves, warnings, sessions, wrong]);
    if (text === this.shownLists) return;
    this.shownLists = text;
    replace(this.lists, savesPanel(this.run, saves), warningsPanel(this.detail), sessionsPanel(this.detail));
  }

  nothing() {
    const { summary } = this.detail;
    if (summary.state === "unknown") {
      return empty(
        "No journal",
        `This folder has ${counted(summary.num_checkpoints, "checkpoint")} but no journal, so there are no curves. Training that saves here writes a journal:`,
        `zstore train --config ds_config.json --model gpt-tiny --steps 100 --save ${summary.location}`,
      );
    }
    return empty("No steps yet", "The run has started. Curves appear after its first step.");
  }

  close() {
    this.closed = true;
    this.ended();
    this.curves.close();
    this.status.close();
  }
}

/** Return where processes resumed and checkpoints were saved, as marks for charts. */
function marks({ sessions, saves, not_finite: wrong }) {
  const resumed = sessions.filter((session) => session.first_step > 0).map((session) => ({ x: session.first_step, kind: "resume", label: `resumed by ${session.loop}` }));
  const saved = saves
    .filter((save) => save.state === "committed" || save.state === "uploaded")
    .map((save) => ({ x: save.step, kind: "save", label: `saved ${save.tag}` }));
  const words = ({ values }) => Object.entries(values).map(([name, value]) => `${name} ${value}`).join(", ");
  return [...resumed, ...saved, ...wrong.map((one) => ({ x: one.step, kind: "wrong", label: words(one) }))];
}
