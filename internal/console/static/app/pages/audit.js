// Who did what? The record of calls and changes.
import { html, useState } from "../html.js";
import { download, get, query as encode } from "../api.js";
import { useData, useNames } from "../data.js";
import { capital, clock, milliseconds } from "../format.js";
import { Link, setQuery, to } from "../route.js";
import { codes, s, word } from "../strings.js";
import { Act, Command, flag, Grid, Loaded, Outcome, Page, Pager } from "../ui.js";
import { line } from "../untrusted.js";

// CHOICES are the filters with lists; their words are in the catalogue of codes.
const WORDS = { kind: "auditKind", outcome: "auditOutcome" };
const CHOICES = { kind: Object.keys(codes.auditKind), outcome: Object.keys(codes.auditOutcome) };
const FILTERS = ["key", "device", "kind", "outcome", "since"];

export function Audit({ query }) {
  const filters = Object.fromEntries(FILTERS.map((name) => [name, query.get(name) || ""]));
  const cursor = query.get("cursor") || "";
  const list = useData((signal) => get("/v1/audit" + encode({ ...filters, cursor, limit: 100 }), signal), [JSON.stringify(filters), cursor]);
  const [report, setReport] = useState(null);
  const submit = (event) => {
    event.preventDefault();
    const chosen = Object.fromEntries([...new FormData(event.target)].map(([name, value]) => [name, value.trim()]));
    setQuery({ ...chosen, since: chosen.since.replace(/^[\d-]{10}$/, "$&T00:00:00Z") });
  };
  const name = useNames((list.data?.items || []).map((e) => e.device).filter(Boolean)), c = s.audit.columns;
  const columns = [
    { name: c.time, text: (e) => e.at, cell: (e) => html`<time datetime=${e.at} title=${e.at}>${clock(e.at)}</time>`, keep: true }, { name: c.who, text: (e) => `${e.name || e.key || s.audit.nobody}${e.via ? ` · ${e.via}` : ""}` },
    { name: c.what, text: (e) => s.acted(e) + e.device, cell: (e) => html`<bdi>${capital(line(s.acted(e), 300))}</bdi> ${e.device && html`<${Link} href=${to(["devices", e.device])}><bdi>${line(name(e.device), 64)}</bdi><//>`}`, kind: "names", keep: true, bare: true },
    { name: c.outcome, text: (e) => word("auditOutcome", e.outcome) + (e.count > 1 ? ` ${s.times(e.count)}` : ""), cell: (e) => html`<${Outcome} tone=${e.outcome === "ok" ? "good" : "bad"}>${line(word("auditOutcome", e.outcome), 60)}<//>${e.count > 1 && ` ${s.times(e.count)}`}`, bare: true },
    { name: c.detail, text: detail, cell: (e) => html`<bdi>${line(detail(e), 2000)}</bdi>${e.call && html` <${Link} href=${to(["calls", e.call])} aria-label=${`${s.controls.call} ${e.call}`}>${s.controls.call}<//>`}`, kind: "names", bare: true }];
  return html`<${Page} title=${s.audit.title} />
    <form class="row" onSubmit=${submit} key=${JSON.stringify(filters)}>${FILTERS.map((name) => html`<label key=${name}>${s.audit.filters[name]}${CHOICES[name] ? html`<select name=${name} onChange=${(e) => e.target.form.requestSubmit()}><option value="">${s.all}</option>
      ${CHOICES[name].map((x) => html`<option key=${x} value=${x} selected=${x === filters[name]}>${capital(word(WORDS[name], x))}</option>`)}</select>` : html`<input name=${name} defaultValue=${filters[name]} spellcheck=${false} placeholder=${name === "since" ? "2026-11-24" : ""} />`}</label>`)}<button>${s.devices.apply}</button></form>
    <div class="actions"><${Act} label=${s.audit.verify} act=${async () => setReport(await get("/v1/audit/verify" + encode({ since: filters.since })))} />
      <${Act} label=${s.audit.export} act=${() => download("/v1/audit/export" + encode({ since: filters.since }), "audit.jsonl")} /></div>
    ${report && html`<p class=${report.intact ? "notice" : "problem"} role="status">${report.intact ? s.audit.intact(report.entries) : html`${s.audit.broken} ${line(report.faults.join("; "), 400)}`}</p>`}
    <section class="panel"><${Loaded} from=${list}>${({ items, next_cursor: next }) => (items.length ? html`<${Grid} columns=${columns} items=${items} id=${(e) => `${e.run} ${e.seq}`} />` : html`<p class="blank">${next ? s.audit.further : s.audit.empty}</p>`)}<//></section>
    <${Pager} next=${list.data?.next_cursor} cursor=${cursor} onCursor=${(c) => setQuery({ cursor: c })} />
    <${Command} cli=${["audit", ...flag("--device", filters.device), ...flag("--key", filters.key)]} url=${"/v1/audit" + encode(filters)} />`;
}

const detail = (e) => [e.rule, e.detail, e.duration_ns && milliseconds(e.duration_ns / 1e6)].filter(Boolean).join(" · ");
