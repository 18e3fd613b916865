// What the service does behind requests: verifications, prunes, uploads.
//
// For tests: jobs-list with job (data-job: its id) and job-state, job-progress, job-lines, job-problem; jobs-filter; uploads,
// upload-remove.

import { api, get, isReport, post, remove } from "../data.js";
import { h, replace, titled } from "../dom.js";
import { ago, bytes } from "../format.js";
import { note } from "../router.js";
import { empty } from "../states.js";
import { act, actionButton, confirmed, whyNot } from "../parts/act.js";
import { JobView } from "../parts/job.js";
import { repeat } from "../parts/poll.js";
import { cell, heading, nameCell, table } from "../parts/tables.js";

const STATES = [
  ["", "All jobs"],
  ["running", "Running"],
  ["failed", "Failed"],
  ["done", "Done"],
];

export async function show(container, params, context) {
  const view = new JobsView(params, context);
  view.take((await get("api/jobs")).jobs);
  await view.lookAtUploads();
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
    this.list = h("div", { class: "lists", test: "jobs-list" });
    this.uploads = h("div", { class: "lists" });
    this.trouble = h("p", { class: "bad", role: "alert", hidden: true });
    this.element = h("div", { class: "view" }, titled(h("h1", null, "Jobs"), this.select), this.trouble, this.list, this.uploads);
  }

  /** Show the uploads that are not committed, to those who may remove them. */
  async lookAtUploads() {
    const { service } = this.context;
    if (isReport || !service.allows_actions || !["write", "act"].includes(service.role)) return;
    const answer = await get("api/uploads");
    const { uploads } = answer;
    const text = JSON.stringify(answer);
    if (text === this.shownUploads) return;
    this.shownUploads = text;
    const heads = ["Run", "Tag", "Received", "Last active", ""].map((one) => heading(one));
    const rows = uploads.map((one) =>
      h(
        "tr",
        null,
        nameCell(one.run),
        cell("Tag", one.tag, "name"),
        cell("Received", one.state === "begun" ? "not started" : `${bytes(one.done_bytes)} of ${bytes(one.total_bytes)}`),
        cell("Last active", ago(one.active_at)),
        cell("", actionButton("Remove", "upload-remove", () => this.removeUpload(one), null, "danger small")),
      ),
    );
    const held = answer.quota_bytes === null ? null : h("p", { class: "muted", test: "quota" }, `Your token holds ${bytes(answer.held_bytes)} of the ${bytes(answer.quota_bytes)} that it may hold.`);
    replace(this.uploads, held, uploads.length === 0 ? null : h("section", { class: "panel", test: "uploads" }, h("h2", null, "Uploads that are not committed"), h("div", { class: "scroll" }, table({ class: "cards" }, heads, rows))));
  }

  async removeUpload({ id, run, tag }) {
    const title = `Remove the upload of ${tag}?`;
    if (!(await confirmed({ title, text: `What was received of it for ${run} is removed. Its client can begin again.`, button: "Remove", danger: true }))) return;
    try {
      await act(() => remove(api(["uploads", id])), this.context, "Removing needs the service's token.");
      await this.lookAtUploads();
    } catch (error) {
      this.fail(error);
    }
  }

  async verify({ run, checkpoint }) {
    try {
      await act(() => post(api(["runs", run, "checkpoints", checkpoint, "verify"])), this.context, "Verifying needs the service's token.");
      await this.refresh();
    } catch (error) {
      this.fail(error);
    }
  }

  take(jobs) {
    this.jobs = jobs;
    this.draw();
  }

  async refresh() {
    const before = new Map(this.jobs.map((job) => [job.id, job.state]));
    this.take((await get("api/jobs")).jobs);
    await this.lookAtUploads();
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
    const again = whyNot(this.context.service) === null ? (job) => void this.verify(job) : null;
    this.views = new Map(shown.map((job) => [job.id, this.views.get(job.id) ?? new JobView(job, again)]));
    replace(this.list, [...this.views.values()].map((view) => view.element));
  }
}
