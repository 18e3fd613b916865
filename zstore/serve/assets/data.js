// The one way to the service's data. In a report all of it is embedded, by path, and what needs a server is not there.

const EMBEDDED = document.getElementById("report-data");
const KEPT = EMBEDDED === null ? null : JSON.parse(EMBEDDED.textContent);
const RETRY_S = [1, 2, 5, 10];

/** Whether this is a report: a file without a service behind it. */
export const isReport = KEPT !== null;

/** What went wrong with a request: `status` 0 means that there was no answer. */
export class RequestError extends Error {
  constructor(status, message) {
    super(message);
    this.name = "RequestError";
    this.status = status;
  }
}

/** Let the page ask for the token again: the service does not know this browser (any more), as after a restart. */
export function signedOut() {
  dispatchEvent(new Event("zstore-signed-out"));
}

/** Return a path, percent-encoded between its slashes. */
export function encoded(path) {
  return path.split("/").map(encodeURIComponent).join("/");
}

/** Return a path of the API: segments are percent-encoded, `query` leaves out what is null. */
export function api(segments, query = {}) {
  const path = segments.map(encoded).join("/");
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
  const text = new URLSearchParams(given).toString();
  return `api/${path}${text ? `?${text}` : ""}`;
}

/** Return the JSON answer of `path`. Rejects with RequestError, whose message says what to do. */
export async function get(path, { signal } = {}) {
  if (!isReport) return ask(path, { signal });
  const answer = KEPT[path] ?? KEPT[path.split("?")[0]];
  if (answer === undefined) throw new RequestError(404, "Not in this report. Open it in the service that the report was made from.");
  return answer;
}

/** Send `body` as JSON and return the JSON answer. */
export async function post(path, body = {}) {
  return ask(path, { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } });
}

/** Delete what is at `path`. */
export async function remove(path) {
  return ask(path, { method: "DELETE" });
}

/** Whether a report holds `path`; a service always may. */
export function has(path) {
  return !isReport || path in KEPT || path.split("?")[0] in KEPT;
}

/**
 * Take live events from `path`. `handlers` are functions by the name of an event, called with its JSON, and also `open` and
 * `lost`, called when the connection stands and when it broke, and `again`, called when it stands after events may have been
 * missed. It is opened again by itself, and rests while nobody looks: a browser opens few connections to one service, and
 * pages in the background would take them all. Returns what ends it.
 */
export function listen(path, handlers) {
  if (isReport) return () => {};
  const { open = () => {}, lost = () => {}, again = () => {}, ...named } = handlers;
  let source = null;
  let timer = 0;
  let tries = 0;
  let opened = false;

  const connect = () => {
    source = new EventSource(path);
    let missed = opened; // One that tries again by itself says what it has seen, a new one does not.
    source.addEventListener("open", () => {
      tries = 0;
      opened = true;
      open();
      if (missed) again();
      missed = false;
    });
    source.addEventListener("error", (event) => {
      if (event.target !== source) return;
      lost();
      if (source.readyState !== EventSource.CLOSED) return;
      get("api").then((service) => service.needs_token && signedOut(), () => {});
      timer = setTimeout(connect, RETRY_S[Math.min(tries++, RETRY_S.length - 1)] * 1000);
    });
    for (const [name, handle] of Object.entries(named)) {
      source.addEventListener(name, (event) => handle(JSON.parse(event.data)));
    }
  };
  const rest = () => {
    clearTimeout(timer);
    source?.close();
    source = null;
  };
  const look = () => {
    if (document.hidden) rest();
    else if (source === null) connect();
  };
  document.addEventListener("visibilitychange", look);
  look();
  return () => {
    document.removeEventListener("visibilitychange", look);
    rest();
  };
}

async function ask(path, options) {
  if (isReport) throw new RequestError(0, "This is a report: there is no service behind it.");
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError(0, "The service does not answer. Check that zstore serve is running.");
  }
  const text = await response.text();
  let answer = null;
  try {
    answer = text ? JSON.parse(text) : null;
  } catch {
    throw new RequestError(response.status, `Expected JSON from ${path}, got an answer with status ${response.status}.`);
  }
  if (!response.ok) throw new RequestError(response.status, answer?.error ?? `The service answered ${response.status}.`);
  return answer;
}
