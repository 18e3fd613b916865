// A job of the service: what it does, how far it is, and what it found.

import { api, get } from "../data.js";
import { h, replace } from "../dom.js";
import { bytes, counted, duration, percent, rate, when } from "../format.js";
import { link, runUrl } from "../router.js";
import { repeat } from "./poll.js";

const KINDS = { verify: "Verification", prune: "Prune", upload: "Upload" };
const STATES = { running: ["running", "tag dot"], done: ["done", "tag good"], failed: ["failed", "tag bad"] };
const FAULTS = ["faults found", "tag bad"];
const LINES_AT_FIRST = 20;

/**
 * @param {object} job
 * @param {number} now Seconds since 1970.
 * @returns {{share: number | null, text: string}} How far it is.
 */
export function progressOf(job, now) {
  const elapsed = Math.max(0, (job.ended_at ?? now) - job.started_at);
  const share = job.total_bytes > 0 ? Math.min(1, job.done_bytes / job.total_bytes) : null;
  const perSecond = elapsed > 0 ? job.done_bytes / elapsed : 0;
  if (job.state !== "running") return { share, text: job.ended_at === null ? "" : `${bytes(job.done_bytes)} in ${duration(elapsed)}` };
  const parts = [share === null ? bytes(job.done_bytes) : `${bytes(job.done_bytes)} of ${bytes(job.total_bytes)}`];
  if (share !== null) parts.push(percent(share));
  if (elapsed >= 1 && perSecond > 0) {
    parts.push(rate(perSecond));
    if (share !== null) parts.push(`${duration((job.total_bytes - job.done_bytes) / perSecond)} left`);
  }
  return { share, text: parts.join(" · ") };
}

/** Whether a verification was carried out, and found something. */
export function hasFaults({ kind, state, lines }) {
  return kind === "verify" && state === "done" && lines.length > 0 && !lines[0].startsWith("no faults");
}

/** A job as it is shown; `update` changes what is there, so that text stays selected. */
export class JobView {
  /** @param {(job: object) => void} [again] Asks for the verification again; null for no button. */
  constructor(job, again = null) {
    this.heading = h("h3", { test: "job-heading" });
    this.state = h("span", { test: "job-state" });
    this.bar = h("progress", { max: "1", "aria-label": "Progress", test: "job-progress" });
    this.text = h("p", { class: "muted", test: "job-text" });
    this.problem = h("p", { class: "bad name", role: "alert", test: "job-problem" });
    this.lines = h("pre", { class: "command job-lines", tabindex: "0", test: "job-lines" });
    this.more = h("button", { type: "button", class: "small", test: "job-more", onclick: () => this.showAll() });
    this.all = false;
    this.again = again && job.kind === "verify" ? h("button", { type: "button", class: "small", test: "job-again", onclick: () => again(this.job) }, "Verify again") : null;
    this.element = h(
      "article",
      { class: "panel job", test: "job", "data-job": job.id },
      h(
        "div",
        { class: "row" },
        this.heading,
        this.state,
        h("time", { class: "muted", datetime: new Date(job.started_at * 1000).toISOString() }, when(job.started_at)),
      ),
      this.bar,
      this.text,
      this.problem,
      this.lines,
      this.more,
      this.again,
    );
    this.update(job);
  }

  update(job) {
    if (job.state !== this.job?.state) replace(this.heading, heading(job));
    this.job = job;
    const [text, name] = hasFaults(job) ? FAULTS : STATES[job.state];
    const { share, text: progress } = progressOf(job, Date.now() / 1000);
    this.state.className = name;
    put(this.state, text);
    if (share === null) this.bar.removeAttribute("value");
    else this.bar.value = share;
    this.bar.hidden = job.state !== "running";
    if (this.again) this.again.hidden = job.state === "running";
    put(this.text, progress);
    put(this.problem, job.problem ?? "");
    this.problem.hidden = job.problem === null;
    this.showLines();
  }

  showAll() {
    this.all = true;
    this.showLines();
  }

  showLines() {
    const { lines } = this.job;
    const shown = this.all ? lines : lines.slice(0, LINES_AT_FIRST);
    put(this.lines, shown.join("\n"));
    this.lines.hidden = lines.length === 0;
    this.more.hidden = shown.length === lines.length;
    put(this.more, `Show ${counted(lines.length - shown.length, "more line")}`);
  }
}

/** What it does, with links; the run and checkpoint of an upload may not exist before it is committed. */
function heading({ kind, run, checkpoint, state }) {
  const isThere = kind !== "upload" || state === "done";
  const named = (text, view) => h("bdi", null, isThere ? h("a", { href: runUrl(run, view) }, text) : text);
  const of = named(run, "checkpoints");
  return [KINDS[kind], " of ", checkpoint === null ? of : [named(checkpoint, `checkpoint/${checkpoint}`), " in ", of]];
}

/** Change an element's text only where it is another, so that a selection in it stays. */
function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Show a job in `place` until it ended; then call `ended` with it.
 * @returns {() => void} Stops looking; the job goes on.
 */
export function showJob(place, id, ended = () => {}) {
  let view = null;
  let hint = null;
  const look = async () => {
    const job = await get(api(["jobs", id]));
    if (view === null) {
      view = new JobView(job);
      const jobs = h("a", { href: link("/jobs") }, "Jobs");
      hint = h("p", { class: "hint" }, "It continues if you leave this page: see ", jobs, ".");
      replace(place, view.element, hint);
    } else view.update(job);
    if (job.state === "running") return 1;
    hint.remove();
    ended(job);
    return null;
  };
  const failed = (error) => {
    view = null;
    replace(place, h("p", { class: "bad", role: "alert" }, error.message));
  };
  return repeat(look, failed);
}
