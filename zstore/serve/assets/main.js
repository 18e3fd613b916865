// The page: its header, and the view that the URL names.
//
// A view is a module that exports `async show(container, params, context)`. `params` holds what the pattern of its route
// names, and `query` (URLSearchParams). It replaces what stands in `container` and returns a function that ends what it started,
// or nothing.
// Modules export functions, classes and constants by name, import them by name and in no circle, and load nothing later.

import { get } from "./data.js";
import { h, replace } from "./dom.js";
import { follow, go, here, link, match } from "./router.js";
import { runBar } from "./runbar.js";
import { empty, loading, problem } from "./states.js";
import { themeSwitch } from "./themes.js";
import { ROUTES } from "./views.js";

const main = document.getElementById("main");
const announcer = document.getElementById("announcer");
let service = { version: "", needs_token: false };
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
  try {
    service = await get("api");
  } catch {
    // The view says what is wrong.
  }
  await show();
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
  replace(container, problem(error, () => void show()));
}

/** What a view gets beside its parameters. */
function context() {
  return {
    /** The answer of `GET /api`, as it was when the page began. */
    get service() {
      return service;
    },
    go,
    link,
    /** Say something to people who do not see the page. */
    announce: (text) => {
      announcer.textContent = text;
    },
    /** Show the view again. */
    reload: show,
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
    ),
    h("span", { class: "spring" }),
    themeSwitch(),
  );
}
