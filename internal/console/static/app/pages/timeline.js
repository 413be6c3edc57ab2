// What happened to a device: events, records, decisions, calls and changes of tools in one list, newest first.
import { html } from "../html.js";
import { get, now, path, query as encode, save } from "../api.js";
import { useData, useEvents, useFeed } from "../data.js";
import { clock, milliseconds } from "../format.js";
import { Link, setQuery, to } from "../route.js";
import { s } from "../strings.js";
import { Empty, Loaded, Pause } from "../ui.js";
import { line } from "../untrusted.js";
import { describe, identity, recent } from "./events.js";

const KEEP = 1000, SHOWN = 250;
const DAY = 86_400_000;

export function Timeline({ device, query, can }) {
  const list = useData((signal) => load(device.id, can, signal), [device.id]);
  const feed = useFeed(list, KEEP);
  const verbose = query.get("verbose") === "1";
  const kinds = new Set((query.get("kinds") || Object.keys(s.timeline.kinds).join(",")).split(","));

  useEvents((message) => {
    if (message.gap) feed.gap();
    feed.add((message.events || []).filter((e) => e.data.device === device.id).map(eventRow).reverse());
  });
  const toggle = (kind) => {
    const next = new Set(kinds);
    next.has(kind) ? next.delete(kind) : next.add(kind);
    setQuery({ kinds: next.size === Object.keys(s.timeline.kinds).length ? "" : [...next].join(",") || "-" }, { replace: true });
  };
  return html`<div class="chips" role="group" aria-label=${s.timeline.title}>${Object.entries(s.timeline.kinds).map(([kind, text]) => html`<button key=${kind} type="button" class="chip" aria-pressed=${kinds.has(kind)} onClick=${() => toggle(kind)}>${text}</button>`)}
      <label class="check"><input type="checkbox" checked=${verbose} onChange=${(e) => setQuery({ verbose: e.target.checked ? "1" : "" }, { replace: true })} /> ${s.timeline.verbose}</label></div>
    <div class="actions"><${Pause} feed=${feed} />
      <button type="button" onClick=${() => save(new Blob([JSON.stringify(list.data, null, 2)], { type: "application/json" }), `timeline-${device.id.replaceAll(":", "")}.json`)}>${s.timeline.download}</button></div>
    <${Loaded} from=${list}>${(rows) => {
      const shown = rows.filter((r) => kinds.has(r.kind) && (verbose || !r.verbose)).slice(0, SHOWN);
      return shown.length ? html`<ol class="log">${shown.map((r) => html`<li key=${r.key}><time datetime=${r.at} title=${r.at}>${clock(r.at)}</time>
        <span><small>${s.timeline.kinds[r.kind]}</small> ${line(r.text, 300)} ${r.call && html`<${Link} href=${to(["calls", r.call])}>${s.why}<//>`}</span></li>`)}</ol>` : html`<${Empty}>${s.timeline.empty}<//>`;
    }}<//>`;
}

const eventRow = ({ type, data }) => ({ kind: "event", at: data.time, key: identity(type, data), text: describe(type, data), verbose: type === "notifications", call: data.call });

// load joins what the key may read. A part that this node does not have is left out.
async function load(id, can, signal) {
  const since = new Date(now() - DAY).toISOString();
  const part = (promise, convert) => promise.then((a) => (a.items ?? a).map(convert), (error) => {
    if (error.status === 404 || error.status === 403) return [];
    throw error;
  });
  const parts = await Promise.all([
    part(recent({ device: id, since }, KEEP, signal), eventRow),
    part(get(path("v1", "devices", id, "log") + encode({ limit: 500 }), signal), (r, i) => ({ kind: "record", at: r.at, key: `r ${r.at} ${i}`, call: r.call,
      text: [r.kind, r.tool, r.cause, r.text, r.duration_ms && milliseconds(r.duration_ms), r.count > 1 && s.times(r.count)].filter(Boolean).join(" · ") })),
    part(get(path("v1", "devices", id, "changes") + encode({ limit: 200 }), signal), (c) => ({ kind: "change", at: c.at, key: `c ${c.revision}`, text: `${c.aspect} ${JSON.stringify(c.value ?? "")} (${c.who})` })),
    part(get(path("v1", "devices", id, "catalogs") + encode({ limit: 100 }), signal), (c) => ({ kind: "catalog", at: c.since, key: `t ${c.since}`, text: `${c.catalog.slice(0, 12)} ${c.firmware}` })),
    can("admin") ? part(get("/v1/audit" + encode({ device: id, since, limit: 500 }), signal), (a) => ({ kind: "audit", at: a.at, key: `a ${a.run} ${a.seq}`, call: a.call,
      text: [a.action, a.outcome, a.name || a.key, a.detail, a.duration_ns && milliseconds(a.duration_ns / 1e6)].filter(Boolean).join(" · ") })) : [],
  ]);
  return parts.flat().filter((r) => r.at).sort((a, b) => Date.parse(b.at) - Date.parse(a.at)).slice(0, KEEP);
}
