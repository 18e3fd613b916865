// Drawing once a frame.

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
