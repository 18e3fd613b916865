// Asking again and again, while the page is looked at.

const MOST_FAILURES = 5;

/**
 * Call `ask` every so often; it returns the seconds until the next time, null to end. While it fails it is called again,
 * and after a few failures in a row `failed` is called with the error.
 * @returns {() => void} Ends it.
 */
export function repeat(ask, failed, firstS = 0) {
  let timer = 0;
  let ended = false;
  let failures = 0;
  const turn = async () => {
    let nextS = 1;
    if (!document.hidden) {
      try {
        nextS = await ask();
        failures = 0;
      } catch (error) {
        failures += 1;
        nextS = Math.min(10, 2 ** failures);
        if (failures === MOST_FAILURES) failed(error);
      }
    }
    if (!ended && nextS !== null) timer = setTimeout(turn, nextS * 1000);
  };
  timer = setTimeout(turn, firstS * 1000);
  return () => {
    ended = true;
    clearTimeout(timer);
  };
}
