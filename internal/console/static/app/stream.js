// One stream of events for all tabs of this browser that use the same key: HTTP/1.1 allows six connections to a
// host, over all tabs. One tab leads, reads the stream and passes it on through a BroadcastChannel; when it ends or
// hides, another takes over after the last id. The leader holds a Web Lock, or on plain HTTP, where there are none, a
// lease in localStorage. The channel's name contains the id of the key, never the key.
import { ApiError, key, random, send } from "./api.js";

const HIDDEN = 60_000; // a hidden tab leaves after this
const BEAT = 2_000, LEASE = 5_000; // the lease is renewed and ends
export const FIRST_RETRY = 2_000;
const LAST_RETRY = 30_000;

const tab = random();
const listeners = new Set();
let member = null; // of the present key, while this tab takes part
let identity = "";
let status = { state: "off", at: 0 };
let hiding = 0;
let followed = false; // the stream of the present key was live before

export const state = () => status;

// subscribe calls listener with {events: [{type, data}], omitted}, with {gap: true} when events are missing, and with
// {status: true} when the state changed. It returns what ends that.
export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function tell(message) {
  if (message.status) status = message.status;
  if (status.state === "live") followed = true;
  for (const listener of listeners) listener(message.status ? { status: true } : message);
}

// start follows the stream for a caller, named by the id of its key; stop ends that.
export function start(id) {
  stop();
  followed = false;
  identity = id;
  if (!document.hidden) member = join(id);
}

export function stop() {
  member?.leave();
  member = null;
  identity = "";
  tell({ status: { state: "off", at: Date.now() } });
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (document.hidden) {
    hiding = setTimeout(() => {
      member?.leave();
      member = null;
      tell({ status: { state: "off", at: Date.now() } });
    }, HIDDEN);
  } else if (identity && !member) {
    member = join(identity);
    tell({ gap: true }); // the pages are as old as the pause
  }
});
addEventListener("pagehide", () => member?.leave());

function join(id) {
  const name = `fleetd.stream.${id}`;
  const channel = new BroadcastChannel(name);
  const ended = new AbortController();
  let leading = false;
  let last = ""; // id of the last event
  let current = { state: "connecting", at: Date.now() };

  const share = (message) => {
    channel.postMessage(message);
    tell(message);
  };
  const setState = (state) => {
    if (state !== current.state) share({ status: (current = { state, at: Date.now() }) });
  };
  channel.onmessage = ({ data }) => {
    if (data.hello) {
      if (leading) channel.postMessage({ status: current, id: last });
      return;
    }
    if (data.id) last = data.id;
    tell(data);
  };
  channel.postMessage({ hello: tab });
  tell({ status: current });

  async function lead() {
    leading = true;
    let delay = FIRST_RETRY;
    while (!ended.signal.aborted) {
      setState("connecting");
      try {
        await follow(last, ended.signal, (message) => {
          delay = FIRST_RETRY;
          if (message.id) last = message.id;
          if (message.open) {
            const missed = followed && !last; // there was no event yet to resume after
            setState("live");
            if (missed) share({ gap: true });
          } else if (message.gap || message.events.length || message.omitted) share(message);
        });
      } catch (error) {
        if (ended.signal.aborted) break;
        if (error instanceof ApiError && error.status === 403) {
          setState("forbidden");
          break;
        }
        if (error instanceof ApiError && error.status === 400) { // the id is older than the streams
          last = "";
          share({ gap: true });
        }
      }
      if (ended.signal.aborted) break;
      setState("lost");
      await sleep(spread(delay), ended.signal);
      delay = longer(delay);
    }
  }

  if (navigator.locks) {
    navigator.locks.request(name, { signal: ended.signal }, lead).catch(() => {});
  } else {
    lease(name, ended.signal, lead);
  }
  return {
    leave() {
      ended.abort();
      channel.close();
    },
  };
}

// lease runs lead while this tab holds the entry called name.
async function lease(name, signal, lead) {
  const held = () => {
    try {
      return JSON.parse(localStorage.getItem(name)) || {};
    } catch {
      return {};
    }
  };
  const renew = () => localStorage.setItem(name, JSON.stringify({ tab, at: Date.now() }));
  while (!signal.aborted) {
    const { tab: holder, at } = held();
    if (holder === tab || !holder || Math.abs(Date.now() - at) > LEASE) {
      renew();
      await sleep(50 + Math.random() * 100, signal); // two tabs may see the end at once: the last writer leads
      if (held().tab === tab && !signal.aborted) {
        const beat = setInterval(renew, BEAT);
        signal.addEventListener("abort", () => {
          clearInterval(beat);
          if (held().tab === tab) localStorage.removeItem(name);
        });
        return lead();
      }
    }
    await sleep(BEAT / 2, signal);
  }
}

// Tabs try again ever more slowly, and not all at the same time.
export const longer = (delay) => Math.min(LAST_RETRY, delay * 2);
export const spread = (delay) => delay * (0.75 + Math.random() / 2);

export const sleep = (ms, signal) => new Promise((resolve) => {
  const timer = setTimeout(resolve, ms);
  signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
});

// follow reads the stream once, until it ends. each receives {open} and batches.
async function follow(last, signal, each) {
  const used = key.get();
  const response = await send("GET", "/v1/events?batch=500ms", { headers: last ? { "Last-Event-ID": last } : {}, signal });
  each({ open: true });
  for await (const event of parse(response.body)) {
    if (key.get() !== used) return;
    if (event.type === "gap") each({ gap: true, id: event.id });
    else if (event.type === "changes") each({ events: event.data.events, omitted: event.data.omitted || 0, id: event.id });
    else each({ events: [{ type: event.type, data: event.data }], omitted: 0, id: event.id });
  }
}

// parse yields the events of a stream: {id, type, data}, data decoded. What is not JSON is left out.
export async function* parse(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      for (let end; (end = rest.indexOf("\n\n")) >= 0; rest = rest.slice(end + 2)) {
        const event = { id: "", type: "message", data: "" };
        for (const text of rest.slice(0, end).split("\n")) {
          const at = text.indexOf(":");
          if (at <= 0) continue; // a comment
          const field = text.slice(0, at), content = text.slice(at + 1).replace(/^ /, "");
          if (field === "id") event.id = content;
          else if (field === "event") event.type = content;
          else if (field === "data") event.data += content;
        }
        try {
          event.data = event.data ? JSON.parse(event.data) : null;
        } catch {
          continue;
        }
        if (event.data || event.type === "gap") yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
