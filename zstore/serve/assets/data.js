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
  const path = segments.map(encoded).join("/");
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
  const text = new URLSearchParams(given).toString();
  return `api/${path}${text ? `?${text}` : ""}`;
}

/** Return the JSON answer of `path`. Rejects with RequestError, whose message says what to do. */
export async function get(path, { signal } = {}) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", signal });
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
