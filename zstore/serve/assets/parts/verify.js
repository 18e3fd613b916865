// Checking every byte of a checkpoint, and what came of it.

import { api, post } from "../data.js";
import { h, replace } from "../dom.js";
import { act } from "./act.js";
import { hasFaults, showJob } from "./job.js";

/**
 * Have the service verify a checkpoint, and show how far it is in `place`.
 * @returns {() => void} Stops looking; the verification goes on.
 */
export function startVerify(place, run, checkpoint, context) {
  let ended = false;
  let stop = () => {};
  const begin = async () => {
    replace(place, h("p", { class: "muted", role: "status" }, "Starting the verification"));
    try {
      const path = api(["runs", run, "checkpoints", checkpoint, "verify"]);
      const job = await act(() => post(path), context, "Verifying a checkpoint needs the service's token.");
      if (job === null) replace(place);
      else if (!ended) stop = showJob(place, job.id, (done) => context.announce(outcome(done)));
    } catch (error) {
      replace(place, h("p", { class: "bad name", role: "alert" }, error.message));
    }
  };
  void begin();
  return () => {
    ended = true;
    stop();
  };
}

function outcome(job) {
  if (job.state === "failed") return "The verification failed.";
  return hasFaults(job) ? "Faults found." : "No faults found.";
}
