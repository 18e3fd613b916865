// The page: its head, and the view that the fragment of the URL names.
//
// A view is a module that exports `async show(container, params)`, where `params` holds what its route names. It fills
// `container` and returns a function that ends what it started, or nothing.

import { show as checkpoint } from "./checkpoint.js";
import { show as checkpoints } from "./checkpoints.js";
import { empty, h, problem, replace, runUrl } from "./dom.js";
import { show as memory } from "./memory.js";
import { show as run } from "./run.js";
import { show as runs } from "./runs.js";

/** `tab` is the view's place in the bar of its run. */
const ROUTES = [
  { pattern: /^\/?$/, title: () => "Runs", show: runs },
  { pattern: /^\/run\/([^/]+)$/, title: ({ run }) => run, tab: "", show: run },
  { pattern: /^\/run\/([^/]+)\/memory$/, title: ({ run }) => `Memory of ${run}`, tab: "memory", show: memory },
  {
    pattern: /^\/run\/([^/]+)\/checkpoints$/,
    title: ({ run }) => `Checkpoints of ${run}`,
    tab: "checkpoints",
    show: checkpoints,
  },
  {
    pattern: /^\/run\/([^/]+)\/checkpoint\/(.+)$/,
    title: ({ run, checkpoint }) => `${checkpoint} of ${run}`,
    tab: "checkpoints",
    show: checkpoint,
  },
];
const TABS = [
  ["", "Training"],
  ["memory", "Memory"],
  ["checkpoints", "Checkpoints"],
];

const main = document.getElementById("main");
const announcer = document.getElementById("announcer");
let shown = 0;
let stop = null;

addEventListener("hashchange", () => void show(true));
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // The fragment names the view.
  main.focus();
});
void show(false);

async function show(isTurned) {
  const ticket = ++shown;
  stop?.();
  stop = null;
  const { title, params, route } = find(location.hash.slice(1));
  document.title = title === "Runs" ? "zstore" : `${title} · zstore`;
  const container = h("div", { class: "view" }, h("p", { class: "muted", role: "status" }, "Loading"));
  replace(main, params.run === undefined ? null : runBar(params.run, route.tab), container);
  if (isTurned) {
    scrollTo(0, 0);
    main.focus({ preventScroll: true });
    announcer.textContent = title;
  }
  if (route === null) {
    replace(container, empty(title, "The list of runs is at the top left."));
    return;
  }
  try {
    const end = (await route.show(container, params)) ?? null;
    if (ticket === shown) stop = end;
    else end?.();
  } catch (error) {
    if (error.status === undefined) console.error(error);
    const retry = () => void show(false);
    if (ticket === shown) replace(container, problem(error, retry));
  }
}

function find(path) {
  for (const route of ROUTES) {
    const found = route.pattern.exec(path);
    if (found === null) continue;
    const [run, checkpoint] = found.slice(1).map(decode);
    const params = { run, checkpoint };
    return { route, params, title: route.title(params) };
  }
  return { route: null, params: {}, title: "No such page" };
}

function decode(path) {
  try {
    return decodeURIComponent(path);
  } catch {
    return path;
  }
}

/** Return the name of a run and its views, with `active` marked. */
function runBar(run, active) {
  const tabs = TABS.map(([view, text]) => {
    const current = view === active ? "page" : null;
    return h("a", { href: runUrl(run, view), test: `tab-${text.toLowerCase()}`, "aria-current": current }, text);
  });
  const nav = h("nav", { class: "tabs", "aria-label": "Views of the run" }, tabs);
  return h("div", { class: "runbar" }, h("h1", { test: "run-name" }, run), nav);
}
