// The page: its header, and the view that the URL names.
//
// A view is a module that exports `async show(container, params, context)`. `params` holds what the pattern of its route
// names, and `query` (URLSearchParams). It replaces what stands in `container` and returns a function that ends what it started,
// or nothing.
// Modules export functions, classes and constants by name, import them by name and in no circle, and load nothing later: a
// report puts them all into one script.

import { get, isReport } from "./data.js";
import { h, replace } from "./dom.js";
import { follow, go, here, link, match, runUrl } from "./router.js";
import { runBar } from "./runbar.js";
import { askForToken, sessionButton } from "./session.js";
import { empty, loading, problem } from "./states.js";
import { themeSwitch } from "./themes.js";
import { whyNot } from "./parts/act.js";
import { ROUTES } from "./views.js";

const main = document.getElementById("main");
const announcer = document.getElementById("announcer");
let service = { version: "", allows_actions: false, authorized: false, needs_token: false };
let shown = 0;
let stop = null;
let lastPath = null;

start();

async function start() {
  follow(() => void show());
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // The fragment names the view.
    main.focus();
  });
  addEventListener("zstore-signed-out", () => {
    // A box over the page may be asking for the token already.
    if (!service.needs_token && document.querySelector("dialog[open]") === null) void again();
  });
  if (isReport && location.hash === "") await openRun();
  await learn();
  await show();
}

/** Begin a report of one run with it: there is nothing to choose in the list of runs. */
async function openRun() {
  const { runs } = await get("api/runs");
  if (runs.length === 1) history.replaceState(null, "", runUrl(runs[0].name));
}

/** Ask the service what it allows here, and show that in the header. */
async function learn() {
  try {
    service = await get("api");
  } catch {
    // The view says what is wrong.
  }
  header();
}

async function show() {
  const ticket = ++shown;
  stop?.();
  stop = null;
  const { path, query } = here();
  const found = find(path);
  const title = found === null ? "No such page" : found.route.title(found.params);
  document.title = title === "Runs" ? "zstore" : `${title} · zstore`;
  header();
  const container = h("div", { class: "view" }, loading());
  const bar = found?.params.run === undefined ? null : runBar(found.params.run, found.route.tab);
  replace(main, bar, container);
  if (lastPath !== null && lastPath !== path) {
    scrollTo(0, 0);
    main.focus({ preventScroll: true });
    announcer.textContent = title;
  }
  lastPath = path;
  if (found === null) {
    replace(container, empty("No such page", `Nothing is at ${path}. The list of runs is at the top left.`));
    return;
  }
  if (service.needs_token) {
    signIn(container);
    return;
  }
  try {
    const ended = await found.route.show(container, { ...found.params, query }, context());
    if (ticket === shown) stop = ended ?? null;
    else ended?.();
  } catch (error) {
    if (ticket === shown && error.name !== "AbortError") fail(container, error);
  }
}

function find(path) {
  for (const route of ROUTES) {
    const params = match(route.pattern, path);
    if (params !== null) return { route, params };
  }
  return null;
}

function fail(container, error) {
  if (error.status === undefined) console.error(error);
  if (error.status === 401) signIn(container);
  else replace(container, problem(error, () => void show()));
}

function signIn(container) {
  replace(container, askForToken(again));
  container.querySelector("input").focus();
}

async function again() {
  await learn();
  await show();
}

/** What a view gets beside its parameters. */
function context() {
  return {
    /** The answer of `GET /api`, as it was learned last. */
    get service() {
      return service;
    },
    go,
    link,
    /** Say something to people who do not see the page. */
    announce: (text) => {
      announcer.textContent = text;
    },
    /** Learn anew what the service allows, after signing in; the view stays as it is. */
    learn,
    /** Learn anew what the service allows, and show the view again. */
    reload: again,
  };
}

function header() {
  const { path } = here();
  const place = (href, text, test) =>
    h("a", { href: link(href), test, "aria-current": path === href ? "page" : null }, text);
  replace(
    document.getElementById("top"),
    h("a", { class: "brand", href: link("/"), "aria-label": "zstore, list of runs" }, "zstore"),
    h(
      "nav",
      { "aria-label": "Page" },
      place("/", "Runs", "nav-runs"),
      isReport ? null : place("/jobs", "Jobs", "nav-jobs"),
    ),
    h("span", { class: "spring" }),
    isReport ? h("span", { class: "tag", test: "report" }, "report") : sessionButton(service, again),
    isReport || service.allows_actions || service.version === "" ? null : h("span", { class: "tag", title: whyNot(service), test: "read-only" }, "read-only"),
    themeSwitch(),
  );
}
