// What happened to a device: one line for one happening, merged from events, the device log, decisions, the audit and tool lists.
import { html, useMemo, useState } from "../html.js";
import { get, now, path, query as encode, save } from "../api.js";
import { useActed, useData, useEvents, useFeed } from "../data.js";
import { capital, clock, duration, milliseconds, plural } from "../format.js";
import { Link, setQuery, to } from "../route.js";
import { s, word } from "../strings.js";
import { Loaded, Panel, Pause } from "../ui.js";
import { line, Quoted } from "../untrusted.js";
import { identity, recent, SIGNS } from "./events.js";

const KEEP = 1000, SHOWN = 250, FEW = 8;
const DAY = 86_400_000;
const NEAR = 3_000, SETUP = 10_000, REPEAT = 60_000; // between what belongs to one happening: a decision, a connection, what a device repeats
const AWAY = 3_600_000; // a device that returns within this came back
const PHOTO = /photo|snapshot|camera/; // in the name of a tool that takes one

const w = s.timeline;
const KINDS = { connect: "connections", leave: "connections", pending: "connections", contested: "connections", call: "calls", task: "calls", photo: "calls", change: "changes", catalog: "changes", notifications: "notifications" };

// belongs names the happening that an entry is of, and how long after its last entry another one may come.
function belongs({ kind, data, key }) {
  const type = kind === "event" ? data.type : kind === "record" ? data.kind : "", reason = data.reason ?? data.cause;
  if (data.call) return ["call", data.call, Infinity];
  if (kind === "change") return ["change", data.who, NEAR];
  if (kind === "audit") return data.kind === "device" ? ["change", data.key, NEAR] : ["other", key, 0];
  if (kind === "catalog" || type === "catalog") return ["catalog", "", SETUP];
  if (type === "online" || type === "connected" || reason === "superseded" || (type === "ota.check" && /^offers/.test(reason))) return ["connect", "", SETUP];
  if (type === "offline" || type === "closed") return ["leave", "", NEAR];
  if (type === "pending" || type === "activation.try" || reason === "pending") return ["pending", "", REPEAT];
  if (type === "contested" || reason === "contested") return ["contested", "", REPEAT];
  if (type === "call") return ["call", key, 0];
  if (type === "task") return ["task", `${data.job} ${data.round}`, Infinity];
  if (type === "notifications") return ["notifications", "", Infinity];
  return [type === "photo" ? "photo" : "other", `${type} ${reason}`, REPEAT];
}

// merge makes happenings, newest first, of entries, newest first: {kind, of, key, at, text, sign, tone, entries, call, job}.
export function merge(entries) {
  const found = [], open = new Map();
  let photo = null; // the last call that took one: the event of a photo does not name its call
  for (const e of entries.toReversed()) {
    const [of, name, within] = belongs(e), key = `${of} ${name}`, at = Date.parse(e.at);
    const taken = of === "photo" && photo && at < photo.last + REPEAT;
    let h = taken ? photo : open.get(key);
    if (!h || (!taken && at - h.last > within)) {
      found.push(h = { of, key: e.key, at: e.at, entries: [], before: of === "connect" && open.get("leave ") });
      open.set(key, h);
      if (of === "leave") open.delete("connect ");
      if (of === "connect") open.delete("leave ");
      if (of !== "notifications") open.delete("notifications ");
    }
    h.entries.push(e);
    h.last = at;
    if (taken) photo = null;
    else if (of === "call" && PHOTO.test(e.data.tool ?? e.data.action ?? "")) photo = h;
  }
  return found.map((h) => ({ ...h, ...tell(h), kind: KINDS[h.of] || "other" })).filter((h) => h.text).sort((a, b) => Date.parse(b.at) - Date.parse(a.at));
}

// tell says a happening in words.
function tell({ of, entries, before }) {
  const all = (kind, type) => entries.filter((e) => e.kind === kind && (!type || (kind === "event" ? e.data.type : e.data.kind) === type)).map((e) => e.data);
  const [event, record, act] = [all("event")[0], all("record")[0], all("audit")[0]], times = entries.reduce((n, e) => n + (e.data.count || 1), 0);
  const by = (name, text) => capital(name ? `${name} ${text}` : text);
  const plain = (type, data, n) => ({ text: capital(word("event", type, data)) + (n > 1 ? ` ${s.times(n)}` : ""), sign: SIGNS[type]?.[0] || "•", tone: SIGNS[type]?.[1] || "" });
  switch (of) {
    case "connect": {
      const online = all("event", "online").at(-1), ready = all("record", "connected").at(-1), began = online?.time || ready?.at, away = before && (Date.parse(began) - before.last) / 1000;
      if (!online && !ready) return all("record", "ota.check").length ? { text: capital(word("record", "ota.check", record)) + (times > 1 ? ` ${s.times(times)}` : ""), sign: "•" } : {};
      return { text: w.connected(word("transport", online?.transport || ready.transport), before && away < AWAY && duration(away), ready?.text), sign: "↑", tone: "ok", at: began };
    }
    case "leave": {
      const closed = all("record", "closed")[0], reason = event?.reason ?? closed.cause;
      return { text: w.left(capital(word("reason", reason, 1)), closed?.duration_ms >= 1000 && duration(closed.duration_ms / 1000, true), closed?.calls), sign: "↓", tone: "bad" };
    }
    case "call": {
      const task = all("event", "task")[0], { outcome = "", cause = "" } = act || record || {}, how = outcome || cause || task?.outcome || "";
      const message = act ? act.kind === "message" : how === "sent", tool = act?.action ?? record?.tool;
      const took = record?.duration_ms ?? (act?.duration_ns && act.duration_ns / 1e6), done = tool ? (message ? w.sent(tool) : w.called(s.deed(tool, act?.arguments))) : w.someCall;
      const tone = how === "ok" ? "ok" : how === "sent" || how === "restarting" ? "" : "bad";
      return { text: `${by(act?.name || act?.key, done)}: ${word("auditOutcome", how)}${took ? `, ${milliseconds(took)}` : ""}`, sign: all("event", "photo").length ? "◎" : tone === "bad" ? "✕" : "▶", tone, call: (act || record || task).call, job: task?.job ?? /^job (\w+)/.exec(act?.detail)?.[1], why: tone === "bad" };
    }
    case "task": return { text: w.task(word("outcome", event.outcome || event.state)), sign: "▶", tone: event.outcome === "failed" ? "bad" : "", job: event.job };
    case "change": {
      const changes = all("change"), who = act?.name || act?.key || changes[0]?.who, refused = all("audit").find((a) => a.outcome !== "ok");
      const said = changes.length ? changes.map((c) => word("aspect", c.aspect.split(":")[0], c)) : all("audit").map((a) => `${word("did", a.action)}${a.detail ? ` (${a.detail})` : ""}`);
      return { text: by(changes.some((c) => c.who === "device") ? "" : who, said.join(s.search.and)) + (refused ? `: ${word("auditOutcome", refused.outcome)}` : ""), sign: refused ? "✕" : "✎", tone: refused ? "bad" : "" };
    }
    case "catalog": return event ? { text: w.tools(...["added", "removed", "changed"].map((x) => event[x]?.length || 0)), sign: "±" } : {};
    case "notifications": return { text: `${plural(entries.length, word("kind", "notifications"))}: ${[...new Set(all("event").map((e) => e.method))].join(", ")}`, sign: "◇" };
    case "pending": case "contested": return plain(of, event || {}, 1);
    case "photo": return { ...plain("photo", event, 1), text: `${capital(word("event", "photo"))}: ${event.question ?? ""}` };
  }
  if (act) return { text: by(act.name || act.key, `${word("did", act.action)} ${act.detail ?? ""}: ${word("auditOutcome", act.outcome)}`), sign: "•", tone: act.outcome === "ok" ? "" : "bad" };
  return record ? { text: capital(word("record", record.kind, record)) + (times > 1 ? ` ${s.times(times)}` : ""), sign: "•", tone: "warn" } : plain(event.type, event, times);
}

export function Timeline({ device, query, can, few }) {
  const list = useData((signal) => load(device.id, can, signal), [device.id]);
  const feed = useFeed(list, KEEP);
  const kinds = new Set((query.get("kinds") || Object.keys(w.kinds).join(",")).split(","));
  const all = useMemo(() => merge(list.data || []), [list.data]);
  useEvents((message) => {
    if (message.gap) feed.gap();
    feed.add((message.events || []).filter((e) => e.data.device === device.id && e.type !== "job.phase").map(eventEntry).reverse());
  });
  useActed(() => !feed.paused && list.soon());
  const toggle = (kind) => {
    const next = new Set(kinds);
    next.has(kind) ? next.delete(kind) : next.add(kind);
    setQuery({ kinds: next.size === Object.keys(w.kinds).length ? "" : [...next].join(",") || "-" }, { replace: true });
  };
  const shown = all.filter((h) => (few ? h.kind !== "notifications" : kinds.has(h.kind))).slice(0, few ? FEW : SHOWN);
  const days = shown.map((h) => clock(h.at).slice(0, 10));
  const log = html`<${Loaded} from=${list}>${() => (shown.length ? html`<ol class="log happened">${shown.flatMap((h, i) => [
    days[i] !== days[i - 1] && days.at(-1) !== days[0] && html`<li class="day" key=${days[i]}>${days[i]}</li>`, html`<${Happening} key=${h.key} happening=${h} />`])}</ol>` : html`<p class="blank">${w.empty}</p>`)}<//>`;
  if (few) return html`<${Panel} title=${w.title} more=${to(["devices", device.id, "timeline"])}>${log}<//>`;
  return html`<div class="chips" role="group" aria-label=${w.title}>${Object.entries(w.kinds).map(([kind, text]) => html`<button key=${kind} type="button" class="chip" aria-pressed=${kinds.has(kind)} onClick=${() => toggle(kind)}>${text}</button>`)}</div>
    <div class="actions"><${Pause} feed=${feed} /><button type="button" onClick=${() => save(new Blob([JSON.stringify(list.data, null, 2)], { type: "application/json" }), `timeline-${device.id.replaceAll(":", "")}.json`)}>${w.download}</button></div><section class="panel">${log}</section>`;
}

// Happening is one line; a click shows what it was made from.
function Happening({ happening: h }) {
  const [open, setOpen] = useState(false);
  return html`<li class="one"><details onToggle=${(e) => setOpen(e.target.open)}><summary><time datetime=${h.at} title=${h.at}>${clock(h.at, { date: false })}</time><span class=${h.tone} aria-hidden="true">${h.sign}</span><bdi>${line(h.text, 300)}</bdi></summary>
    ${open && html`<div>${h.job && html`<p><${Link} href=${to(["jobs", h.job])}>${w.job}<//></p>`}${h.call && !h.why && html`<p><${Link} href=${to(["calls", h.call])}>${s.controls.call}<//></p>`}
      ${h.entries.slice(0, SHOWN).map((e) => html`<${Quoted} key=${e.key} pre from=${`${w.sources[e.kind]}, ${clock(e.at, { ms: true })}`} text=${JSON.stringify(e.data, null, 1)} />`)}</div>`}</details>
    ${h.why && h.call && html`<${Link} href=${to(["calls", h.call])} aria-label=${`${s.why} ${line(h.text, 60)}`}>${s.why}<//>`}</li>`;
}

const eventEntry = ({ type, data }) => ({ kind: "event", at: data.time, key: identity(type, data), data: { ...data, type } });

// load joins what the key may read. A part that this node does not have is left out.
async function load(id, can, signal) {
  const since = new Date(now() - DAY).toISOString();
  const part = (promise, kind, key, at = (x) => x.at) => promise.then(({ items }) => items.map((x, i) => ({ kind, at: at(x), key: `${kind} ${key(x, i)}`, data: x })), (error) => {
    if (error.status === 404 || error.status === 403) return [];
    throw error;
  });
  const device = (name, limit) => get(path("v1", "devices", id, name) + encode({ limit }), signal);
  const parts = await Promise.all([
    recent({ device: id, since }, KEEP, signal).then((events) => events.map(eventEntry)),
    part(device("log", 500), "record", (r, i) => r.call || `${r.at} ${i}`),
    part(device("changes", 200), "change", (c) => c.revision),
    part(device("catalogs", 100), "catalog", (c) => c.since, (c) => c.since),
    can("admin") ? part(get("/v1/audit" + encode({ device: id, since, limit: 500 }), signal), "audit", (a) => `${a.run} ${a.seq}`) : [],
  ]);
  return parts.flat().filter((e) => e.at).sort((a, b) => Date.parse(b.at) - Date.parse(a.at)).slice(0, KEEP);
}
