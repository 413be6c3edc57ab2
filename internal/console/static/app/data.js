// Hooks: data that a page loads, keeps while it is away, and loads again; the live stream; the clock.
import { useEffect, useReducer, useRef, useState } from "./html.js";
import { ACTED, get, query } from "./api.js";
import * as stream from "./stream.js";

export const REFETCH = 2_000; // at most once in this time after changes
export const KEY_CHANGED = "fleetd.key"; // an event of the window
const STORED = 2_000; // after this a change is in the database
export const COUNTED = 11_000; // after this no counts from before a change are reused
const SLOW = 300; // a load that takes longer shows that it does

// useData loads with load(signal) when one of deps changed, and again on reload(). Data stays while an error is shown;
// what may pass by itself (503, no connection) is tried again, ever more slowly. Leaving the page ends the request.
// An answer may be older than the change that soon() reports: it is read once more, settle after the last one.
export function useData(load, deps, { every, settle = STORED } = {}) {
  const [result, set] = useState({ data: null, error: null, at: 0, slow: false });
  const control = useRef(null);
  useEffect(() => {
    const ended = new AbortController();
    let timer = 0, settling = 0, running = false, again = false, delay = stream.FIRST_RETRY, lastAt = 0;
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
        delay = stream.FIRST_RETRY;
        set({ data, error: null, at: Date.now(), slow: false });
        if (every) timer = setTimeout(() => !document.hidden && run(), every);
      } catch (error) {
        if (ended.signal.aborted) return;
        if (error.name !== "AbortError") set((r) => ({ ...r, error, slow: false, stale: false, data: r.stale ? null : r.data }));
        if (error.status === 503 || error.status === 0) {
          timer = setTimeout(run, stream.spread(delay));
          delay = stream.longer(delay);
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
      clearTimeout(settling);
      settling = setTimeout(run, settle);
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
      clearTimeout(settling);
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

// useFeed adds rows, which have a key, to a list that is newest first and keeps so many. A row may come twice, because
// the stream collects events for a moment and the list was read meanwhile. While the feed is paused, the rows on the page
// stay as they are, even if rows are missing: what came since is added when it goes on, unless one of deps has changed: then
// the list is another one.
export function useFeed(list, keep, deps = []) {
  const [paused, setPaused] = useState(false);
  const [, redraw] = useReducer((n) => n + 1, 0);
  const held = useRef([]), missed = useRef(false);
  const forget = () => {
    held.current = [];
    missed.current = false;
  };
  useEffect(() => forget, deps);
  const show = (rows) => rows.length && list.patch((before) => {
    const known = new Set(before.map((row) => row.key));
    return [...rows.filter((row) => !known.has(row.key)), ...before].slice(0, keep);
  });
  return {
    paused,
    held: held.current.length,
    add(rows) {
      if (!paused) show(rows);
      else if (rows.length) {
        held.current = [...rows, ...held.current].slice(0, keep);
        redraw();
      }
    },
    gap() {
      if (paused) missed.current = true;
      else list.soon();
    },
    toggle() {
      if (paused) {
        show(held.current);
        if (missed.current) list.reload();
        forget();
      }
      setPaused(!paused);
    },
  };
}

// useNames looks the names of devices up, once those that are wanted stay the same for a moment.
export function useNames(ids, moment = SLOW) {
  const names = useRef(new Map()).current;
  const [, redraw] = useReducer((n) => n + 1, 0);
  const missing = [...new Set(ids)].filter((id) => !names.has(id)).slice(0, 100);
  useEffect(() => {
    if (!missing.length) return undefined;
    const ended = new AbortController();
    const timer = setTimeout(() => get("/v1/devices" + query({ select: `device in (${missing.join()})`, limit: 100 }), ended.signal).then(({ items }) => {
      for (const id of missing) names.set(id, "");
      for (const d of items) names.set(d.id, d.name);
      redraw();
    }, () => {}), moment); // the ids are shown instead
    return () => { clearTimeout(timer); ended.abort(); };
  }, [missing.join()]);
  return (id) => names.get(id) || id;
}

// useImages reads the images of firmware jobs once; it returns a function from an id to an image that is known.
export function useImages(jobs, can) {
  const ids = can("firmware:read") ? jobs.flatMap((j) => j.spec.action.firmware?.image || []) : [];
  const { data } = useData((signal) => (ids.length ? get("/v1/firmware" + query({ limit: 1000 }), signal) : null), [[...new Set(ids)].join()]);
  return (id) => data?.items.find((i) => i.id === id);
}

// useEvents calls each with every message of the stream while the page is shown.
export function useEvents(each) {
  const latest = useRef(each);
  latest.current = each;
  useEffect(() => stream.subscribe((message) => latest.current(message)), []);
}

// useActed calls each when a request of this tab has changed something, of which there may be no event.
export function useActed(each) {
  const latest = useRef(each);
  latest.current = each;
  useEffect(() => {
    const acted = () => latest.current();
    addEventListener(ACTED, acted);
    return () => removeEventListener(ACTED, acted);
  }, []);
}

export function useStreamState() {
  const [state, set] = useState(stream.state());
  useEffect(() => {
    const look = () => set(stream.state());
    look(); // another tab may have answered before this one listened
    return stream.subscribe(look);
  }, []);
  return state;
}

// useTick draws again every interval, for ages.
export function useTick(interval = 10_000) {
  const [, redraw] = useReducer((n) => n + 1, 0);
  useEffect(() => {
    const timer = setInterval(() => !document.hidden && redraw(), interval);
    return () => clearInterval(timer);
  }, [interval]);
}
