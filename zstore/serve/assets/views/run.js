// A run as it trains: where it is, its curves, its saves, its warnings and the processes that took part.

import { api, get, isReport, listen } from "../data.js";
import { atFrame, h, replace } from "../dom.js";
import { counted } from "../format.js";
import { note } from "../router.js";
import { actionButton, whyNot } from "../parts/act.js";
import { RunActions } from "../parts/actions.js";
import { ChartGrid } from "../parts/chartgrid.js";
import { curvesOf } from "../parts/curves.js";
import { changeRunMarks } from "../parts/marks.js";
import { savesPanel, sessionsPanel, warningsPanel } from "../parts/runlists.js";
import { RunStatus } from "../parts/runstatus.js";
import { LiveSteps, StepColumns } from "../parts/steps.js";
import { empty, problem } from "../states.js";

const POINTS = 1000;
const MOST_LIVE = POINTS / 4;
const AGAIN_MS = 1000;
const PAGE = 20;
const SAMPLE = "The journal is long, and is being read: these are some of its steps.";

export async function show(container, params, context) {
  const view = new RunView(params, context);
  await view.load();
  replace(container, view.element);
  view.follow();
  return () => view.close();
}

class RunView {
  constructor({ run, query }, context) {
    this.run = run;
    this.path = ["runs", run];
    this.actions = isReport ? null : new RunActions(run, context);
    const edit = () => changeRunMarks(this.detail.summary, context, () => void this.catchUp());
    this.edit = isReport ? null : actionButton("Tags and note", "edit-run-marks", edit, whyNot(context.service), "small quiet");
    this.status = new RunStatus(run, this.actions?.element ?? null, this.edit);
    this.curves = new ChartGrid("Curves", (domain) => this.zoom(domain));
    this.lists = h("div", { class: "lists" });
    this.waiting = h("div");
    this.element = h("div", { class: "view" }, this.status.element, this.waiting, this.curves.element, this.lists);
    this.draw = atFrame(() => this.drawNow());
    this.ended = () => {};
    this.closed = false;
    this.shownLists = "";
    this.kept = { sessions: new Map(), warnings: new Map() };
    this.pages = { sessions: 1, warnings: 1 };
    this.shownWaiting = "";
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

  /** Take live points and what else the run does. */
  follow() {
    if (isReport) return;
    this.ended = listen(api([...this.path, "events"]), {
      open: () => this.status.setLive(true),
      lost: () => this.status.setLive(false),
      again: () => void this.catchUp(),
      steps: (steps) => this.take(steps),
      run: (detail) => {
        this.detail = detail;
        this.draw();
      },
    });
  }

  take(steps) {
    this.steps.append(steps.columns);
    this.detailed?.append(steps.columns);
    if (this.steps.live.length > MOST_LIVE) void this.thin();
    this.draw();
  }

  /** Ask for all that came while there was no connection. */
  async catchUp() {
    await this.thin();
    this.detail = await get(api(this.path)).catch(() => this.detail);
    this.draw();
  }

  /** Ask for all steps anew: live ones have become many, or some were missed. */
  async thin() {
    if (this.thinning) return;
    this.thinning = true;
    try {
      const steps = await get(api([...this.path, "steps"], { points: POINTS }));
      const later = this.steps.live;
      if (this.isSample && this.domain !== null) void this.loadDetail().then(() => this.draw(), () => {});
      this.begin(steps);
      this.steps.append(later.after(this.steps.base.last));
      this.draw();
    } catch (error) {
      if (error.status === undefined) throw error;
    } finally {
      this.thinning = false;
    }
  }

  /** Begin with these steps; if they are a sample, ask again soon. */
  begin({ columns, is_whole: isWhole }) {
    this.steps = new LiveSteps(columns);
    this.isSample = !isWhole;
    if (this.isSample) setTimeout(() => this.closed || void this.thin(), AGAIN_MS);
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
    if (isReport || this.steps.all().isWhole(...domain)) return;
    const [after, until] = [Math.floor(domain[0]) - 1, Math.ceil(domain[1])];
    const { columns } = await get(api([...this.path, "steps"], { after, until, points: POINTS }));
    if (this.domain === domain) this.detailed = new StepColumns(columns);
  }

  /** Return the run with the sessions and warnings of all pages that came. */
  whole() {
    for (const one of this.detail.sessions) this.kept.sessions.set(`${one.run_id} ${one.started_at} ${one.pid}`, one);
    for (const one of this.detail.warnings) this.kept.warnings.set(`${one.at} ${one.text}`, one);
    const sessions = [...this.kept.sessions.values()].sort((a, b) => a.started_at - b.started_at);
    return { ...this.detail, sessions, warnings: [...this.kept.warnings.values()].sort((a, b) => a.at - b.at) };
  }

  /** Return the button for the page before those of a list that came, `num` being on all; null if that was the last one. */
  older(list, num) {
    const skip = this.pages[list] * PAGE;
    const more = async () => {
      const page = await get(api(this.path, { limit: PAGE, skip }));
      this.pages[list] += 1;
      this.detail = { ...this.detail, [list]: [...page[list], ...this.detail[list]] };
      this.draw();
    };
    const fail = (error) => replace(this.waiting, problem(error));
    return isReport || skip >= num ? null : h("button", { type: "button", class: "small", test: `older-${list}`, onclick: () => void more().catch(fail) }, "Show older");
  }

  drawNow() {
    if (this.closed) return;
    const all = this.steps.all();
    const whole = this.whole();
    this.status.update(this.detail, this.steps.newest);
    this.showActions();
    this.curves.element.hidden = all.length === 0;
    this.curves.show(curvesOf(this.detailed ?? all, marks(whole), this.placement));
    const waiting = all.length === 0 ? "empty" : this.isSample ? "sample" : "";
    if (this.shownWaiting !== waiting) {
      this.shownWaiting = waiting;
      replace(this.waiting, { empty: () => this.nothing(), sample: () => h("p", { class: "hint", test: "sample" }, SAMPLE) }[waiting]?.());
    }
    const text = JSON.stringify([whole.saves, whole.warnings, whole.sessions, whole.not_finite, this.pages]);
    if (text === this.shownLists) return;
    this.shownLists = text;
    replace(this.lists, savesPanel(this.run, whole.saves), warningsPanel(whole, this.older("warnings", whole.num_warnings)), sessionsPanel(whole, this.older("sessions", whole.num_sessions)));
  }

  /** Show the buttons anew where the run came to another state, so that one that is about to be pressed stays. */
  showActions() {
    const { state } = this.detail.summary;
    const saves = JSON.stringify([state, this.detail.saves]);
    if (this.actions === null || state === "unknown" || saves === this.shownActions) return;
    this.shownActions = saves;
    this.actions.update(this.detail);
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
    this.actions?.close();
    this.curves.close();
    this.status.close();
  }
}

/** Return where processes resumed and checkpoints were saved, as marks for charts. */
function marks({ sessions, num_sessions: num, saves, not_finite: wrong }) {
  const resumed = sessions.slice(sessions.length < num ? 0 : 1).map((session) => ({ x: session.first_step, kind: "resume", label: `resumed by ${session.loop}` }));
  const saved = saves
    .filter((save) => save.state === "committed" || save.state === "uploaded")
    .map((save) => ({ x: save.step, kind: "save", label: `saved ${save.tag}` }));
  const words = ({ values }) => Object.entries(values).map(([name, value]) => `${name} ${value}`).join(", ");
  return [...resumed, ...saved, ...wrong.map((one) => ({ x: one.step, kind: "wrong", label: words(one) }))];
}
