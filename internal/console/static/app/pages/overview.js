// Is my fleet well? What is wrong comes first, then figures of the last hour, then why devices are away and what happened.
import { html } from "../html.js";
import { get, now, query as encode } from "../api.js";
import { useData, useEvents, useFeed, useNames, useTick } from "../data.js";
import { clock, count, term } from "../format.js";
import { figure, last, most, Spark, total } from "../plot.js";
import { Link, to } from "../route.js";
import { s, word } from "../strings.js";
import { Command, Copyable, Loaded, Page, Panel } from "../ui.js";
import { line } from "../untrusted.js";
import { Attention, useAttention } from "./attention.js";
import { recent, row, SIGNS } from "./events.js";

const HOUR = 3_600_000;
const READ = 1000, KEEP = 300; // events that are read, and of them the notable ones that are kept
const LINES = 10;
const TOGETHER = 10_000; // the same of many devices within this is one happening
const AWAY = 600_000; // a device that returns within this came back
const MOST = 6; // values of a share that have a line

const o = s.overview;
const NOTABLE = new Set(["online", "offline", "catalog", "photo", "firmware", "pending", "contested"]);
const notable = (event) => NOTABLE.has(event.type) || (event.type.startsWith("job.") && event.type !== "job.phase");

export function Overview({ can, self, needs }) {
  useTick();
  const { fleet } = needs;
  const whole = Object.keys(self.devices || {}).length === 0; // the figures over time are of the whole fleet
  const stats = useData((signal) => (whole ? get("/v1/stats" + encode({ since: new Date(now() - HOUR).toISOString(), step: "1m" }), signal) : null), [], { every: 60_000 });
  const { lines, unknown, doctor } = useAttention({ can, needs, stats });
  const events = useData(async (signal) => (can("events:read") ? (await recent({ since: new Date(now() - HOUR / 4).toISOString() }, READ, signal)).filter(notable).slice(-KEEP).map(row).reverse() : []), []);
  const feed = useFeed(events, KEEP);
  useEvents((message) => {
    if (message.status) return;
    const found = (message.events || []).filter(notable);
    if (message.gap || message.omitted || found.length) fleet.soon();
    feed.add(found.map(row).reverse());
  });
  return html`<${Page} title=${o.title} lead=${fleet.data && html`<span class="faint">${s.devices.counted(fleet.data.total, fleet.data.state.online)}</span>`} />
    <${Attention} lines=${lines} unknown=${unknown} />
    <${Loaded} from=${fleet}>${(f) => html`
      ${f.total === 0 && !(f.state.pending > 0) && html`<${Zero} ota=${doctor?.ota_url} />`}
      <${Tiles} fleet=${f} stats=${stats.data} />
      <div class="cols"><div class="stack">
        <${Shares} title=${o.offline(f.state.offline)} counts=${f.offline_reason} total=${f.state.offline} facet="reason" tone="idle" extra=${{ state: "offline" }} more=${to(["devices"], { state: "offline" })} none=${o.allWell} />
        ${can("events:read") && html`<${Happened} from=${events} />`}</div>
      <div class="stack">
        <${Shares} title=${o.firmwares} counts=${f.firmware} total=${f.total} facet="firmware" more=${to(["devices"])} none=${o.unseen} />
        <${Shares} title=${o.nodes} counts=${f.node} total=${f.state.online} facet="node" tone="ok" more=${can("admin") && to(["nodes"])} /></div></div>`}<//>
    <${Command} cli=${["fleet"]} url="/v1/fleet" />`;
}

// Tiles are four figures of the last hour, each with the line that led to it.
function Tiles({ fleet, stats }) {
  const sum = (name, values) => {
    const found = (stats?.series || []).filter((x) => x.name === name && (!values || values.includes(x.value)));
    return (found[0]?.points || []).map((_, i) => found.reduce((n, x) => (x.points[i] == null ? n : (n ?? 0) + x.points[i]), null));
  };
  const number = (points) => Math.round(total(stats, points));
  const online = sum("online"), calls = sum("calls"), failures = sum("calls", ["tool_error", "timeout", "refused"]), p99 = sum("call_p99");
  const tile = (title, value, small, points, tone) => html`<section class="panel tile"><h2>${title}</h2><p class=${`value ${tone === "bad" ? "bad" : ""}`}>${value} <small>${small}</small></p><${Spark} points=${points} tone=${tone} /></section>`;
  const made = stats && number(calls), failed = stats && number(failures), latest = p99.filter((v) => v != null);
  return html`<div class="tiles">${tile(o.online, count(fleet.state.online), o.of(fleet.total), online, "")}
    ${stats && html`${tile(o.calls, count(made), "", calls, "ok")}
      ${tile(o.failed, count(failed), failed > 0 && `${((failed / Math.max(made, failed)) * 100).toFixed(1)} %`, failures, failed > 0 ? "bad" : "idle")}
      ${tile(o.p99, figure(last(latest), "s"), latest.length > 0 && o.most(figure(most(latest), "s")), p99, "idle")}`}</div>`;
}

// Shares are the values of a dimension, the most frequent first. A bar is a share of the whole.
export function Shares({ title, counts, total, facet, extra, tone = "", more, none }) {
  const values = Object.entries(counts || {}).filter(([, n]) => n).sort((a, b) => b[1] - a[1]);
  if (!values.length && !none) return null;
  const named = values.filter(([value]) => value !== "other").slice(0, MOST), rest = values.reduce((n, [, m]) => n + m, 0) - named.reduce((n, [, m]) => n + m, 0);
  const share = (text, n) => html`<span><bdi>${text}</bdi></span><svg class=${`bar-share ${tone}`} aria-hidden="true"><rect width="100%" height="100%" rx="4" /><rect class="part" width=${`${Math.max(1, (n / Math.max(total, n)) * 100)}%`} height="100%" rx="4" /></svg><b class="num">${count(n)}</b>`;
  return html`<${Panel} title=${title} more=${more}>${values.length ? html`<ul class="shares">${named.map(([value, n]) => html`<li key=${value}>
      <${Link} href=${to(["devices"], value ? { ...extra, [facet]: value } : { ...extra, select: term(facet, "") })}>${share(line(value ? (facet === "reason" ? word(facet, value) : value) : o.unseen, 40), n)}<//></li>`)}
    ${rest > 0 && html`<li><span>${share(o.other, rest)}</span></li>`}</ul>` : html`<p class="told">${none}</p>`}<//>`;
}

// happenings makes one of what belongs together: a device that goes and comes back, its tools when it connects, and the same of
// many devices at the same time. Events and happenings are newest first.
export function happenings(events) {
  const found = [], left = new Map(), came = new Map(); // when a device went and came last
  for (const { type, data, key } of events.toReversed()) {
    const at = Date.parse(data.time), device = data.device, before = left.get(device);
    if (type === "offline" && data.reason === "superseded" || type === "catalog" && at < came.get(device) + TOGETHER) continue;
    const back = type === "online" && before && at < before.at + AWAY;
    if (back) before.happening.devices.delete(device);
    const kind = back ? "back" : type, of = kind + (type === "offline" ? data.reason : "");
    let happening = device && found.findLast((h) => h.of === of && at < h.at + TOGETHER && !h.devices.has(device));
    if (!happening) found.push(happening = { kind, of, devices: new Set() });
    Object.assign(happening, { data, key, at, away: back && (at - before.at) / 1000 });
    if (device) happening.devices.add(device);
    left.delete(device);
    if (type === "offline") left.set(device, { at, happening });
    if (type === "online") came.set(device, at);
  }
  return found.filter((h) => h.devices.size || !h.data.device).reverse();
}

function Happened({ from }) {
  const all = happenings(from.data || []).slice(0, LINES).map((h) => ({ ...h, only: h.devices.size === 1 && [...h.devices][0] }));
  const name = useNames(all.map((h) => h.only).filter(Boolean));
  const who = ({ only, devices, data, kind }) => {
    if (only) return html`<${Link} href=${to(["devices", only])}><bdi>${line(name(only), 60)}</bdi><//>`;
    if (devices.size) return html`<${Link} href=${to(["events"], { type: kind === "back" ? "online" : kind })}>${s.attention.devices(devices.size)}<//>`;
    return html`<${Link} href=${to(["jobs", data.job])}><bdi>${line(data.note || s.jobs.unnamed(data.action), 60)}</bdi><//>`;
  };
  return html`<${Panel} title=${o.happened} more=${to(["events"])}><${Loaded} from=${from}>${() => (all.length ? html`<ol class="log happened">${all.map((h) => {
    const [sign, tone] = SIGNS[h.kind] || ["▶", ""];
    return html`<li key=${h.key}><time datetime=${h.data.time} title=${h.data.time}>${clock(h.data.time, { date: false })}</time><span class=${tone} aria-hidden="true">${sign}</span>
      <span>${who(h)} ${line(word("event", h.kind, { ...h.data, n: h.devices.size, away: h.only && h.away }), 200)}</span>
      ${h.only && h.kind === "offline" ? html`<${Link} href=${to(["devices", h.only])} aria-label=${`${s.why} ${line(name(h.only), 60)}`}>${s.why}<//>` : html`<small>${h.only && h.data.transport && word("transport", h.data.transport)}</small>`}</li>`;
  })}</ol>` : html`<p class="told">${o.nothing}</p>`)}<//><//>`;
}

const Zero = ({ ota }) => html`<${Panel} title=${o.zero}><ol class="told">${o.zeroSteps.map((text, i) => html`<li key=${text}>${text}${i === 1 && ota && html`<${Copyable} text=${ota} />`}</li>`)}</ol><//>`;
