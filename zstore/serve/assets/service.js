// The one way to the service's data. The page only reads: the browser itself asks for the token, and sends it.

/** What went wrong with a request: `status` 0 means that there was no answer. */
export class RequestError extends Error {
  constructor(status, message) {
    super(message);
    this.name = "RequestError";
    this.status = status;
  }
}

/** Return a path, percent-encoded between its slashes. */
export function encoded(path) {
  return path.split("/").map(encodeURIComponent).join("/");
}

/** Return a path of the API: segments are percent-encoded, `query` leaves out what is null. */
export function api(segments, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null);
  const text = new URLSearchParams(given).toString();
  return `api/${segments.map(encoded).join("/")}${text ? `?${text}` : ""}`;
}

/** Return the JSON answer of `path`. Rejects with RequestError, whose message says what to do. */
export async function get(path) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin" });
  } catch {
    throw new RequestError(0, "The service does not answer. Check that zstore serve is running.");
  }
  let answer;
  try {
    answer = await response.json();
  } catch {
    throw new RequestError(response.status, `Expected JSON from ${path}, got status ${response.status}.`);
  }
  if (!response.ok)
    throw new RequestError(response.status, answer?.error ?? `The service answered ${response.status}.`);
  return answer;
}

/**
 * Call `ask` every `everyS` seconds while the page is looked at, and more rarely while it fails. `live` is called with
 * whether the last call succeeded.
 * @returns {() => void} Ends it.
 */
export function repeat(ask, everyS, live = () => {}) {
  let timer = 0;
  let ended = false;
  let failures = 0;
  const turn = async () => {
    if (!document.hidden) {
      try {
        await ask();
        failures = 0;
      } catch (error) {
        if (error.status === undefined) console.error(error);
        failures += 1;
      }
      if (!ended) live(failures === 0);
    }
    if (!ended) timer = setTimeout(turn, 1000 * Math.min(10, everyS * 2 ** failures));
  };
  timer = setTimeout(turn, 1000 * everyS);
  return () => {
    ended = true;
    clearTimeout(timer);
  };
}
