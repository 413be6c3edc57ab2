// What happens now, over the whole fleet.
import { html, useState } from "../html.js";
import { now, query as encode, send } from "../api.js";
import { REFETCH, useData, useEvents, useFeed, useNames } from "../data.js";
import { clock } from "../format.js";
import { Link, setQuery, to } from "../route.js";
import { codes, s, word } from "../strings.js";
import { parse } from "../stream.js";
import { Command, Loaded, Page, Pause } from "../ui.js";
import { line } from "../untrusted.js";

const KEEP = 1000, SHOWN = 250, FEW = 3;
const HISTORY = 15 * 60_000;
const IDLE = 400, LONGEST = 3000; // a read of what was ends when nothing came for so long, or after

// SIGNS of events, and whether they are good.
export const SIGNS = { online: ["↑", "ok"], back: ["↑", "ok"], offline: ["↓", "bad"], catalog: ["±", ""], photo: ["◎", ""], pending: ["◐", "warn"], contested: ["▲", "bad"], "job.halted": ["✕", "bad"], notifications: ["◇", ""] };

// TYPES are what the API can filter by.
const TYPES = ["online", "offline", "catalog", "photo", "firmware", "pending", "contested", "notifications", "task", "job"];

// recent reads events since an instant, newest last, until the stream has nothing older than now. Past the limit notifications, of which
// there may be very many, are left out first.
export async function recent({ device, type, since }, limit, signal) {
  const ended = new AbortController();
  const stop = () => ended.abort();
  signal?.addEventListener("abort", stop);
  const longest = setTimeout(stop, LONGEST);
  let idle = setTimeout(stop, LONGEST);
  const events = [];
  let spare = 0; // notifications among them
  try {
    const response = await send("GET", "/v1/events" + encode({ device, type, since }), { signal: ended.signal });
    idle = setTimeout(stop, IDLE);
    for await (const event of parse(response.body)) {
      clearTimeout(idle);
      idle = setTimeout(stop, IDLE);
      if (event.type !== "gap") events.push(event);
      if (event.type === "notifications") spare++;
      if (events.length <= limit) continue;
      if (spare) events.splice(events.findIndex((e) => e.type === "notifications"), 1);
      else events.shift();
      spare -= Math.sign(spare);
    }
  } catch (error) {
    if (error.name !== "AbortError" || signal?.aborted) throw error;
  } finally {
    clearTimeout(longest);
    clearTimeout(idle);
    signal?.removeEventListener("abort", stop);
  }
  return events;
}

// describe says what an event is, in words; what the device wrote is shown by the caller as text.
export function describe(type, data) {
  const kind = word("kind", type.split(".")[0]);
  switch (type) {
    case "online": return `${word("event", type, data)} (${word("transport", data.transport)})`;
    case "catalog": {
      const lists = [data.added, data.removed, data.changed].map((names) => names || []), names = ["+", "−", "±"].flatMap((sign, i) => lists[i].map((name) => sign + name));
      return `${word("event", type)}: ${names.length > FEW ? s.timeline.numbers(...lists.map((list) => list.length)) : names.join(" ")}`;
    }
    case "task": return `${word("eventType", type)}: ${word("outcome", data.outcome || data.state)}`;
    case "photo": return `${word("event", type)}: ${data.question ?? ""}`;
    case "notifications": return `${kind}: ${data.method} ${JSON.stringify(data.params ?? "")}`;
  }
  if (Object.hasOwn(codes.event, type)) return word("event", type, data);
  return [kind, data.job, data.state, data.outcome, data.reason].filter(Boolean).join(" · ");
}

// identity is the same for an event wherever it was read.
export const identity = (type, data) => [type, data.device, data.job, data.round, data.attempt, data.state, data.epoch, data.seq, data.time].join(" ");

export const row = (event) => ({ ...event, key: identity(event.type, event.data) });

export function Events({ query }) {
  const type = query.get("type") || "", device = query.get("device") || "";
  const [omitted, setOmitted] = useState(0);
  const list = useData(async (signal) => (await recent({ type, device, since: new Date(now() - HISTORY).toISOString() }, KEEP, signal)).map(row).reverse(), [type, device]);
  const feed = useFeed(list, KEEP, [type, device]);
  useEvents((message) => {
    if (message.gap) feed.gap();
    if (message.omitted) setOmitted((n) => n + message.omitted);
    feed.add((message.events || []).filter((e) => (!type || e.type === type || e.type.startsWith(type + ".")) && (!device || e.data.device === device)).map(row).reverse());
  });
  const name = useNames((list.data || []).slice(0, SHOWN).flatMap((e) => e.data.device || []), REFETCH);
  const submit = (event) => {
    event.preventDefault();
    setQuery({ device: new FormData(event.target).get("device").trim() });
  };
  return html`<${Page} title=${s.events.title} />
    <form class="row" onSubmit=${submit}><label>${s.events.type}<select value=${type} onChange=${(e) => setQuery({ type: e.target.value })}>
        <option value="">${s.all}</option>${TYPES.map((t) => html`<option key=${t} value=${t}>${codes.kind[t]}</option>`)}</select></label>
      <label>${s.events.device}<input name="device" value=${device} spellcheck=${false} /></label><button>${s.devices.apply}</button>
      <${Pause} feed=${feed} /></form>
    ${omitted > 0 && html`<p class="notice warn" data-test="omitted">${s.events.omitted(omitted)}</p>`}
    <section class="panel"><${Loaded} from=${list}>${(rows) => (rows.length ? html`<ol class="log happened exact">${rows.slice(0, SHOWN).map((e) => html`<${Row} key=${e.key} event=${e} who=${name(e.data.device)} />`)}</ol>` : html`<p class="blank">${s.events.empty}</p>`)}<//></section>
    <${Command} cli=${["events", ...(device ? [device] : [])]} url=${"/v1/events" + encode({ type, device })} />`;
}

const Row = ({ event: { type, data }, who }) => html`<li><time datetime=${data.time} title=${data.time}>${clock(data.time, { date: false, ms: true })}</time><span class=${SIGNS[type]?.[1] || ""} aria-hidden="true">${SIGNS[type]?.[0] || "▶"}</span>
  <span>${data.device ? html`<${Link} href=${to(["devices", data.device])}>${who === data.device ? who : line(who, 60)}<//> ` : data.job && html`<${Link} href=${to(["jobs", data.job])}>${line(data.note || s.jobs.unnamed(data.action), 60)}<//> `}${line(describe(type, data), 200)}${data.device && data.job && html` <${Link} href=${to(["jobs", data.job])}>${codes.kind.job}<//>`}</span></li>`;
