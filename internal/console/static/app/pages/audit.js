// Who did what? The record of calls and changes.
import { html, useState } from "../html.js";
import { download, get, query as encode } from "../api.js";
import { useData } from "../data.js";
import { clock, milliseconds } from "../format.js";
import { Link, setQuery, to } from "../route.js";
import { s } from "../strings.js";
import { Act, Command, Empty, flag, Loaded, Page, Pager, Rows } from "../ui.js";
import { line } from "../untrusted.js";

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
  return html`<${Page} title=${s.audit.title} />
    <form class="row" onSubmit=${submit} key=${JSON.stringify(filters)}>${FILTERS.map((name) => html`<label key=${name}>${s.audit.filters[name]}<input name=${name} defaultValue=${filters[name]} spellcheck=${false} placeholder=${name === "since" ? "2026-11-24" : ""} /></label>`)}<button>${s.devices.apply}</button></form>
    <div class="actions"><${Act} label=${s.audit.verify} act=${async () => setReport(await get("/v1/audit/verify" + encode({ since: filters.since })))} />
      <${Act} label=${s.audit.export} act=${() => download("/v1/audit/export" + encode({ since: filters.since }), "audit.jsonl")} /></div>
    ${report && html`<p class=${report.intact ? "notice" : "problem"} role="status">${report.intact ? s.audit.intact(report.entries) : html`${s.audit.broken} ${line(report.faults.join("; "), 400)}`}</p>`}
    <${Loaded} from=${list}>${({ items }) => (items.length ? html`<${Rows} columns=${s.audit.columns}>${items.map((e) => html`<tr key=${`${e.run} ${e.seq}`}>
      <td class="first"><time datetime=${e.at} title=${e.at}>${clock(e.at)}</time></td><td><bdi>${line(e.name || e.key || "–", 40)}</bdi>${e.via && html` <small>${line(e.via, 20)}</small>`}</td>
      <td><bdi>${line([e.kind, e.action].filter(Boolean).join(" "), 80)}</bdi> ${e.device && html`<${Link} href=${to(["devices", e.device])}><bdi>${line(e.device, 64)}</bdi><//>`}</td>
      <td>${line(e.outcome ?? "", 40)}${e.count > 1 && ` ${s.audit.times(e.count)}`}</td><td class="names"><bdi>${line(detail(e), 240)}</bdi></td></tr>`)}<//>` : html`<${Empty}>${s.audit.empty}<//>`)}<//>
    <${Pager} next=${list.data?.next_cursor} cursor=${cursor} onCursor=${(c) => setQuery({ cursor: c })} />
    <${Command} cli=${["audit", ...flag("--device", filters.device), ...flag("--key", filters.key)]} url=${"/v1/audit" + encode(filters)} />`;
}

const detail = (e) => [e.rule, e.detail, e.arguments !== undefined && e.arguments !== null && JSON.stringify(e.arguments), e.duration_ns && milliseconds(e.duration_ns / 1e6)].filter(Boolean).join(" · ");
