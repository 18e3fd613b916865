// What the service does behind requests: verifications, prunes, uploads.
//
// For tests: jobs-list with job (data-job: its id) and job-state, job-progress, job-lines, job-problem; jobs-filter.

import { get } from "../data.js";
import { h, replace, titled } from "../dom.js";
import { note } from "../router.js";
import { empty } from "../states.js";
import { JobView } from "../parts/job.js";
import { repeat } from "../parts/poll.js";

const STATES = [
  ["", "All jobs"],
  ["running", "Running"],
  ["failed", "Failed"],
  ["done", "Done"],
];

export async function show(container, params, context) {
  const view = new JobsView(params, context);
  view.take((await get("/api/jobs")).jobs);
  replace(container, view.element);
  const stop = repeat(() => view.refresh(), (error) => view.fail(error), 1);
  return () => stop();
}

class JobsView {
  constructor({ query }, context) {
    this.context = context;
    this.views = new Map();
    this.state = STATES.some(([state]) => state === query.get("state")) ? query.get("state") : "";
    this.select = h(
      "select",
      { "aria-label": "Which jobs", test: "jobs-filter" },
      STATES.map(([state, text]) => h("option", { value: state, selected: state === this.state }, text)),
    );
    this.select.addEventListener("change", () => {
      this.state = this.select.value;
      note({ state: this.state });
      this.draw();
    });
    this.list = h("div", { class: "view", test: "jobs-list" });
    this.trouble = h("p", { class: "bad", role: "alert", hidden: true });
    this.element = h("div", { class: "view" }, titled(h("h1", null, "Jobs"), this.select), this.trouble, this.list);
  }

  take(jobs) {
    this.jobs = jobs;
    this.draw();
  }

  async refresh() {
    const before = new Map(this.jobs.map((job) => [job.id, job.state]));
    this.take((await get("/api/jobs")).jobs);
    this.trouble.hidden = true;
    for (const job of this.jobs) {
      if (before.get(job.id) === "running" && job.state !== "running") this.context.announce(`A job is ${job.state}.`);
    }
    return this.jobs.some((job) => job.state === "running") ? 1 : 5;
  }

  fail(error) {
    this.trouble.hidden = false;
    this.trouble.textContent = `This may be out of date: ${error.message}`;
  }

  draw() {
    const shown = this.jobs.filter((job) => this.state === "" || job.state === this.state).reverse();
    if (shown.length === 0) {
      this.views.clear();
      replace(
        this.list,
        this.jobs.length === 0
          ? empty("No jobs", "Verifications, prunes and uploads appear here while they run and after they end.")
          : h("p", { class: "muted" }, "No job matches."),
      );
      return;
    }
    for (const job of shown) this.views.get(job.id)?.update(job);
    const ids = shown.map((job) => job.id).join(" ");
    if (ids === this.ids && this.list.querySelector(".job") !== null) return;
    this.ids = ids;
    this.views = new Map(shown.map((job) => [job.id, this.views.get(job.id) ?? new JobView(job)]));
    replace(this.list, [...this.views.values()].map((view) => view.element));
  }
}
