// Work that is done again and again, while somebody looks.

/**
 * Call the async `work` every `seconds` while the page is in front; `state(lost)` is told whether it failed.
 * Returns what ends it.
 */
export function every(seconds, work, state = () => {}) {
  let timer = 0;
  let ended = false;
  const round = async () => {
    clearTimeout(timer);
    if (!document.hidden) {
      try {
        await work();
        if (!ended) state(false);
      } catch (error) {
        if (error.status === undefined) console.error(error);
        if (!ended) state(true);
      }
    }
    if (!ended) timer = setTimeout(round, seconds * 1000);
  };
  const back = () => {
    if (!document.hidden) void round();
  };
  timer = setTimeout(round, seconds * 1000);
  document.addEventListener("visibilitychange", back);
  return () => {
    ended = true;
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", back);
  };
}

/** Return a function that calls `work` at the next frame, once however often it was asked. */
export function atFrame(work) {
  let frame = 0;
  return () => {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      work();
    });
  };
}
