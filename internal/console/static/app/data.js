// Hooks: data that a page loads, keeps while it is away, and loads again; the live stream; the clock.
import { useEffect, useReducer, useRef, useState } from "./html.js";
import * as stream from "./stream.js";

const FIRST_RETRY = 2_000, LAST_RETRY = 30_000;
const REFETCH = 2_000; // at most once in this time after changes
export const KEY_CHANGED = "fleetd.key"; // an event of the window
const SLOW = 300; // a load that takes longer shows that it does

// useData loads with load(signal) when one of deps changed, and again on reload(). Data stays while an error is shown;
// what may pass by itself (503, no connection) is tried again, ever more slowly. Leaving the page ends the request.
export function useData(load, deps, { every } = {}) {
  const [result, set] = useState({ data: null, error: null, at: 0, slow: false });
  const control = useRef(null);
  useEffect(() => {
    const ended = new AbortController();
    let timer = 0, running = false, again = false, delay = FIRST_RETRY, lastAt = 0;
    set((r) => ({ ...r, error: null, stale: true }));
    async function run() {
      clearTimeout(timer);
      if (running) {
        again = true;
        return;
      }
      running = true;
      lastAt = Date.now();
      const slow = setTimeout(() => set((r) => ({ ...r, slow: true })), SLOW);
      try {
        const data = await load(ended.signal);
        if (ended.signal.aborted) return;
        delay = FIRST_RETRY;
        set({ data, error: null, at: Date.now(), slow: false });
        if (every) timer = setTimeout(() => !document.hidden && run(), every);
      } catch (error) {
        if (ended.signal.aborted) return;
        if (error.name !== "AbortError") set((r) => ({ ...r, error, slow: false, stale: false, data: r.stale ? null : r.data }));
        if (error.status === 503 || error.status === 0) {
          timer = setTimeout(run, delay * (0.75 + Math.random() / 2));
          delay = Math.min(LAST_RETRY, delay * 2);
        }
      } finally {
        clearTimeout(slow);
        running = false;
        if (again && !ended.signal.aborted) {
          again = false;
          timer = setTimeout(run, REFETCH);
        }
      }
    }
    // soon is reload for changes that come in masses.
    const soon = () => {
      if (running) again = true;
      else {
        clearTimeout(timer);
        timer = setTimeout(run, Math.max(0, lastAt + REFETCH - Date.now()));
      }
    };
    const shown = () => { if (!document.hidden && every) run(); };
    control.current = { run, soon };
    document.addEventListener("visibilitychange", shown);
    addEventListener(KEY_CHANGED, run);
    run();
    return () => {
      ended.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", shown);
      removeEventListener(KEY_CHANGED, run);
    };
  }, deps);
  return {
    ...result,
    reload: () => control.current?.run(),
    soon: () => control.current?.soon(),
    patch: (change) => set((r) => (r.data ? { ...r, data: change(r.data) } : r)),
  };
}

// useEvents calls each with every message of the stream while the page is shown.
export function useEvents(each) {
  const latest = useRef(each);
  latest.current = each;
  useEffect(() => stream.subscribe((message) => latest.current(message)), []);
}

export function useStreamState() {
  const [, redraw] = useReducer((n) => n + 1, 0);
  useEvents((message) => message.status && redraw());
  return stream.state();
}

// useTick draws again every interval, for ages.
export function useTick(interval = 10_000) {
  const [, redraw] = useReducer((n) => n + 1, 0);
  useEffect(() => {
    const timer = setInterval(() => !document.hidden && redraw(), interval);
    return () => clearInterval(timer);
  }, [interval]);
}
