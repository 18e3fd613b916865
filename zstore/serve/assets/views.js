// The views of the page, by their URLs. `tab` is the view's place in the bar of its run.

import { show as checkpoint } from "./views/checkpoint.js";
import { show as checkpoints } from "./views/checkpoints.js";
import { show as memory } from "./views/memory.js";
import { show as run } from "./views/run.js";
import { show as runs } from "./views/runs.js";

export const ROUTES = [
  { pattern: "/", title: () => "Runs", show: runs },
  { pattern: "/run/:run", title: (params) => params.run, tab: "", show: run },
  { pattern: "/run/:run/memory", title: (params) => `Memory of ${params.run}`, tab: "memory", show: memory },
  { pattern: "/run/:run/checkpoints", title: (params) => `Checkpoints of ${params.run}`, tab: "checkpoints", show: checkpoints },
  {
    pattern: "/run/:run/checkpoint/*checkpoint",
    title: (params) => `${params.checkpoint} of ${params.run}`,
    tab: "checkpoints",
    show: checkpoint,
  },
];
