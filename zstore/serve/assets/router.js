// Which view a URL is: the fragment names it, so that one page below any path, or in a file, shows them all.

/**
 * Return the parameters of `path` by `pattern`, null where it does not fit. `:name` is one segment, `*name` all the rest.
 * @returns {Object<string, string> | null}
 */
export function match(pattern, path) {
  const wanted = pattern.split("/").filter(Boolean);
  const given = path.split("/").filter(Boolean);
  const found = {};
  for (const [index, part] of wanted.entries()) {
    if (part.startsWith("*")) {
      if (given.length <= index) return null;
      found[part.slice(1)] = given.slice(index).map(decode).join("/");
      return found;
    }
    if (index >= given.length) return null;
    if (part.startsWith(":")) found[part.slice(1)] = decode(given[index]);
    else if (part !== given[index]) return null;
  }
  return wanted.length === given.length ? found : null;
}

/** Return the URL of a run's view: `view` is "", memory, checkpoints, checkpoint/<path> or compare. */
export function runUrl(run, view = "", query = {}) {
  const segments = ["run", run, ...view.split("/")].filter(Boolean).map(encodeURIComponent);
  const text = new URLSearchParams(query).toString();
  return link(`/${segments.join("/")}${text ? `?${text}` : ""}`);
}

/** Return what an `href` to `path` of this page is. */
export function link(path) {
  return `#${path}`;
}

/** Return path and query of the view that is shown. */
export function here() {
  const [path, query = ""] = (location.hash.slice(1) || "/").split("?");
  return { path, query: new URLSearchParams(query) };
}

/** Change the URL to `href`, which `link` or `runUrl` made, and show its view. */
export function go(href) {
  history.pushState(null, "", href);
  dispatchEvent(new PopStateEvent("popstate"));
}

/** Change the query of the present URL without another view: `changes` are values by name, of some a list; null removes one. */
export function note(changes) {
  const { path, query } = here();
  for (const [name, value] of Object.entries(changes)) {
    query.delete(name);
    for (const one of [value].flat()) if (one !== null && one !== "") query.append(name, one);
  }
  const text = query.toString();
  history.replaceState(null, "", link(`${path}${text ? `?${text}` : ""}`));
}

/** Call `show` whenever another URL is shown; links within the page change it without loading. */
export function follow(show) {
  addEventListener("popstate", show);
  addEventListener("click", (event) => {
    const anchor = event.target.closest?.("a[href]");
    const other = event.defaultPrevented || event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey;
    if (anchor === null || anchor === undefined || other || anchor.target || anchor.hasAttribute("download")) return;
    const href = anchor.getAttribute("href");
    if (!href.startsWith("#/")) return;
    event.preventDefault();
    go(href);
  });
}

function decode(segment) {
  try {
    return decodeURIComponent(segment);
  } catch {
    return segment;
  }
}
