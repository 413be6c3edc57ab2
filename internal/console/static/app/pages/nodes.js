// Is the cluster well, and is it set up right?
import { html } from "../html.js";
import { ApiError, get, query as encode, send } from "../api.js";
import { useData } from "../data.js";
import { capital, count } from "../format.js";
import { Link, setQuery, to } from "../route.js";
import { s, word } from "../strings.js";
import { Command, Copyable, flag, Grid, Loaded, Page, Panel, Time } from "../ui.js";
import { line } from "../untrusted.js";

// readiness answers for the node that was asked; 503 is an answer here.
export async function readiness(signal) {
  try {
    return await (await send("GET", "/readyz", { signal })).json();
  } catch (error) {
    if (error instanceof ApiError && error.status === 503) return error.problem;
    throw error;
  }
}

const c = s.nodes.columns;

export function Nodes() {
  const nodes = useData((signal) => get("/v1/nodes", signal), [], { every: 5000 });
  const ready = useData(readiness, [], { every: 5000 });
  return html`<${Page} title=${s.nodes.title} />
    <${Loaded} from=${ready}>${(r) => html`<p class=${r.ready ? "notice" : "notice warn"}>${r.ready ? s.nodes.ready : html`${s.nodes.down} ${Object.entries(r.down || {}).map(([part, why]) => line(`${part}: ${why}`, 200)).join("; ")}`}</p>`}<//>
    <section class="panel"><${Loaded} from=${nodes}>${({ items }) => html`<${Grid} id=${(n) => n.name} items=${items} columns=${[
      { name: c.node, text: (n) => n.name, cell: (n) => html`<${Link} href=${to(["stats"], { node: n.name })}><bdi>${line(n.name, 60)}</bdi><//>`, keep: true }, { name: c.devices, kind: "right", text: (n) => n.devices, cell: (n) => html`<${Link} href=${to(["devices"], { node: n.name })}>${count(n.devices)}<//>`, keep: true },
      { name: c.version, text: (n) => n.version }, { name: c.started, text: (n) => n.started, cell: (n) => html`<${Time} at=${n.started} />` }, { name: c.address, text: (n) => n.api, cell: (n) => html`<code>${line(n.api, 80)}</code>` }]} />`}<//></section>
    <${Command} cli=${["nodes"]} url="/v1/nodes" />`;
}

const SEVERITIES = ["error", "warning", "info"]; // worst first
const HIDDEN = /password|token|secret|username|key$/i;

// reply writes the reply to a device without what would let others connect as it.
const reply = (value) => JSON.stringify(value, (name, v) => (HIDDEN.test(name) && typeof v === "string" ? s.doctor.secret : v), 2);

export function Doctor({ query }) {
  const device = query.get("device") || "";
  const found = useData((signal) => get("/v1/diagnosis" + encode({ device }), signal), [device]);
  const submit = (event) => {
    event.preventDefault();
    setQuery({ device: new FormData(event.target).get("device").trim() });
  };
  return html`<${Page} title=${s.doctor.title} /><p>${s.doctor.lead}</p>
    <form class="row" onSubmit=${submit}><label>${s.doctor.device}<input name="device" defaultValue=${device} spellcheck=${false} /></label><button>${s.doctor.check}</button></form>
    <${Loaded} from=${found}>${(d) => html`
      <${Panel} title=${s.doctor.findings}>${d.findings.length ? html`<ul class="wrong whole">${d.findings.toSorted((x, y) => SEVERITIES.indexOf(x.severity) - SEVERITIES.indexOf(y.severity)).map((f, i) => html`<li key=${i}><span class=${{ error: "bad", warning: "warn" }[f.severity] || "faint"} aria-hidden="true">${{ error: "✕", warning: "◐" }[f.severity] || "•"}</span>
        <span><b>${capital(word("severity", f.severity))}:</b> ${line(f.message, 600)} <small class="mono">${line(f.setting, 60)}</small></span></li>`)}</ul>` : html`<p class="told"><span class="ok" aria-hidden="true">✓</span> ${s.doctor.none}</p>`}<//>
      <section class="card"><h2>${s.doctor.ota}</h2><${Copyable} text=${d.ota_url} /></section>
      <section class="card"><h2>${s.doctor.reply} <small>${d.status}</small></h2><pre>${reply(d.reply)}</pre></section>`}<//>
    <${Command} cli=${["doctor", ...flag("--mac", device)]} url=${"/v1/diagnosis" + encode({ device })} />`;
}
